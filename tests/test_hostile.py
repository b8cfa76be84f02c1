"""Hostile values, names, files and headers: one line with an exit code of the table, never a traceback or a fault of ours."""

import json
import os
import random
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_helpers import settings

from elman_core.cli import main
from elman_core.cli.train import read_settings
from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.model.checkpoint import load_checkpoint
from elman_core.model.state_file import FORMAT, load_states
from elman_core.registry import CheckpointError, ConfigError, ElmanError
from elman_core.storage import read_json, write_checksums, write_json
from elman_core.training.start import start

VALUES = [None, True, -1, 0, 10**30, 0.5, float("nan"), "a", "", "é\n", [], [[]], [0] * 9, {}, {"a": {"b": 1}}]


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line of a command that leaves with 1 or 2."""
    code = main([str(word) for word in words])
    said = capsys.readouterr().err
    assert (code in (1, 2), said.count("\n")) == (True, 1), (code, said)
    return said


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model"
    torch.manual_seed(0)
    LadderForCausalLM(LadderConfig(variant="e42", hidden_size=16, num_hidden_layers=1)).save_pretrained(path)
    return path


def test_hostile_words_are_one_line(capsys, tmp_path, text, saved):
    one = tmp_path / "one"
    one.write_bytes(b"a")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    long = "e" * 300
    for words in (
        ["train", "e42", "--data", text, "--tokens", "-5"],
        ["train", "e42", "--data", text, "--out", loop],
        ["train", "e42", "--data", text, "--out", tmp_path / long],
        ["train", "e42", "--data", text, "--set", "train.device=meta"],
        ["train", "e42", "--data", text, "--set", f"train.lr={'1' * 5000}"],
        ["train", "e42", "--data", text, "--set", f"train.lr={'[' * 3000}"],
        ["train", long, "--data", text],
        ["eval", saved, "--all", "--data", one],
        ["eval", saved, "--data", text, "--device", "meta"],
        ["data", "info", text, "--chunk-size", "0"],
        ["data", "info", tmp_path / "a\nb"],
        ["generate", saved, "--stop", "é"],
        ["generate", saved, "--num", "100000000000"],
        ["show", "e1@1000000x1000000"],
        ["show", "e1@²x²"],
        ["new", "e99", "--dir", one],
        ["new", long],
    ):
        refused(capsys, *words)


def test_vocabularies_and_weights_that_are_no_model_of_bytes(capsys, tmp_path, text, saved):
    for size in (100, 300):
        folder = tmp_path / str(size)
        model = LadderForCausalLM(LadderConfig(variant="e42", hidden_size=16, num_hidden_layers=1, vocab_size=size))
        model.save_pretrained(folder)
        capsys.readouterr()
        for command, more in (("eval", ["--data", text]), ("generate", [])):
            assert f"this model has {size} tokens" in refused(capsys, command, folder, *more)
    nan = shutil.copytree(saved, tmp_path / "nan")
    tensors = {
        name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(nan / "model.safetensors").items()
    }
    save_file(tensors, nan / "model.safetensors", {"format": "pt"})
    assert main(["eval", str(nan), "--data", str(text)]) == 4
    assert main(["generate", str(nan)]) == 4
    model = LadderForCausalLM.from_pretrained(saved)
    for ids in ([[300]], [[-1]], [1, 2, 3]):
        with pytest.raises(ConfigError):
            model(torch.tensor(ids))


def accepted_or_refused(read, *words):
    """No other error than one of ours, on one line."""
    said = ""
    try:
        read(*words)
    except ElmanError as error:
        said = str(error)
    assert "\n" not in said


def test_hostile_configs_and_headers(capsys, tmp_path, text, saved):
    folder = shutil.copytree(saved, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    draw = random.Random(0)

    def use(folder):
        with torch.no_grad():
            load_checkpoint(folder)(torch.tensor([[1, 2, 3]]))

    for key in [*config, "num_labels"]:
        for value in [10**12, 10**30, *draw.sample(VALUES, 3)]:
            (folder / "config.json").write_text(json.dumps({**config, key: value}))
            accepted_or_refused(use, folder)
    for value in ("a", 0.5, [[]], {}, {"a": {"b": 1}}):
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": value}))
        with pytest.raises((ConfigError, CheckpointError)):
            load_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(config))
    content = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    name = "model.norm.weight"
    for value in VALUES:
        for field in ("data_offsets", "shape", "dtype"):
            changed = json.dumps({**header, name: {**header[name], field: value}}).encode()
            (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + size :])
            with pytest.raises(CheckpointError):
                load_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    for value in VALUES:
        for tree in ({"weight_map": value}, {"weight_map": {name: value}}, value, {"weight_map": {name: "../x"}}):
            (folder / "model.safetensors.index.json").write_text(json.dumps(tree))
            with pytest.raises(CheckpointError):
                load_checkpoint(folder)


def places(value, at=()):
    """The path to every value inside, of lists to the first two."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*at, key)
        yield from places(inner, (*at, key))


def test_a_value_of_another_kind_in_a_file_of_ours_is_one_line(capsys, tmp_path, text):
    """In every place of the files that a training and a packing write, with right digests and checksums."""
    good, work = tmp_path / "good", tmp_path / "work"
    start(settings(text, "train.steps=2", "train.warmup=1"), good / "run", quiet=True).fit()
    assert main(["export", str(good / "run"), str(good / "export")]) == 0
    (tmp_path / "a.txt").write_bytes(b"some text " * 400)
    assert main(["data", "pack", str(tmp_path / "a.txt"), "--out", str(good / "packed")]) == 0
    run, export, step, draw = work / "run", work / "export", "run/checkpoints/step-00000002", random.Random(0)
    few = ["--window", "16", "--bytes", "64"]
    for file, checked, count, words in (
        ("export/training.json", "export", 99, ["eval", export, "--data", text, *few]),
        ("packed.json", None, 99, ["eval", export, "--data", work / "packed", *few]),
        (f"{step}/state/trainer.json", step, 25, ["resume", run, "--steps", "3"]),
        ("run/manifest.json", None, 25, ["eval", run, *few]),
    ):
        found = list(places(read_json(good / file)))
        for path in draw.sample(found, min(count, len(found))):
            shutil.copytree(good, work)
            inner = tree = read_json(work / file)
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = draw.choice([value for value in VALUES if value == value])
            write_json(work / file, tree)
            if checked:
                write_checksums(work / checked)
            code = main([str(word) for word in words])
            said = capsys.readouterr().err
            assert code < 5, (file, path, inner[path[-1]], said)
            assert said.count("\n") <= 1 or code == 0, said
            shutil.rmtree(work)


PIECES = ["3", "-1", "[]", "[[]]", "{}", "{a=1}", "''", "'e42'", "1e999", "nan", "true", "1" * 5000, "[" * 3000]


def test_hostile_recipes(tmp_path):
    recipe = tmp_path / "r.toml"
    for table in ("model", "data", "train", "train.lr", "model.options", "model.variant", "x"):
        for piece in PIECES:
            recipe.write_text(f"{table} = {piece}\n")
            accepted_or_refused(read_settings, str(recipe))


def test_weights_of_another_kind_or_not_finite_are_refused_under_right_checksums(tmp_path, text, capsys):
    """Of a checkpoint, the optimizer, a carried state and the state of a generation; in one line."""
    run, states = tmp_path / "run", tmp_path / "states"
    sets = ("train.steps=2", "train.warmup=1", "data.sampling='tbptt'", "train.optimizer='schedulefree'")
    start(settings(text, *sets), run, quiet=True).fit()
    (folder,) = (run / "checkpoints").iterdir()
    export, again = ["export", folder, tmp_path / "out"], ["resume", run, "--steps", "3"]
    kinds = [torch.int64, torch.uint8, torch.bool, torch.complex64]
    cases = [("model", kind, words) for kind in kinds for words in (export, ["eval", run], again)]
    cases += [(name, kind, again) for name in ("state/last", "state/optimizer", "state/carry") for kind in kinds]
    cases += [(name, kind, again) for name in ("state/last", "state/optimizer") for kind in (torch.nan, torch.inf)]
    cases += [("model", kind, export) for kind in (torch.nan, torch.inf)]
    cases += [("model", 1e38, [*export, "--dtype", "fp16"])]
    for name, kind, words in cases:
        file = folder / f"{name}.safetensors"
        content, tensors = file.read_bytes(), load_file(file)
        for key, tensor in tensors.items():
            tensors[key] = torch.full_like(tensor, kind) if isinstance(kind, float) else tensor.to(kind)
        save_file(tensors, file, {"format": "pt"})
        write_checksums(folder)
        assert main([str(word) for word in words]) in (2, 4), (name, kind, words)
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        file.write_bytes(content)
        write_checksums(folder)
    for kind in kinds:
        save_file({"0.h": torch.ones(1, 16).to(kind)}, states, {"kind": FORMAT, "branches": "1", "seen": "1"})
        with pytest.raises(CheckpointError, match=r"the state is torch\.float32"):
            load_states(states, config=LadderConfig(variant="e42", hidden_size=16, num_hidden_layers=1))
    for key, branches, seen in (("0.h", 10**9, 1), ("0.h", -1, 1), ("0.h", 1, -1), ("-1.h", 1, 1), ("1.h", 1, 1)):
        save_file({key: torch.ones(1, 16)}, states, {"kind": FORMAT, "branches": f"{branches}", "seen": f"{seen}"})
        with pytest.raises(CheckpointError, match="is damaged"):
            load_states(states)


@pytest.fixture(params=[rb"text\xff", rb"te\nxt", rb"te\x1bxt"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + request.param.decode("unicode_escape").encode("latin-1")))
    path.write_bytes(bytes(range(256)) * 64)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_text_or_a_folder_with_such_a_name_is_refused_before_anything_is_written(odd, tmp_path, capsys):
    good, link, out = tmp_path / "good", tmp_path / "link", tmp_path / "out"
    good.write_bytes(odd.read_bytes())
    link.symlink_to(odd)
    for data, where in ((odd, out), (link, out), (good, odd.with_name(odd.name + "out"))):
        assert main(["train", "e42@8x1", "--steps", "1", "--data", str(data), "--out", str(where)]) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1
        assert said[0].endswith("a recipe cannot store names with control characters or outside UTF-8; rename it")
        assert any(escaped in said[0] for escaped in (r"\udcff", r"\n", r"\x1b"))
        assert not where.exists()
