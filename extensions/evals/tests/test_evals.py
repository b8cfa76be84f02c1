"""`elman evals`: what it hands to the harness, and that its bits per byte are those of `elman eval`."""

import importlib.util
import json
import math
import subprocess
import sys
import types
from pathlib import Path

import elman_evals
import pytest
import torch
import typer
from elman_evals.command import TASK, evals, write_task
from elman_evals.scoring import document_loglikelihood
from hf_helpers import KINDS, tiny
from packed_files import write_tokenizer

from elman_core.cli import main as elman
from elman_core.registry import CheckpointError, ConfigError, DataError

TEXT = "Straße — naïve text, byte by byte.\n" * 40


def by_elman(folder, capsys):
    capsys.readouterr()
    assert elman(["eval", str(folder), "--data", str(folder / "text"), "--all", "--rows", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["bits_per_byte"]


@pytest.fixture
def saved(tmp_path):
    tiny("gru", dtype=torch.float32).save_pretrained(tmp_path)
    (tmp_path / "text").write_bytes(b"\x1e" + TEXT.encode())
    return tmp_path


@pytest.mark.parametrize("variant", KINDS)
def test_the_likelihood_of_a_document_is_that_of_the_whole_forward(variant):
    model, tokens = tiny(variant), list(TEXT.encode()[:50])
    with torch.no_grad():
        logits = model(torch.tensor([[30, *tokens[:-1]]])).logits[0].float().log_softmax(-1)
    expected = logits[torch.arange(50), torch.tensor(tokens)].double().sum().item()
    for chunk in (7, 50, 1000):
        assert document_loglikelihood(model, tokens, prefix=30, chunk=chunk) == pytest.approx(expected, rel=1e-6)
    assert document_loglikelihood(model, [], prefix=30) == 0


def test_a_document_is_scored_through_adapters():
    peft = pytest.importorskip("peft")
    base, tokens = tiny("gru", dtype=torch.float32), list(TEXT.encode()[:50])
    plain = document_loglikelihood(base, tokens, prefix=30)
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["in_proj"], init_lora_weights=False)).eval()
    with torch.no_grad():
        logits = adapted(torch.tensor([[30, *tokens[:-1]]])).logits[0].log_softmax(-1)
    expected = logits[torch.arange(50), torch.tensor(tokens)].double().sum().item()
    assert document_loglikelihood(adapted, tokens, prefix=30, chunk=7) == pytest.approx(expected, rel=1e-6)
    assert expected != pytest.approx(plain, rel=1e-3)


class StandIn:
    """The harness's Hugging Face model, as far as it is used."""

    device = torch.device("cpu")

    def __init__(self, pretrained, max_length=None, mixed_precision_dtype=None, **_):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(pretrained).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(pretrained)
        self.prefix_token_id = self.tokenizer.bos_token_id or self.tokenizer.eos_token_id
        self._max_length = max_length and int(max_length)
        self.mixed_precision_dtype = mixed_precision_dtype
        self.cache_hook = types.SimpleNamespace(add_partial=lambda *_: None)

    def _detect_batch_size(self, requests, pos):
        return self.max_length

    def _encode_pair(self, context, continuation):
        kept = self.tok_encode(context.rstrip(), False)
        return kept, self.tok_encode(context + continuation, False)[len(kept) :]

    def tok_encode(self, text, add_special_tokens):
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def harness(monkeypatch):
    """A stand-in for lm-evaluation-harness that runs the one task it is given; `.result` is its bits per byte."""
    about = types.SimpleNamespace(models={}, words=None, result=None)

    def register_model(name):
        return lambda cls: about.models.setdefault(name, cls)

    def cli_evaluate():
        about.words = sys.argv[1:]
        options = dict(zip(about.words[1::2], about.words[2::2], strict=True))
        folder, name = options["--include_path"], options["--tasks"]
        with open(f"{folder}/{name}.yaml", encoding="utf-8") as file:
            task = json.load(file)
        with open(task["dataset_kwargs"]["data_files"]["test"], encoding="utf-8") as file:
            document = json.loads(file.read())[task["doc_to_target"]]
        arguments = dict(pair.split("=") for pair in options["--model_args"].split(","))
        model = about.models[options["--model"]](**arguments)
        (nats,) = model.loglikelihood_rolling([types.SimpleNamespace(args=(document,))])
        about.result = -nats / len(document.encode()) / math.log(2)

    modules = {"lm_eval": {}, "lm_eval.__main__": {"cli_evaluate": cli_evaluate}, "lm_eval.api": {}}
    modules |= {"lm_eval.api.registry": {"register_model": register_model}, "lm_eval.models": {}}
    modules["lm_eval.models.huggingface"] = {"HFLM": StandIn}
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    forget_harness()
    yield about
    forget_harness()


def forget_harness():
    """The module that registers with the harness: each test has its own stand-in."""
    sys.modules.pop("elman_evals.harness", None)
    vars(elman_evals).pop("harness", None)


def test_bits_per_byte_through_the_harness_are_those_of_elman_eval(harness, saved, capsys):
    before = list(sys.argv)
    for given in (["--model_args=max_length=64"], ["--model_args", "max_length=64"]):
        evals(str(saved), [*given, "--device", "cpu"], None, saved / "text")
        assert f"pretrained={saved},max_length=64" in harness.words
    assert harness.result == pytest.approx(by_elman(saved, capsys), rel=1e-6)
    assert harness.words[:3] == ["run", "--model", "elman"]
    assert harness.words[-2:] == ["--device", "cpu"]
    assert sys.argv == before


def test_the_models_are_those_of_elman_eval(harness, saved):
    evals("pretrained/e42-small", [], None, saved / "text")
    assert 0 < harness.result < 8
    with pytest.raises(CheckpointError, match="there is no folder"):
        evals(str(saved / "nothing"), [], None, saved / "text")


@pytest.mark.parametrize("name", ["123", "true"])
def test_a_folder_may_be_called_like_a_number(name, harness, saved, monkeypatch):
    """The harness makes numbers and truth values of what reads as one."""
    monkeypatch.chdir(saved)
    tiny("gru", dtype=torch.float32).save_pretrained(name)
    evals(name, [], None, saved / "text")
    assert f"pretrained=./{name}" in harness.words
    assert harness.result > 0


def test_no_copy_of_the_text_stays_in_the_cache_of_datasets(tmp_path):
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    write_task(tmp_path, tmp_path / "text")
    task = json.loads((tmp_path / f"{TASK}.yaml").read_text(encoding="utf-8"))
    assert tmp_path in Path(task["dataset_kwargs"]["cache_dir"]).parents


def save_tokens(folder):
    """A model of tokens, and the bits per byte of `TEXT` behind the token that ends documents, from the whole forward."""
    model = tiny("gru", dtype=torch.float32, vocab_size=300)
    tokenizer = model.tokenizer = write_tokenizer(folder / "bpe", [TEXT])
    model.save_pretrained(folder)
    (folder / "text").write_text(TEXT, encoding="utf-8")
    tokens = torch.tensor([[tokenizer.eos_token_id, *tokenizer(TEXT, add_special_tokens=False).input_ids]])
    assert tokens.shape[1] < len(TEXT) / 2
    with torch.no_grad():
        nats = torch.nn.functional.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:], reduction="sum")
    return nats.item() / len(TEXT.encode()) / math.log(2)


def test_a_model_of_tokens_is_scored_in_bits_per_byte_of_the_text(harness, tmp_path):
    expected = save_tokens(tmp_path)
    evals(str(tmp_path), [], None, tmp_path / "text")
    assert harness.result == pytest.approx(expected, rel=1e-5)


def test_a_context_is_never_cut_unless_asked(harness, saved):
    evals(str(saved), None, None, saved / "text")  # registers the model type
    whole, cut = harness.models["elman"](saved), harness.models["elman"](saved, max_length=64)
    assert (whole.max_length > 10**9, cut.max_length) == (True, 64)
    tried = [(m._detect_batch_size([1]), m._detect_batch_size(), m.max_length) for m in (whole, cut)]
    assert tried == [(sys.maxsize, 2048, sys.maxsize), (64, 64, 64)], "no batch of endless rows is tried"


def test_a_context_of_spaces_alone_is_scored_behind_the_separator(harness, saved):
    evals(str(saved), None, None, saved / "text")  # registers the model type
    model = harness.models["elman"](saved)
    assert model._encode_pair(" \n", "a") == ([0x1E], list(b" \na"))
    assert model._encode_pair("b ", "a") == (list(b"b"), list(b" a"))


def test_a_document_is_scored_in_the_mixed_precision_that_was_asked_for(harness, saved):
    evals(str(saved), None, None, saved / "text")  # registers the model type
    request, scores = types.SimpleNamespace(args=(TEXT,)), []
    for dtype in (None, torch.bfloat16):
        model = harness.models["elman"](saved, mixed_precision_dtype=dtype)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            expected = document_loglikelihood(model.model, list(TEXT.encode()), prefix=0x1E)
        scores += model.loglikelihood_rolling([request])
        assert scores[-1] == expected
    assert scores[0] != scores[1]


def test_what_is_asked_wrongly_is_one_line(harness, saved, monkeypatch):
    (saved / "latin").write_bytes(b"\xff\xfe not utf-8")
    (saved / "empty").write_bytes(b"\x1e")
    for tasks, data, error, message in (
        (None, None, ConfigError, "give --tasks NAME,… or --data FILE"),
        ("a", saved / "text", ConfigError, "give --tasks NAME,… or --data FILE"),
        (None, saved / "nothing", DataError, "cannot be read"),
        (None, saved / "latin", DataError, "not UTF-8"),
        (None, saved / "empty", DataError, "is empty"),
    ):
        with pytest.raises(error, match=message):
            evals(str(saved), [], tasks, data)
    with pytest.raises(ConfigError, match="no path with a comma: rename a,b"):
        evals("a,b", [], "a", None)


def test_a_task_that_the_harness_has_not_is_one_line(harness, saved, monkeypatch):
    def refuse():
        raise ValueError("Tasks not found: lambda_openai")

    monkeypatch.setattr(sys.modules["lm_eval.__main__"], "cli_evaluate", refuse)
    with pytest.raises(ConfigError, match=r"Tasks not found: lambda_openai \(`lm-eval ls tasks` lists them\)"):
        evals(str(saved), [], "lambda_openai", None)


def test_without_the_harness_it_is_named(harness, saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    with pytest.raises(ConfigError, match=r"pip install 'lm-eval\[hf\]'"):
        evals(str(saved), [], "a", None)


@pytest.mark.parametrize(("left", "code"), [(2, 2), (0, 0), (None, 0), ("a reason", 1)])
def test_a_harness_that_refuses_its_options_is_not_a_plugin_that_failed(left, code, harness, saved, monkeypatch):
    def refuse():
        raise SystemExit(left)

    monkeypatch.setattr(sys.modules["lm_eval.__main__"], "cli_evaluate", refuse)
    with pytest.raises(typer.Exit) as raised:
        evals(str(saved), ["--nonsense"], "a", None)
    assert raised.value.exit_code == code


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed")
@pytest.mark.parametrize("kind", ["bytes", "tokens"])
def test_the_real_harness_gives_the_same_bits_per_byte(kind, saved, tmp_path_factory, capsys):
    """Half a minute of imports; the harness brings hundreds of megabytes, so it is not among the test requirements."""
    folder = saved if kind == "bytes" else tmp_path_factory.mktemp("tokens")
    expected = by_elman(saved, capsys) if kind == "bytes" else save_tokens(folder)
    words = [str(folder), "--data", str(folder / "text"), "--", "--device", "cpu", "--output_path", str(folder / "out")]
    subprocess.run([sys.executable, "-m", "elman_core", "evals", *words], check=True, capture_output=True, timeout=280)
    (report,) = (folder / "out").rglob("*.json")
    found = json.loads(report.read_text())["results"]["text_bits_per_byte"]["bits_per_byte,none"]
    assert found == pytest.approx(expected, rel=1e-5)
