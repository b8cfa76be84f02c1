"""benchmarks/scaling.py: the line it runs is one that a user could type, and its arithmetic."""

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from elman_core.cli.train import read_settings


@pytest.fixture(scope="module")
def scaling():
    path = Path(__file__).parents[1] / "benchmarks" / "scaling.py"
    spec = importlib.util.spec_from_file_location("scaling", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ASKED = argparse.Namespace(rows=32, length=512, device="cuda", steps=60)


@pytest.mark.parametrize("gpus", [1, 4])
def test_every_line_has_settings_that_exist_and_a_batch_that_grows_with_the_gpus(gpus, scaling, tmp_path):
    for kind in scaling.KINDS:
        words = scaling.command("e42@64x1", gpus, kind, tmp_path / "text", tmp_path / "run", ASKED)
        assert ("--nproc-per-node" in words) == (gpus > 1)
        sets = [value for flag, value in itertools.pairwise(words) if flag == "--set"]
        train = read_settings("e42@64x1", steps=60, sets=sets).train
        assert train.batch_size == 32 * gpus
        assert train.parallel == ("auto" if gpus == 1 else "fsdp" if kind == "fsdp" else "ddp")


def test_efficiency_is_relative_to_one_gpu_and_a_failure_keeps_its_reason(scaling):
    rows = [
        {"model": "a", "gpus": 1, "kind": "one", "tok_s": 100, "memory_gib": 1.0},
        {"model": "a", "gpus": 4, "kind": "auto", "tok_s": 380, "memory_gib": 1.0},
        {"model": "b", "gpus": 4, "kind": "auto", "reason": "out of memory"},
    ]
    made = scaling.with_efficiency(rows)
    assert (made[1]["times_one"], made[1]["efficiency"]) == (3.8, 0.95)
    assert "efficiency" not in made[2]
    table = scaling.table(made)
    assert "95.0%" in table
    assert "out of memory" in table


def test_what_takes_too_long_is_ended_with_everything_that_it_started(scaling, tmp_path):
    """A launcher that is killed alone leaves its ranks on the GPUs."""
    pids = tmp_path / "pids"
    shell = f"sleep 60 & echo $! > {pids}; wait"
    with pytest.raises(subprocess.TimeoutExpired):
        scaling.run(["sh", "-c", shell], dict(os.environ), 1)
    assert not psutil.pid_exists(int(pids.read_text())) or psutil.Process(int(pids.read_text())).status() == "zombie"


HANGS = """
import os, threading, time
def waits_for_the_other():
    time.sleep(60)
threading.Thread(target=waits_for_the_other, daemon=True).start()
rank = 0 if os.fork() else 1
if rank == 0 and os.fork():
    os.wait()
os.write(2, f"elman: rank {rank}: model after {rank + 1}.5 s\\n".encode())
waits_for_the_other()
"""


def test_what_hangs_says_where_before_it_is_ended(scaling, tmp_path, monkeypatch):
    """Two ranks under a launcher: a function of Python's that waits in a library is found as well."""
    asked = argparse.Namespace(**vars(ASKED), limit=8.0, until=time.monotonic() + 60, out=tmp_path / "scaling.json")
    monkeypatch.setattr(scaling, "command", lambda *_: [sys.executable, "-c", HANGS])
    row = scaling.measure("e1@8x1", 2, "auto", asked, tmp_path)
    assert row["reason"].startswith("not done after 8 s; rank 0: model after 1.5 s; rank 1: model after 2.5 s; ")
    assert "in waits_for_the_other (<string>:4) < <module>" in row["reason"]
    log = tmp_path / "scaling-e1@8x1-2-auto.log"
    assert row["reason"].endswith(log.name)
    assert log.read_text().count("Fatal Python error: Aborted") == 2, "the launcher is not asked"
    asked.until = time.monotonic() + 1
    assert scaling.measure("e1@8x1", 2, "auto", asked, tmp_path)["reason"] == "no time was left for it"


def test_how_far_ranks_came_is_no_reason_for_a_failure(scaling, tmp_path, monkeypatch):
    asked = argparse.Namespace(**vars(ASKED), limit=10.0, until=time.monotonic() + 60, out=tmp_path / "scaling.json")
    said = "elman: no good\nelman: rank 1: parted after 2.0 s"
    monkeypatch.setattr(scaling, "command", lambda *_: ["sh", "-c", f"printf '{said}' >&2; exit 3"])
    assert scaling.measure("e1@8x1", 2, "auto", asked, tmp_path)["reason"] == "elman: no good"
    assert "parted" in (tmp_path / "scaling-e1@8x1-2-auto.log").read_text()


def test_rows_of_one_gpu_can_be_measured_together_each_on_its_own(scaling, tmp_path, monkeypatch):
    seen = []

    def measure(model, gpus, kind, asked, folder, device=None):
        seen.append((model, gpus, kind, device))
        return {"model": model, "gpus": gpus, "kind": kind, "tok_s": 100 * gpus, "memory_gib": 1.0}

    monkeypatch.setattr(scaling, "measure", measure)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    out = tmp_path / "out.json"
    words = [
        "--models",
        "a,b,c",
        "--gpus",
        "1,4",
        "--kinds",
        "auto",
        "--device",
        "cpu",
        "--out",
        str(out),
        "--together",
    ]
    scaling.main(words)
    rows = json.loads(out.read_text())["rows"]
    assert [(r["model"], r["gpus"], r.get("beside")) for r in rows] == [
        ("a", 1, 1), ("b", 1, 1), ("c", 1, 0), ("a", 4, None), ("b", 4, None), ("c", 4, None),
    ]  # fmt: skip
    assert sorted(device for _, gpus, _, device in seen if gpus == 1) == [0, 0, 1]
    assert rows[-1]["times_one"] == 4.0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert scaling._visible(1) == "GPU-b"
    scaling.main(["--models", "a", "--gpus", "2", "--device", "cpu", "--out", str(out), "--add"])
    assert [r["gpus"] for r in json.loads(out.read_text())["rows"]] == [1, 1, 1, 4, 4, 4, 2, 2]


def test_lines_of_ranks_that_ran_into_each_other_are_told_apart(scaling):
    said = "elman: rank 1: first step after 2.5 selman: rank 0: model after 1.5 s\n\n"
    assert scaling.where(said) == "rank 0: model after 1.5 s; rank 1: first step after 2.5 s"
