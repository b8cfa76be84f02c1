"""Damaged files of jobs and runs, and hostile suites: equal values or one line, as in the core."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import psutil
import pytest
from elman_bench.jobs import child
from elman_bench.jobs.job import Attempt, State, read_state, write_state
from elman_bench.results.runs import read_run
from elman_bench.suite.spec import read_suite
from test_damage import assert_equal_or_refused, damages
from test_hostile import PIECES, accepted_or_refused, refused
from train_helpers import settings

from elman_core.cli import main
from elman_core.training.run.folder import read_manifest
from elman_core.training.start import start


def test_damaged_states_of_jobs_are_refused(tmp_path):
    path, state = tmp_path / "a.json", State("a", "ok", attempts=[Attempt(host="h", exit_code=0)])
    write_state(path, state)
    content = path.read_bytes()
    for changed in damages(content, random.Random(0), 500):
        path.write_bytes(changed)
        assert_equal_or_refused(lambda: read_state(path, "a"), state)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A finished run of 6 steps."""
    path = tmp_path_factory.mktemp("runs") / "run"
    start(settings(text, "train.steps=6", "train.warmup=1"), path, quiet=True).fit()
    return path


def figures(run: Path) -> object:
    """What `elman results` shows of a run, but for speeds."""
    found = read_run(run)
    lines = [found.metrics.columns[name].tolist() for name in ("step", "loss", "lr", "grad_norm")]
    return found.status, found.settings, lines, [e["loss"] for e in found.metrics.evaluations]


@pytest.mark.parametrize("file", ["manifest.json", "metrics.jsonl"])
def test_damaged_files_of_a_run_change_no_figure_silently(file, run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    expected, content = figures(copy), (copy / file).read_bytes()
    whole = read_manifest(copy)
    for changed in damages(content, random.Random(1), 300):
        (copy / file).write_bytes(changed)
        found = read_run(copy)
        if figures(copy) != expected:
            kept = content.count(b"\n") - (changed.count(b"\n") if file.startswith("metrics") else 0)
            assert found.fault or found.metrics.broken or kept > 0, "nothing is said"
        assert_equal_or_refused(lambda: read_manifest(copy), whole)


def test_hostile_suites(tmp_path):
    draw = random.Random(1)
    suite = tmp_path / "s.toml"
    keys = ["summary", "sizes", "depth", "seeds", "gpus", "models", "tuned", "tuning", "protocol", "tuned.train"]
    for _ in range(400):
        lines = ["models = ['e42']", *(f"{draw.choice(keys)} = {draw.choice(PIECES)}" for _ in range(2))]
        suite.write_text("\n".join(lines[draw.randrange(2) :]))
        accepted_or_refused(read_suite, suite)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot adopt processes")
def test_a_process_in_a_session_of_its_own_ends_with_its_job(tmp_path):
    note = tmp_path / "pid"
    command = ["sh", "-c", f"setsid sleep 60 & echo $! > {note}; sleep 0.2"]
    words = [sys.executable, "-m", "elman_bench.jobs.child", str(tmp_path / "exit"), "", *command]
    assert subprocess.run(words, start_new_session=True, timeout=60, check=False).returncode == 0
    time.sleep(0.1)
    left = [p for p in psutil.process_iter() if p.pid == int(note.read_text())]
    assert all(p.status() == psutil.STATUS_ZOMBIE for p in left)


def test_a_process_of_another_user_that_a_command_left_does_not_cost_the_exit_code(monkeypatch):
    sent = []

    def kill(pid, signum):
        sent.append((pid, signum))
        if pid == others[0].pid:
            raise PermissionError(1, "Operation not permitted")

    with subprocess.Popen(["sleep", "60"]) as one, subprocess.Popen(["sleep", "60"]) as two:
        others = [psutil.Process(one.pid), psutil.Process(two.pid)]
        with monkeypatch.context() as patched:
            patched.setattr(child, "_others", lambda: others)
            patched.setattr(child, "GRACE", 0.0)
            patched.setattr(os, "kill", kill)
            child._end_leftovers()
        one.kill()
        two.kill()
    assert [given for given in sent if given[1]] == [(p.pid, s) for s in (15, 9) for p in others]


def test_hostile_words_are_one_line(capsys, tmp_path):
    dry = ("bench", "quick", "--dry-run")
    refused(capsys, *dry, "--set", "train.lr=[]")
    refused(capsys, *dry, "--seeds", "100000000")
    (odd := tmp_path / "te\nxt").write_bytes(bytes(range(256)) * 64)
    assert "cannot store names with control characters" in refused(capsys, "bench", "quick", "--data", odd)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_no_name_controls_the_terminal(tmp_path, monkeypatch, capsys):
    hostile = tmp_path / "a\x1b[2J\x07\x9b31m\r\u202eb\n\u2066"
    monkeypatch.chdir(tmp_path)
    for run in ("one", "two"):
        (hostile / run).mkdir(parents=True)
        manifest = {"format": 1, "status": hostile.name, "settings": {"model": {"variant": hostile.name}}}
        (hostile / run / "manifest.json").write_text(json.dumps(manifest))
    (hostile / "text").write_bytes(bytes(range(256)) * 64)
    assert (
        main(["jobs", "run", "--gpus", "none", "--out", "jobs", "--", "sh", "-c", f"echo '{hostile.name}'; exit 1"])
        == 1
    )
    state = read_state(tmp_path / "jobs/jobs/1.json", "1")
    state.status, state.attempts[0].slot, state.attempts[0].cause = [hostile.name] * 3
    write_state(tmp_path / "jobs/jobs/1.json", state)
    said = ""
    for words in (
        ("data", "info", hostile / "text"),
        ("data", "info", hostile / "text", "--json"),
        ("jobs", "status", "jobs"),
        ("jobs", "status", "jobs", "--json"),
        ("results", hostile),
        ("results", hostile, "--json"),
        ("compare", hostile),
        ("train", hostile.name),
        ("show", hostile.name),
    ):
        main([str(word) for word in words])
        out, err = capsys.readouterr()
        said += out + err
    assert {c for c in said if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")} == {"\n"}
    assert said.count("u202e") > 5
