"""Runs on tasks: batches, the loss mask, accuracy by length, resuming; suites, their tables and reports."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from broken_plugins import leave_installed
from elman_authors.scaffold import render
from elman_bench.suite.plan import Overrides
from elman_tasks import logger
from elman_tasks import suite as suites
from elman_tasks.catalogue import find
from elman_tasks.score import accuracy, add, read
from elman_tasks.source import TaskSource

from elman_core.cli import main as elman
from elman_core.extension import CheckpointError, ConfigError, read_json, write_json

TRAIN = ["--steps", "4", "--set", "train.batch_size=4", "--set", "train.eval_every=2", "--set", "train.save_every=2"]


def test_a_source_has_the_sequences_of_its_task_and_its_vocabulary():
    source = TaskSource("modular_arithmetic", 40, 8, 3)
    whole, part = source.batch(5), source.batch(5, [6, 1])
    for name in ("tokens", "targets", "counts"):
        assert np.array_equal(getattr(whole, name)[[6, 1]], getattr(part, name))
    drawn = source.task.batch(3, 5, range(8), 8)
    assert np.array_equal(whole.counts, drawn.scored)
    assert np.array_equal(whole.targets[whole.counts], drawn.targets[drawn.scored])
    again = [source.batch(step, [6, 1]).tokens for step in (2000, 5)]  # of other blocks
    assert np.array_equal(again[1], part.tokens)
    assert not np.array_equal(again[0], part.tokens)
    assert np.array_equal(again[0], source.task.batch(3, 2000, [6, 1], 8).tokens)
    assert source.vocab_size == 14
    assert TaskSource("in_context_recall", 128, 2, 0).batch(0).counts.all(), "every next token is trained"
    prints = [
        TaskSource(s, 40, 8, 3).fingerprint()["blake2b"] for s in ("parity", "parity:labels=every", "parity:train=5-40")
    ]
    assert len(set(prints)) == 3
    held = source.heldout(400).read(np.arange(10))
    assert {row.tobytes() for row in held.tokens}.isdisjoint(
        row.tobytes() for row in TaskSource("parity", 40, 50, 0).batch(0).tokens
    )
    wide = TaskSource("mqar:vocabulary=100000", 64, 64, 0)
    assert np.array_equal(wide.batch(0).tokens, wide.task.batch(0, 0, range(64), 64).tokens), "no number wraps around"
    assert source.in_words.endswith("the value modulo 5, with * before + and -")
    with pytest.raises(ConfigError, match=re.escape("--set train.chunk_size=128")):
        TaskSource("s3", 40, 8, 3)


def test_a_run_on_a_task_is_scored_again_as_its_training_did(tmp_path, capsys):
    run = str(tmp_path / "run")
    assert (
        elman(["train", "gru@16x1", "--data", "task:parity", "--out", run, *TRAIN, "--set", "train.chunk_size=40"]) == 0
    )
    capsys.readouterr()
    assert elman(["eval", run, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (said["part"], said["bytes"]) == ("held out", last["bytes"])
    assert said["loss"] == pytest.approx(last["loss"], rel=1e-5)


class Oracle(torch.nn.Module):
    """Answers parity rightly, but for the last of every `wrong` rows."""

    device = torch.device("cpu")

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong

    def forward(self, input_ids):
        answers = 2 + input_ids.cumsum(1) % 2
        answers[self.wrong - 1 :: self.wrong, -1] = 0
        return type("Output", (), {"logits": torch.nn.functional.one_hot(answers, 4).float()})


def test_accuracy_counts_places_ends_and_whole_sequences():
    task = find("parity:labels=every,tests=8+12")
    result = accuracy(Oracle(4), task, rows=100)
    assert list(result) == ["8", "12"]
    assert result["8"] == {"places": 1 - 0.25 / 8, "whole": 0.75, "end": 1 - 0.25 / 2, "sequences": 100}
    last = accuracy(Oracle(4), find("parity:tests=8"), rows=100)["8"]
    assert (last["places"], last["whole"], last["end"]) == (0.75, 0.75, 0.75)


def test_lines_of_later_steps_are_replaced(tmp_path):
    for step in (2, 4, 6, 4):
        add(tmp_path, step, {"8": {"places": 0.5, "end": 0.5, "whole": 0.5}})
    assert [line["step"] for line in read(tmp_path)] == [2, 4]
    changed = (tmp_path / "accuracy.jsonl").read_text().replace("0.5", "0.7", 1)
    for damaged in (changed, "3", "[" * 3000, '{"step": "4", "tests": {}}', '{"step": 4, "tests": {"8": 0.5}}', "{"):
        (tmp_path / "accuracy.jsonl").write_text(damaged + "\n")
        with pytest.raises(CheckpointError, match="remove it, then resume"):
            read(tmp_path)


def test_a_resumed_run_has_the_accuracies_of_an_uninterrupted_one(tmp_path, capsys):
    task, sets = "parity:tests=8,train=3-8", [*TRAIN, "--set", "train.keep=0"]
    assert elman(["tasks", "train", task, "gru@16x1", "--out", str(tmp_path / "run"), *sets]) == 0
    assert "sequences with all right" in capsys.readouterr().out
    lines = read(tmp_path / "run")
    assert [line["step"] for line in lines] == [2, 4]
    sets[1] = "2"
    command = ["tasks", "train", task, "gru@16x1", "--out", str(tmp_path / "two"), *sets]
    assert elman([*command, "--set", "train.schedule=constant"]) == 0
    assert elman(["resume", str(tmp_path / "two"), "--steps", "4"]) == 0
    assert [line["step"] for line in read(tmp_path / "two")] == [2, 4]
    config = json.loads((tmp_path / "run/checkpoints/step-00000004/config.json").read_text())
    assert config["vocab_size"] == 4
    code = elman(
        ["train", "gru@16x1", "--data", str(Path(__file__)), "--steps", "1", "--set", "train.loggers=accuracy"]
    )
    assert code == 2
    assert "the logger accuracy needs a task" in capsys.readouterr().err


def test_the_logger_refuses_a_model_of_which_its_process_has_a_part():
    settings = SimpleNamespace(data=SimpleNamespace(path="task:parity"))
    with pytest.raises(ConfigError, match="parallel=ddp"):
        logger.elman_run_start(SimpleNamespace(settings=settings, plan=SimpleNamespace(parallel="fsdp")))


def test_a_run_ends_at_the_evaluation_that_reaches_until_as_a_finished_one(tmp_path, capsys):
    """Any accuracy is at least 0.01, and one of a half is no 1."""
    (tmp_path / "tiny.toml").write_text(
        """
tasks = ["parity:train=3-8,tests=8+16,until=0.01", "parity:train=3-9,tests=9,until=1"]
models = ["gru@16x1"]
seeds = 1
[protocol.train]
batch_size = 4
steps = 6
eval_every = 2
save_every = 0
"""
    )
    command = ["tasks", "suite", str(tmp_path / "tiny.toml"), "--gpus", "none", "--out", str(tmp_path / "out")]
    assert elman(command) == 0
    rows = {row["task"]: row for row in suites.results(tmp_path / "out")}
    assert {task: row["steps"] for task, row in rows.items()} == {
        "parity:train=3-8,tests=8+16": 2,
        "parity:train=3-9,tests=9": 6,
    }
    solved, other = sorted((tmp_path / "out/runs").iterdir(), key=lambda run: len(read(run)))
    assert [line["step"] for line in read(solved)] == [2]
    assert [line["step"] for line in read(other)] == [2, 4, 6]
    manifests = [json.loads((run / "manifest.json").read_text()) for run in (solved, other)]
    assert [m["status"] for m in manifests] == ["ok", "ok"]
    assert manifests[0]["horizon"]["steps"] == 6, "the schedule is that of all steps"
    assert manifests[0]["protocol"]["steps"] == manifests[1]["protocol"]["steps"] == 6
    files = sorted(solved.rglob("*"))
    before = [path.stat().st_mtime_ns for path in files]
    capsys.readouterr()
    assert elman(["resume", str(solved)]) == 0
    assert "2 steps" in capsys.readouterr().out
    assert elman(command) == 0
    assert sorted(solved.rglob("*")) == files
    assert [path.stat().st_mtime_ns for path in files] == before
    assert elman(["resume", str(solved), "--steps", "3"]) == 0, "by hand it goes on"
    assert [line["step"] for line in read(solved)] == [2, 3]
    for wrong in ("0", "1.5", "nan", "all"):
        with pytest.raises(ConfigError, match="until takes a number from 0 to 1"):
            find(f"parity:until={wrong}")


def test_a_name_is_a_task_of_the_suite_with_its_options_there():
    listed = ["parity:until=1", "mqar:pairs=8", "mqar:pairs=64"]
    assert suites.named("mqar", listed) == listed[1:]
    assert suites.named("parity:tests=8", listed) == ["parity:tests=8"]
    assert suites.named("s3", listed) == ["s3"]


def test_a_variant_of_ones_own_trains_without_an_edit(tmp_path):
    folder, _ = render("e99", tmp_path)
    leave_installed(folder)
    command = [sys.executable, "-m", "elman_core", "tasks", "train", "s3:train=8-8,tests=8", "e99@16x1"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "CXX": "none"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run"), *TRAIN], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(read(tmp_path / "run")) == 2


SUITE = """
summary = "tiny"
tasks = ["parity:train=3-8,tests=8+16", "mqar:pairs=2,train=16-16,tests=16"]
models = ["gru@16x1", { model = "gru+lstm@16x2", label = "both" }]
seeds = 2
[protocol.train]
batch_size = 4
steps = 2
"""


def test_a_suite_is_every_model_on_every_task_with_seeds_in_turn(tmp_path):
    (tmp_path / "tiny.toml").write_text(SUITE)
    planned = suites.plan_tasks(*suites.read_suite(str(tmp_path / "tiny.toml")), Overrides(""))
    assert [job.seed for job in planned.jobs] == [42] * 4 + [43] * 4
    assert [job.settings.train.chunk_size for job in planned.jobs[:4]] == [8, 8, 16, 16]
    assert planned.jobs[1].settings.data.path == "task:parity:train=3-8,tests=8+16"
    assert {job.settings.train.loggers for job in planned.jobs} == {"accuracy"}
    asked = Overrides("", sets=("train.loggers=wandb",))
    asked_too = suites.plan_tasks(*suites.read_suite(str(tmp_path / "tiny.toml")), asked)
    assert {job.settings.train.loggers for job in asked_too.jobs} == {"wandb,accuracy"}, (
        "without it there are no tables"
    )
    (tmp_path / "none.toml").write_text(SUITE.replace("tasks =", "# tasks ="))
    with pytest.raises(ConfigError, match="names no tasks"):
        suites.read_suite(str(tmp_path / "none.toml"))
    (tmp_path / "twice.toml").write_text(SUITE.replace("mqar:pairs=2,train=16-16,tests=16", "parity:train=3-8,until=1"))
    with pytest.raises(ConfigError, match="has the task parity:train=3-8 twice"):
        suites.plan_tasks(*suites.read_suite(str(tmp_path / "twice.toml")), Overrides(""))
    for name in suites.shipped():
        chosen, tasks, tree = suites.read_suite(name)
        assert suites.plan_tasks(chosen, tasks, tree, Overrides("")).jobs, name


def test_runs_become_tables_pictures_and_a_report(tmp_path):
    for seed in (1, 2):
        where = ["--out", str(tmp_path / f"runs/{seed}"), "--set", f"train.seed={seed}"]
        assert elman(["tasks", "train", "parity:train=3-8,tests=8+16", "gru@16x1", *where, *TRAIN]) == 0
    (section,), report = suites.finish(tmp_path)
    (row,) = section.rows
    assert section.heads[-2:] == ("8", "16")
    assert row[2] == "2"
    accuracies = [read(tmp_path / f"runs/{seed}")[-1]["tests"]["8"]["places"] for seed in (1, 2)]
    assert row[-2] == f"{np.mean(accuracies):.3f}"
    assert "±" in row[3]
    page = report.read_text()
    assert "the parity of the ones" in page
    assert page.count("data:image/svg") > 1
    assert len(json.loads((tmp_path / suites.RESULT).read_text())["runs"]) == 2
    manifest = read_json(tmp_path / "runs/1/manifest.json")
    del manifest["result"]["bits_per_byte"]  # the line of its evaluation was damaged
    write_json(tmp_path / "runs/1/manifest.json", manifest)
    assert suites.finish(tmp_path) is not None
    first, second = (row["held_out"] for row in read_json(tmp_path / suites.RESULT)["runs"])
    assert (first, second > 0) == (None, True)


def test_a_variant_in_two_sizes_is_two_models_and_not_two_seeds(tmp_path):
    for size in ("16x1", "24x1"):
        where = ["--out", str(tmp_path / size)]
        assert elman(["tasks", "train", "parity:train=3-8,tests=8+16", f"gru@{size}", *where, *TRAIN]) == 0
    assert [row["model"] for row in suites.results(tmp_path)] == ["gru@16x1", "gru@24x1"]
    (section,) = suites.tables(suites.results(tmp_path))
    assert [row[2] for row in section.rows] == ["1", "1"]
    assert "protocol" not in section.summary
    where = ["--out", str(tmp_path / "longer"), *TRAIN[2:], "--steps", "6"]
    assert elman(["tasks", "train", "parity:train=3-8,tests=8+16", "gru@16x1", *where]) == 0
    (section,) = suites.tables(suites.results(tmp_path))
    assert [row[::2][:2] for row in section.rows] == [
        ["gru@16x1 steps=4", "1"],
        ["gru@24x1", "1"],
        ["gru@16x1 steps=6", "1"],
    ]
    assert section.summary.endswith("Not one protocol: train.steps differ.")


def test_a_tuned_setting_may_be_a_word():
    made = [
        {"model": "a", "tuned": {"train.optimizer": name}, "held_out": bits} for name, bits in (("b", 0.5), ("c", 0.4))
    ]
    assert list(suites._chosen(made)) == ["a, optimizer c"]


def test_a_tuned_value_of_one_seed_does_not_stand_for_three():
    made = [
        {"model": "a", "tuned": {"train.lr": lr}, "seed": seed, "held_out": bits}
        for lr, bits, seeds in ((0.1, 0.5, 3), (0.2, 0.4, 1))
        for seed in range(seeds)
    ]
    assert {name: len(runs) for name, runs in suites._chosen(made).items()} == {"a, lr 0.1": 3}


@pytest.mark.slow
def test_the_quick_suite_shows_what_it_says(tmp_path):
    assert elman(["tasks", "suite", "quick", "--gpus", "none", "--out", str(tmp_path)]) == 0
    runs = {row["model"]: row["tests"]["40"] for row in suites.results(tmp_path)}
    assert runs["lstm"]["whole"] > 0.99
    assert runs["e1, r_h_mode=none"]["whole"] > 0.99
    assert runs["gdn, allow_neg_eigval=false"]["end"] < 0.6


def test_the_page_counts_the_runs_of_the_suites(tmp_path, capsys):
    page = (Path(__file__).parents[3] / "docs/expressivity.md").read_text()
    counted = re.findall(r"^\| \[`([a-z-]+)`\].* \| (\d+) \|$", page, re.M)
    assert len(counted) > 6
    for name, count in counted:
        assert elman(["tasks", "suite", name, "--dry-run", "--out", str(tmp_path / name)]) == 0
        assert f"tasks-{name}: {count} runs" in capsys.readouterr().out
