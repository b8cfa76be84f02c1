"""Every installed variant as files: dtypes, shards, devices and offload, state dicts of other layouts, cards, the hub."""

import os
import re
from pathlib import Path
from unittest.mock import MagicMock

import hf_helpers
import pytest
import torch
from hf_helpers import GREEDY, KINDS, PROMPT, every_kind, tiny
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from elman_core.cli import main
from elman_core.data import ByteFile
from elman_core.model import LadderConfig, LadderForCausalLM, model_card
from elman_core.model.card import set_licence
from elman_core.registry import CheckpointError, ConfigError, resolve
from elman_core.storage import write_checksums

no_gradients = hf_helpers.no_gradients  # for every test here


@every_kind
def test_auto_classes_dtypes_and_shards_give_the_same_model(variant, tmp_path):
    model = tiny(variant, dtype=torch.float32)
    expected = model(PROMPT).logits
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert AutoConfig.from_pretrained(tmp_path).variant == model.config.variant
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(PROMPT).logits, expected)
    hidden = AutoModel.from_pretrained(tmp_path)(PROMPT).last_hidden_state
    assert torch.equal(hidden @ model.lm_head.weight.T, expected)
    model.save_pretrained(tmp_path)
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    expected = model(PROMPT).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(PROMPT).logits, expected)
    assert AutoTokenizer.from_pretrained(tmp_path)("abc").input_ids == [97, 98, 99]
    for dtype in ("bfloat16", torch.float16, "auto"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        want = torch.float32 if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."))
        assert loaded.dtype == loaded.lm_head.weight.dtype == want
        kept = {n.rpartition(".mixer.")[2] for n, t in loaded.state_dict().items() if t.dtype != want}
        assert kept <= {n for block in loaded.model.layers for n in block.mixer.fp32_params}
        built = AutoModelForCausalLM.from_config(loaded.config, dtype=want)
        assert {n: t.dtype for n, t in built.state_dict().items()} == {
            n: t.dtype for n, t in loaded.state_dict().items()
        }
        assert loaded.generate(PROMPT, **GREEDY).shape == (2, 17)
        loaded.save_pretrained(tmp_path / "again")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
        assert torch.equal(again(PROMPT).logits, loaded(PROMPT).logits)


def test_the_folder_of_a_run_is_refused_with_what_to_load(tmp_path):
    tiny("e42").save_pretrained(tmp_path / "checkpoints" / "step-00000001")
    with pytest.raises(CheckpointError, match=r"is a run, not a model: load find_checkpoint\(\".+\"\)"):
        LadderForCausalLM.from_pretrained(tmp_path)


def test_defaults_of_generation_are_changed_by_saving(tmp_path):
    model = tiny("e42", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    write_checksums(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 5}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json is truncated"):
        LadderForCausalLM.from_pretrained(tmp_path)
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(tmp_path)
    assert LadderForCausalLM.from_pretrained(tmp_path).generation_config.max_new_tokens == 5


def test_an_upload_has_the_tokenizer_too(tmp_path, monkeypatch):
    sent: list[str] = []
    upload = lambda _model, folder, *_, **__: sent.extend(os.listdir(folder))  # noqa: E731
    monkeypatch.setattr(PreTrainedModel, "_upload_modified_files", upload)
    monkeypatch.setattr("transformers.modeling_utils.hf_api", MagicMock())
    monkeypatch.setattr("transformers.modeling_utils.create_and_tag_model_card", card := MagicMock())
    tiny("gru", dtype=torch.float32).save_pretrained(tmp_path / "bytes", push_to_hub=True)
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(sent)
    tiny("gru", dtype=torch.float32, vocab_size=300).save_pretrained(tmp_path / "tokens", push_to_hub=True)
    assert ["byte-level" in call.args[1] for call in card.call_args_list] == [True, False]


@every_kind
def test_weights_may_lie_on_a_named_device_or_on_disk(variant, tmp_path):
    pytest.importorskip("accelerate")
    model = tiny(variant, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    expected = model.generate(PROMPT, **GREEDY)
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map="cpu")
    there.generation_config.eos_token_id = None
    assert torch.equal(there.generate(PROMPT, **GREEDY), expected)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i else "cpu" for i in range(len(model.model.layers))}
    for buffers in (False, True):
        settings = {"device_map": places, "offload_folder": tmp_path / "disk", "offload_buffers": buffers}
        away = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **settings)
        away.generation_config.eos_token_id = None
        assert next(away.model.layers[1].mixer.parameters(), torch.empty(0, device="meta")).is_meta
        assert torch.equal(away.generate(PROMPT, **GREEDY), expected)


@pytest.mark.parametrize("licence", ["mit\ntags: x", "", "\\1"])
def test_a_licence_is_one_word(tmp_path: Path, licence: str) -> None:
    (tmp_path / "README.md").write_text("license: other\n")
    with pytest.raises(ConfigError, match="a licence is one word"):
        set_licence(tmp_path, licence)
    assert (tmp_path / "README.md").read_text() == "license: other\n"


@pytest.mark.parametrize("variant", KINDS)
def test_a_card_tells_equation_sizes_and_how_to_load(variant):
    model = tiny(variant, dtype=torch.float32)
    card = model_card(model, licence="apache-2.0")
    about = resolve(variant).variant
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "\nlicense: apache-2.0\n" in card
    assert "license: other" in model_card(model)
    assert about.equation_of(resolve(variant).config).strip().splitlines()[0] in card
    assert f"| parameters | {sum(p.numel() for p in model.parameters()):,} |" in card
    assert "AutoModelForCausalLM.from_pretrained" in card
    cache = model(PROMPT[:1], use_cache=True).past_key_values
    held = sum(t.nbytes for state in cache.states for t in state.values())
    sizes = re.findall(r"^\| state of one text \| (.*) \|$", card, flags=re.MULTILINE)
    assert sizes in ([f"{held:,} bytes"], ["grows with the text"])


@pytest.mark.parametrize("pattern", ["e1", "e1*2+e42", "e1+e42*3+e1", "e42+e1*2"])
def test_the_title_of_a_card_is_the_pattern_of_its_layers(pattern):
    depth = 2 * sum(int(part.partition("*")[2] or 1) for part in pattern.split("+"))
    config = LadderConfig(variant=pattern, hidden_size=16, num_hidden_layers=depth)
    assert f"\n# {pattern}, 16x{depth}\n" in model_card(LadderForCausalLM(config))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    (folder / "text").write_bytes(b"once upon a time there was a byte. " * 400)
    sizes = ["--set=model.hidden_size=16", "--set=model.num_hidden_layers=1", "--set=train.batch_size=2"]
    settings = [*sizes, "--set=train.chunk_size=32", "--set=train.device=cpu", "--set=data.eval_bytes=640"]
    words = ["train", "gru", "--data", str(folder / "text"), "--steps", "2", "--out", str(folder / "run"), *settings]
    assert main(words) == 0
    return folder / "run"


def test_the_card_of_a_run_has_the_data_and_bits_per_byte(run):
    card = next(run.glob("checkpoints/*/README.md")).read_text()
    print_of = ByteFile(run.parent / "text").fingerprint()
    assert f"| data | text, {print_of['size']:,} bytes, BLAKE2b of samples {print_of['blake2b']} |" in card
    assert "| trained on | 128 bytes in 2 steps of 2 windows of 32 |" in card
    assert re.search(r"\| held out \| \d\.\d{4} bits per byte at step 2, on 640 bytes \|", card)


def test_export_writes_a_whole_model_with_a_licence(run, tmp_path):
    assert main(["export", str(run), str(tmp_path / "out"), "--license", "mit"]) == 0
    files = {path.name for path in (tmp_path / "out").iterdir()}
    shared = {"modeling_ladder_hub.py", "tokenizer.json", "checksums.json"}
    assert {"README.md", "config.json", "model.safetensors", *shared} <= files
    assert "state" not in files, "training state is not published"
    assert "\nlicense: mit\n" in (tmp_path / "out" / "README.md").read_text()
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), LadderForCausalLM)
