"""The logger of Weights & Biases, offline: what would be sent is read from the files that `wandb sync` reads."""

import json
import struct
from pathlib import Path

import pytest
from train_helpers import manifest, metrics, train_words, wait_for

from elman_core.cli import main

pytest.importorskip("wandb")

BLOCK = 32768  # of LevelDB's log format, in which wandb writes


def records(file: Path) -> list:
    """The protobuf records of a .wandb file, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, part, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:  # too short for a header: zeros
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        part += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(part))
            part = b""
    return found


def test_a_resumed_run_is_the_same_run_with_every_step_and_evaluation(text, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = tmp_path / "run"
    assert main(train_words(text, run, "train.steps=3", "train.eval_every=2", "train.loggers=wandb")) == 0
    assert main(["resume", str(run), "--steps", "+2"]) == 0
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    wait_for(lambda: all(records(f) and records(f)[-1].HasField("exit") for f in files))  # another process writes them
    said = [next(r for r in records(file) if r.HasField("run")).run for file in files]
    assert [(r.run_id, r.display_name, r.project) for r in said] == 2 * [(manifest(run)["id"], "run", "elman")]
    rows = [
        {i.key or i.nested_key[0]: json.loads(i.value_json) for i in r.history.item}
        for file in files
        for r in records(file)
        if r.HasField("history")
    ]
    steps = {row["step"]: row for row in rows if "train/loss" in row}
    assert list(steps) == [1, 2, 3, 4, 5]
    assert [steps[m["step"]]["train/loss"] for m in metrics(run)] == [m["loss"] for m in metrics(run)]
    scored = [(row["step"], row["heldout/bits_per_byte"]) for row in rows if "heldout/loss" in row]
    assert scored == [(m["step"], m["bits_per_byte"]) for m in metrics(run, "evaluation")]
