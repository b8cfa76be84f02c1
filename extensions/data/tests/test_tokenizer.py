"""`elman tokenizer train`: from texts to a model of its tokens; conversations from a template to an export that has it."""

import json

import numpy as np
import pytest
from train_helpers import TINY, checkpoint, metrics
from transformers import AutoTokenizer, DataCollatorForLanguageModeling

from elman_core.cli import main
from elman_core.data import open_file
from elman_core.model import LadderLM, byte_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"
SETS = [f"{table}.{k}={json.dumps(v)}" for table in ("data", "train") for k, v in TINY[table].items() if k != "steps"]


def flags(*more: str) -> list[str]:
    return [word for one in [*SETS, "train.warmup=0", *more] for word in ("--set", one)]


@pytest.fixture
def talks(tmp_path):
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    said = [{"role": "user", "content": "größe?"}, {"role": "assistant", "content": "two metres"}]
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 300)
    return tmp_path / "talks.jsonl"


@pytest.mark.parametrize("tokens", [True, False])
def test_conversations_become_a_model_of_answers_with_their_template(tokens, talks, tmp_path, capfd):
    bpe, packed, template = (
        tmp_path / "bpe",
        tmp_path / "packed" / "talks.bin",
        ["--template", str(tmp_path / "chat.jinja")],
    )
    more = ["--tokenizer", str(bpe)] if tokens else template
    if tokens:
        assert main(["tokenizer", "train", str(talks), "--vocab", "300", "--out", str(bpe), *template]) == 0
        said = capfd.readouterr()
        assert "all that these texts give" in said.out
        assert (len(said.out.splitlines()), said.err) == (1, "")
        assert main(["tokenizer", "train", str(talks), "--out", str(bpe), *template]) == 2
        assert "nothing is overwritten" in capfd.readouterr().err
    assert main(["data", "pack", str(talks), "--out", str(packed), *more]) == 0
    words = ["train", "e42@16x2", "--data", str(packed), "--out", str(tmp_path / "run"), "--steps", "2"]
    assert main([*words, *flags("data.heldout=0.2")]) == 0
    file = open_file(packed)
    share = file.counts(np.zeros(1, np.int64), file.size).mean()
    document = "<user>größe?\n<assistant>two metres\n\x1e"
    assert 0.1 < share < 0.6 if tokens else share == pytest.approx(12 / len(document.encode()))
    assert metrics(tmp_path / "run", "evaluation")[-1]["bytes"] > 0
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(tmp_path / "run"))
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "größe?"}], add_generation_prompt=True, tokenize=False
    )
    assert asked == "<user>größe?\n<assistant>"
    assert tokenizer.decode(tokenizer(asked).input_ids) == asked


def test_prompts_of_a_model_of_bytes_name_the_tokens_of_its_template_as_its_text_did(talks, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    tokenizer.save_pretrained(tmp_path / "more")
    LadderLM("e42", dim=16, depth=1).save_pretrained(tmp_path / "base")
    packed, template = str(tmp_path / "talks.bin"), str(tmp_path / "chat.jinja")
    how = ["--tokenizer", str(tmp_path / "more"), "--template", template, "--out", packed]
    assert main(["data", "pack", str(talks), *how]) == 0
    words = ["train", "--init", str(tmp_path / "base"), "--data", packed, "--out", str(tmp_path / "run")]
    assert main([*words, "--steps", "2", *flags("data.heldout=0.2")]) == 0
    prompt = AutoTokenizer.from_pretrained(checkpoint(tmp_path / "run")).apply_chat_template(
        [{"role": "user", "content": "größe?"}], add_generation_prompt=True, return_dict=False
    )
    assert prompt == [256, *"größe?\n".encode(), 257]
    assert prompt == open_file(packed).windows(np.zeros(1, np.int64), len(prompt))[0].tolist()


@pytest.mark.parametrize("tokens", [True, False])
def test_a_template_may_name_the_special_tokens_of_the_tokenizer(tokens, talks, tmp_path):
    bpe, template, tokenizer = tmp_path / "bpe", tmp_path / "chat.jinja", byte_tokenizer()
    template.write_text("{{ bos_token }}" + TEMPLATE.replace("\n", "{{ eos_token }}"))
    more = ["--template", str(template), "--out", str(tmp_path / "talks.bin")]
    if tokens:
        assert main(["tokenizer", "train", str(talks), "--vocab", "300", "--out", str(bpe), *more[:2]]) == 0
        tokenizer, more = AutoTokenizer.from_pretrained(bpe), [*more, "--tokenizer", str(bpe)]
    assert main(["data", "pack", str(talks), *more]) == 0
    said = json.loads(talks.read_text().splitlines()[0])["messages"]
    whole = tokenizer.apply_chat_template(said, chat_template=template.read_text(), return_dict=False)
    file = open_file(tmp_path / "talks.bin")
    packed = file.windows(np.zeros(1, np.int64), int(file.ends()[0]))[0].tolist()
    assert packed == [*whole, tokenizer.eos_token_id]
    assert packed.count(tokenizer.eos_token_id) == 4


def test_the_end_of_a_text_is_a_target_of_transformers_collator(tmp_path):
    (tmp_path / "text.txt").write_text("größe zwei " * 50)
    assert (
        main(["tokenizer", "train", str(tmp_path / "text.txt"), "--vocab", "300", "--out", str(tmp_path / "bpe")]) == 0
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bpe", padding_side="right")
    rows = [{"input_ids": tokenizer(text + tokenizer.eos_token).input_ids} for text in ("größe", "größe zwei")]
    labels = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)["labels"].tolist()
    assert [[label for label in row if label != -100] for row in labels] == [row["input_ids"] for row in rows]


def test_no_tokenizer_is_trained_without_a_text(tmp_path, capsys):
    (tmp_path / "empty.txt").write_bytes(b"")
    assert main(["tokenizer", "train", str(tmp_path / "empty.txt"), "--out", str(tmp_path / "bpe")]) == 2
    assert "there is no text in these inputs" in capsys.readouterr().err
    assert not (tmp_path / "bpe").exists()


def test_half_a_surrogate_pair_is_replaced_in_training_and_one_line_in_packing(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": "bad \\ud800"}\n')
    words, bpe = [str(tmp_path / "a.jsonl"), "--out"], str(tmp_path / "bpe")
    assert main(["tokenizer", "train", *words, bpe, "--vocab", "300"]) == 0
    capsys.readouterr()
    for more in ([], ["--tokenizer", bpe]):
        assert main(["data", "pack", *words, str(tmp_path / "out"), *more]) == 2
        said = capsys.readouterr().err
        assert "a.jsonl: a text has half of a surrogate pair" in said
        assert said.count("\n") == 1


def test_what_another_tokenizer_of_this_name_has_packed_is_packed_again_after_a_kill(tmp_path, monkeypatch):
    texts = {"a": "aaaa bbbb " * 40, "b": "cccc dddd " * 40}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
        words = [str(tmp_path / f"{name}.txt"), "--vocab", "260", "--out", str(tmp_path / f"bpe-{name}")]
        assert main(["tokenizer", "train", *words]) == 0
    place = tmp_path / "bpe-a"
    words = ["data", "pack", str(tmp_path / "b.txt"), "--tokenizer", str(place), "--out"]

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("elman_data.packing._merge", killed)
        assert main([*words, str(place / "out")]) == 130
    (tmp_path / "bpe-b" / "tokenizer.json").replace(place / "tokenizer.json")
    (place / "checksums.json").unlink()
    for name in ("out", "fresh"):
        assert main([*words, str(place / name)]) == 0
    assert (place / "out").read_bytes() == (place / "fresh").read_bytes()
