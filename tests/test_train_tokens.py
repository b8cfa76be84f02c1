"""Models of a tokenizer's tokens: trained, scored in bits per byte, continued, exported, begun with."""

import json
import math
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from packed_files import documents, write_packed, write_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from train_helpers import checkpoint, manifest, metrics, settings
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from elman_core.cli import main
from elman_core.data import Batch, Heldout
from elman_core.model import LadderLM, byte_tokenizer
from elman_core.model.checkpoint import load_checkpoint
from elman_core.model.tokenizer import require_extends, token_bytes, token_texts
from elman_core.registry import ConfigError, DataError
from elman_core.training.evaluate import in_tokens, on_windows
from elman_core.training.start import resume, start
from elman_core.training.text import open_text

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a tokenizer in `bpe`, a packed file, and a run on it."""
    root = tmp_path_factory.mktemp("tokens")
    tokenizer = write_tokenizer(root / "bpe", documents(), template=TEMPLATE)
    text = write_packed(root / "text.bin", documents(), root / "bpe", tokenizer)
    start(settings(text, "train.steps=12", "train.lr=0.02", "data.heldout=0.2"), root / "run", quiet=True).fit()
    return root


def sentencepiece(first=0, prepend="never"):
    """A vocabulary with ▁ for spaces and bytes for characters that it lacks; no token has a number below `first`."""
    names = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abeghilnrtöß", "▁the", "re"]
    made = Tokenizer(models.BPE({n: i + first for i, n in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("name", ["bpe", "bytes", "sentencepiece", "gaps"])
def test_the_bytes_of_tokens_are_those_of_the_text(name, made):
    kinds = {"bytes": byte_tokenizer, "sentencepiece": sentencepiece, "gaps": lambda: sentencepiece(first=100)}
    tokenizer = kinds[name]() if name in kinds else AutoTokenizer.from_pretrained(made / name)
    sizes, texts = token_bytes(tokenizer), token_texts(tokenizer)
    assert len(sizes) == len(tokenizer) + 100 * (name == "gaps")
    for text in ("the größe in 東京\n", "  two  spaces 🙂"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert b"".join(texts[i] for i in ids) == text.encode()
        assert sizes[ids].sum() == len(text.encode())
    assert (sizes[tokenizer.eos_token_id], texts[tokenizer.eos_token_id]) == (1, tokenizer.eos_token.encode())


def test_a_space_that_a_tokenizer_puts_before_documents_is_no_byte_of_the_text():
    tokenizer, texts = sentencepiece(prepend="always"), ("the größe", "re the", "a")
    ids = [i for text in texts for i in (*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id)]
    assert token_bytes(tokenizer)[ids].sum() == sum(len(text.encode()) + 1 for text in texts)


def test_a_text_of_bytes_is_not_held_out_for_tokens(made, tmp_path):
    (tmp_path / "bytes").write_bytes(b"bytes " * 1000)
    for text, held in ((made / "text.bin", tmp_path / "bytes"), (tmp_path / "bytes", made / "text.bin")):
        with pytest.raises(DataError, match="no tokens of the training text's tokenizer"):
            open_text(settings(text, f"data.heldout_file={str(held)!r}"))
    for name in ("text.bin", "text.bin.json"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    open_text(settings(made / "text.bin", f"data.heldout_file={str(tmp_path / 'text.bin')!r}"))


def test_a_run_is_scored_in_bits_per_byte_and_carries_its_tokenizer(made, tmp_path, capsys):
    run, model = made / "run", load_checkpoint(made / "run")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(run))
    assert model.config.vocab_size == len(tokenizer) == 300
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    nats = size = count = 0
    ((_, heldout),) = open_text(settings(made / "text.bin", "data.heldout=0.2")).heldout
    for i in range(heldout.windows):
        tokens = torch.from_numpy(heldout.read(np.array([i])).tokens.astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits[0].double()
        nats += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        sizes = token_bytes(tokenizer)[tokens[0, 1:].numpy()]
        size, count = size + int(sizes.sum()), count + len(sizes)
    last = metrics(run, "evaluation")[-1]
    assert (last["bytes"], last["tokens"]) == (size, count)
    assert last["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert last["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert main(["eval", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-6)
    about = json.loads((made / "text.bin.json").read_text())
    shutil.copy(made / "text.bin", raw := tmp_path / "raw")
    raw.write_text("\x1e".join(documents()))
    assert main(["eval", str(run), "--data", str(raw), "--window", "200", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["bytes"] > 0.98 * 200 * (other["bytes"] // 200)
    assert other["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=0.2)
    step = metrics(run)[-1]
    assert step["bits_per_byte"] == pytest.approx(step["loss"] / math.log(2) * about["tokens"] / about["bytes"])


def test_a_text_that_says_the_end_of_a_document_goes_on(made):
    tokenizer = AutoTokenizer.from_pretrained(made / "bpe")
    text = np.frombuffer(f".before {tokenizer.eos_token} after\x1ethe next".encode(), np.uint8)
    whole = Batch(text[None], np.zeros(1, np.int64), np.ones(1, bool))
    ids = in_tokens(Heldout(1, len(text) - 1, lambda _: whole), tokenizer).read(np.zeros(1, np.int64)).tokens[0]
    assert (ids == tokenizer.eos_token_id).sum() == 2, "before the first document and before the second"
    assert tokenizer.decode(ids[1:]).startswith(f"before {tokenizer.eos_token} after")


def test_windows_of_bytes_have_their_own_size_whatever_space_a_tokenizer_puts_before_them():
    model = LadderLM("gru", dim=16, depth=1, vocab_size=len(sentencepiece())).eval()
    text = np.frombuffer("the  größe\x1e\x1ethere in the lab\n".encode(), np.uint8)
    text = np.stack([text, np.roll(text, 9), np.roll(text, 13)])  # one begins inside a character, one with a document
    whole = Batch(text, np.arange(3), np.ones(3, bool))
    heldout = Heldout(3, text.shape[1] - 1, lambda rows: Batch(text[rows], rows, whole.fresh[rows]))
    sizes = [len(row[1:].tobytes().decode(errors="ignore").encode()) for row in text]
    for prepend in ("always", "never"):
        tokenizer = sentencepiece(prepend=prepend)
        found = on_windows(model, in_tokens(heldout, tokenizer), 2, sizes=token_bytes(tokenizer))
        assert found["bytes"] == sum(sizes)


def test_a_text_too_short_for_windows_is_scored_as_the_errors_say(made, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short text.txt").write_text("the model reads größe")
    words = ["eval", str(made / "run"), "--data", "short text.txt"]
    assert main(words) == 2
    assert "elman eval --all scores it" in capsys.readouterr().err
    assert main([*words, "--all"]) == 2
    command, _, then = capsys.readouterr().err.partition(": ")[2].partition(": ")[2].partition(", then ")
    assert main(shlex.split(command)[1:]) == 0
    assert main([*words[:2], "--all", *then.split()]) == 0
    assert "21 bytes all" in capsys.readouterr().out


def test_an_export_has_tokenizer_and_chat_template_in_a_fresh_process(made, tmp_path):
    assert main(["export", str(made / "run"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    code = (
        "import sys, elman_core; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model, t = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))\n"
        "ids = t.apply_chat_template([{'role': 'user', 'content': 'größe'}], return_tensors='pt', return_dict=True)\n"
        "out = model.generate(**ids, max_new_tokens=3, do_sample=False)\n"
        "print(t.decode(ids['input_ids'][0]), out.shape[1] - ids['input_ids'].shape[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], capture_output=True, text=True, check=False)
    assert done.stdout == "user: größe\n 3\n", done.stderr[-500:]


def test_generate_writes_the_text_of_the_tokens(made, capsysbinary):
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint(made / "run")), load_checkpoint(made / "run")
    prompt = tokenizer("the größe 東", return_tensors="pt", add_special_tokens=False)
    greedy = model.generate(**prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)
    words = ["generate", str(made / "run"), "-p", "the größe 東", "-t", "0", "-n", "24", "--stop", "none"]
    assert main(words) == 0
    whole = tokenizer.decode(greedy[0, prompt.input_ids.shape[1] :])
    written = capsysbinary.readouterr().out  # with the bytes of an unfinished character
    assert written.decode(errors="replace") == whole
    assert main([*words[:-1], "the model"]) == 2
    assert b"--stop takes one token" in capsysbinary.readouterr().err


def test_a_model_is_begun_with_on_its_own_tokens_and_gets_new_ones(made, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(made / "bpe")
    tokenizer.add_tokens([AddedToken("<|user|>", special=True), AddedToken("<|model|>", special=True)])
    tokenizer.save_pretrained(tmp_path / "more")
    text = write_packed(tmp_path / "text.bin", documents(), tmp_path / "more", tokenizer, masked=True)
    wanted = settings(
        text, "model.variant=''", "model.hidden_size=512", "model.num_hidden_layers=6", f"model.init={made / 'run'}"
    )
    before, trainer = load_checkpoint(made / "run"), start(wanted, tmp_path / "run", quiet=True)
    weight = trainer.model.model.embed_tokens.weight
    assert weight.shape == (302, 16)
    assert torch.equal(weight[:300], before.model.embed_tokens.weight)
    assert trainer.model.lm_head.weight is weight
    trainer.advance(2)
    trainer._save()
    trainer.folder.close()
    shutil.rmtree(tmp_path / "more")
    with pytest.raises(DataError, match="there is no tokenizer"):
        resume(tmp_path / "run", quiet=True)
    tokenizer.save_pretrained(tmp_path / "more")
    resume(tmp_path / "run", quiet=True).fit()
    assert AutoTokenizer.from_pretrained(checkpoint(tmp_path / "run")).convert_tokens_to_ids("<|model|>") == 301
    assert manifest(tmp_path / "run")["init"]["model"] == str(checkpoint(made / "run"))


def test_a_model_of_bytes_is_not_told_to_pack_with_its_tokenizer(made):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(made / "run"))
    with pytest.raises(ConfigError, match="not the bytes of small: pack the text without --tokenizer"):
        require_extends(tokenizer, byte_tokenizer(), "small")


@pytest.mark.parametrize("what", ["bytes", "other", "changed"])
def test_tokens_of_another_tokenizer_are_refused(what, made, tmp_path):
    (tmp_path / "raw").write_text("\x1e".join(documents()))
    tokenizer = write_tokenizer(tmp_path / "bpe", documents(5), vocab=290)
    text = write_packed(tmp_path / "text.bin", documents(), tmp_path / "bpe", tokenizer)
    if what == "changed":
        write_tokenizer(tmp_path / "bpe", documents(), vocab=290)
        with pytest.raises(DataError, match="is not the tokenizer that made these tokens"):
            start(settings(text), tmp_path / "run", quiet=True)
        return
    data = {"bytes": tmp_path / "raw", "other": text}[what]
    wanted = settings(
        data, "model.variant=''", "model.hidden_size=512", "model.num_hidden_layers=6", f"model.init={made / 'run'}"
    )
    with pytest.raises(ConfigError, match="not the tokens of"):
        start(wanted, tmp_path / "run", quiet=True)
