"""Whatever a disk, a copy or a hand does to a file: equal values, or one error that names the file. Never another figure."""

import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from train_helpers import losses, manifest, metrics, settings

from elman_core.cli import main
from elman_core.metrics import METRICS, progress, read_metrics
from elman_core.model import LadderForCausalLM
from elman_core.model.checkpoint import load_checkpoint
from elman_core.registry import CheckpointError, ConfigError, ElmanError
from elman_core.storage import check_folder, log_line, read_json, read_line, write_folder, write_json
from elman_core.training.start import resume, start


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def damages(content: bytes, draw: random.Random, count: int) -> Iterator[bytes]:
    """At most `count` contents that differ from `content`: a bit, a cut, zeros, two parts exchanged, more at the end."""
    for index in range(count):
        a, b = sorted(draw.sample(range(len(content) + 1), 2))
        changed = [
            flipped(content, draw.randrange(8 * len(content))),
            content[:a],
            content[:a] + bytes(b - a) + content[b:],
            content[a:b] + content[:a] + content[b:],
            content + content[a:b],
        ][index % 5]
        yield from [changed] * (changed.strip() != content.strip())  # JSON may end in more white space


def assert_equal_or_refused(read: Callable[[], object], expected: object) -> None:
    """Further entries, such as a digest with another name, are ignored by all readers."""
    found, said = expected, ""
    try:
        found = read()
    except ElmanError as error:
        said = str(error)
    assert "\n" not in said
    assert (expected | found if isinstance(expected, dict) else expected) == found


def test_every_bit_of_an_object_a_line_and_a_list_of_checksums_counts(tmp_path):
    file, value = tmp_path / "a.json", {"lr": 0.001, "clip": 1.0, "steps": [20, None], "name": "é", "resumed": []}
    write_json(file, value)
    content = file.read_bytes()
    for bit in range(8 * len(content)):
        file.write_bytes(flipped(content, bit))
        assert_equal_or_refused(lambda: read_json(file), value)
    line = {"kind": "step", "step": 7, "loss": 1.25, "lr": 1e-3}
    content = log_line(line, "a1").encode()
    assert read_line(content, "a1") == line
    assert read_line(content, "b2") is None
    assert all(read_line(flipped(content, bit), "a1") in (None, line) for bit in range(8 * len(content)))
    write_folder(tmp_path / "x", lambda folder: (folder / "model.safetensors").write_bytes(b"weights"))
    for path in (tmp_path / "x" / "checksums.json", tmp_path / "x" / "model.safetensors"):
        content = path.read_bytes()
        for bit in range(8 * len(content)):
            path.write_bytes(flipped(content, bit))
            assert_equal_or_refused(lambda: check_folder(tmp_path / "x"), "refused")
        path.write_bytes(content)
    check_folder(tmp_path / "x")


def test_whole_numbers_that_are_no_float_are_damage(tmp_path):
    large = 10**400
    lines = [{"step": 1, "loss": 2.0, "memory": large}, {"step": large, "loss": 1.0}, {"step": -1, "loss": 1.0}]
    (tmp_path / METRICS).write_text("".join(log_line({"kind": "step", **line}, "a1") + "\n" for line in lines))
    found = read_metrics(tmp_path, "a1")
    assert (list(found.columns["step"]), found.broken) == ([1], 2)
    assert math.isnan(found.columns["memory"][0])
    assert progress(tmp_path, "a1").step == 1


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_are_not_json_are_damage(number, tmp_path):
    (tmp_path / "a.json").write_text(f'{{"text": [{number}]}}')
    with pytest.raises(CheckpointError, match="is damaged: it is not JSON"):
        read_json(tmp_path / "a.json")
    with pytest.raises(CheckpointError, match="cannot be read: it is not a regular file"):
        read_json(tmp_path)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A finished run of 6 steps with three checkpoints, and what `elman export` makes of it."""
    path = tmp_path_factory.mktemp("runs") / "run"
    start(settings(text, "train.steps=6", "train.save_every=2", "train.warmup=1"), path, quiet=True).fit()
    assert main(["export", str(path), str(path.with_name("export"))]) == 0
    return path


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_run_resumes_with_equal_bits_or_not_at_all(seed, run, tmp_path, caplog):
    """One file of the run is damaged, or exchanged with another; then two more steps."""
    straight, copy = (shutil.copytree(run, tmp_path / name) for name in ("straight", "copy"))
    resume(straight, steps="8", quiet=True).fit()
    draw = random.Random(seed)
    files = [p for p in copy.rglob("*") if p.suffix in (".json", ".jsonl", ".safetensors") and p.stat().st_size]
    one, two = draw.sample(sorted(files), 2)
    if seed % 3 == 0:
        content = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(content)
    else:
        one.write_bytes(next(damages(one.read_bytes(), draw, 1)) if seed % 3 == 1 else b"")
    said = ""
    try:
        assert resume(copy, steps="8", quiet=True).fit().status == "ok"
    except ElmanError as error:
        said = str(error)
    assert "\n" not in said
    found, expected = losses(copy), losses(straight)
    assert said or found.items() <= expected.items()
    assert said or found == expected or "damaged" in caplog.text or "lacks" in caplog.text


def test_an_edited_manifest_is_refused_by_key_and_a_setting_changes_by_resume_alone(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    edited = manifest(copy)
    edited["settings"]["train"]["lr"] = 0.002
    (copy / "manifest.json").write_text(json.dumps(edited))
    with pytest.raises(
        CheckpointError, match=r"train\.lr is 0\.002 in .* and 0\.001 in step-00000006; put 0\.001 back, then "
    ):
        resume(copy, steps="8", quiet=True)
    del edited["digest"]
    (copy / "manifest.json").write_text(json.dumps(edited))
    with pytest.raises(CheckpointError, match=r"train\.lr is 0\.002"):
        resume(copy, steps="8", quiet=True)
    shutil.copyfile(run / "manifest.json", copy / "manifest.json")
    for kept in ("data.heldout=0.2", "model.options.use_conv=true", "model.options={use_conv=true}"):
        with pytest.raises(ConfigError, match=rf"a run keeps its {kept.partition('=')[0]};"):
            resume(copy, steps="8", quiet=True, sets=[kept])
    before = manifest(copy)
    resume(copy, steps="8", quiet=True, sets=["train.lr=0.002", "train.weight_decay=0.2"]).fit()
    after = manifest(copy)
    assert after["resumed"][-1]["set"] == {"train.lr": [0.001, 0.002], "train.weight_decay": [0.1, 0.2]}
    assert after["protocol_hash"] != before["protocol_hash"]
    assert "changed on resume" in after["protocol"]
    assert metrics(copy)[-1]["lr"] == pytest.approx(2e-4)
    group = resume(copy, steps="9", quiet=True)
    assert [g["weight_decay"] for g in group.optimizer.inner.param_groups] == [0.2, 0.0]
    group.fit()


def test_a_checkpoint_of_another_run_is_refused(run, text, tmp_path):
    other = tmp_path / "other"
    start(settings(text, "train.steps=6", "train.save_every=2", "train.seed=1"), other, quiet=True).fit()
    shutil.rmtree(other / "checkpoints")
    shutil.copytree(run / "checkpoints", other / "checkpoints")
    with pytest.raises(CheckpointError):
        resume(other, steps="8", quiet=True)
    shutil.copyfile(run / "manifest.json", other / "manifest.json")  # the metrics are still the other run's
    assert resume(other, steps="8", quiet=True).fit().status == "ok"
    assert (other / "metrics.jsonl.damaged").exists()
    assert sorted(losses(other)) == [7, 8]


def test_a_damaged_export_is_not_loaded(run, tmp_path, monkeypatch):
    """By transformers' own call and by ours: every file that a model is made from."""
    export = shutil.copytree(run.with_name("export"), tmp_path / "export")
    expected = LadderForCausalLM.from_pretrained(export).state_dict()
    draw = random.Random(2)
    for name in ("config.json", "model.safetensors", "generation_config.json", "checksums.json"):
        content = (export / name).read_bytes()
        # Of the checksums, the entry of a file that is not loaded may be wrong.
        loads = [load_checkpoint] + [LadderForCausalLM.from_pretrained] * (name != "checksums.json")
        for changed in [b"{}", *damages(content, draw, 40)]:
            (export / name).write_bytes(changed)
            for load in loads:
                with pytest.raises(CheckpointError):
                    load(export)
        (export / name).write_bytes(content)
    state = LadderForCausalLM.from_pretrained(export).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    (export / "model.safetensors").write_bytes(flipped((export / "model.safetensors").read_bytes(), -1))
    monkeypatch.setenv("ELMAN_CHECKSUMS", "0")
    LadderForCausalLM.from_pretrained(export).save_pretrained(export)
    monkeypatch.delenv("ELMAN_CHECKSUMS")
    LadderForCausalLM.from_pretrained(export)  # the checksums of what was replaced are gone


def test_a_folder_left_by_a_kill_before_the_manifest_is_begun_again(text, tmp_path):
    for name in (".lock", "metrics.jsonl", "console.log", ".partial-manifest.json"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="was killed before its first step: start it again with elman train"):
        resume(tmp_path, quiet=True)
    assert start(settings(text, "train.steps=2"), tmp_path, quiet=True).fit().status == "ok"
    (tmp_path / "metrics.jsonl").rename(tmp_path / "thesis.tex")
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="already exists"):
        start(settings(text, "train.steps=2"), tmp_path, quiet=True)


def test_what_a_run_writes_has_the_mode_of_the_umask(text, tmp_path):
    before = os.umask(0o027)
    try:
        start(settings(text, "train.steps=2"), tmp_path / "run", quiet=True).fit()
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "run").rglob("*") if p.is_file()} == {0o640}
