"""Runs become rows: figures, statuses, groups that share a protocol; whatever a kill left is read."""

import csv
import io
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from elman_bench.jobs.locks import Lock, is_locked
from elman_bench.results.collect import collect, fault_of_metrics
from elman_bench.results.identity import identity, labels, named, spelled
from elman_bench.results.runs import find_runs
from elman_bench.results.tables import as_data, columns, render, short
from results_helpers import DATA, example_suite, losses, settings, write_run, write_suite

from elman_core.cli import main
from elman_core.metrics import read_metrics
from elman_core.registry import ConfigError
from elman_core.training.run.protocol import protocol
from elman_core.training.settings import TUNABLE, known_keys, with_length


def rows(*paths: Path, **options):
    found = collect(find_runs(paths), **options)
    return [row for group in found.groups for row in group.rows]


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Path:
    return example_suite(tmp_path_factory.mktemp("suite") / "toys", seeds=(1, 2), steps=120)


# metrics -------------------------------------------------------------------------------------------------------------


def test_lost_repeated_and_misplaced_lines_change_no_figure_silently(tmp_path):
    """Any number of lines is left out, repeated and moved: each figure is as it was, or unknown, and the loss is said."""
    run = write_run(tmp_path / "run", "train.steps=150", evaluations=3, status="killed")
    whole, lines = read_metrics(run), (run / "metrics.jsonl").read_text().splitlines()
    expected, draw = whole.summary(), random.Random(0)
    assert expected["loss_last_100_steps"] == pytest.approx(losses(150, 1.4, 42)[50:].mean())
    for trial in range(200):
        kept = [line for line in lines if trial % 2 or draw.random() > 0.02]
        kept += draw.choices(lines, k=draw.randrange(3)) if trial % 3 else []
        if trial % 5:
            draw.shuffle(kept)
        (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in kept))
        found = read_metrics(run)
        figures = found.summary()
        assert list(found.columns["step"]) == sorted({json.loads(k)["step"] for k in kept if '"lr"' in k})
        if found.columns["step"][-1] == 150:
            assert (
                figures.get("loss_last_100_steps", expected["loss_last_100_steps"]) == expected["loss_last_100_steps"]
            )
        assert ("loss_last_100_steps" in figures) or found.lacking
        assert bool(found.broken) == (kept != [line for line in lines if line in kept])
        (group,) = collect(find_runs([run])).groups
        assert bool(found.broken or found.lacking) == any("metrics.jsonl" in note for note in group.notes)
    done = write_run(tmp_path / "done", "train.steps=150", evaluations=0)
    (done / "metrics.jsonl").write_text("".join((done / "metrics.jsonl").read_text().splitlines(keepends=True)[:100]))
    (ended,) = find_runs([done])
    assert (len(ended.metrics), ended.metrics.lacking) == (100, 0)
    assert "50 steps have no line" in fault_of_metrics(ended), "the end is lost"


# rows ----------------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_row(tmp_path):
    run = write_run(tmp_path / "run", "train.steps=500", tok_s=1e5, parameters=123_456, heldout=1.75)
    (row,) = rows(run)
    found = losses(500, 1.4, 42)
    assert row.value("bits_per_byte") == 1.75
    assert row.value("last_100") == pytest.approx(found[-100:].mean())
    assert row.value("loss") == pytest.approx(found[-100:].mean())  # alone, it is where all of the group came
    assert row.value("parameters") == 123_456
    speeds = [1e5 * (1 + 0.05 * np.sin(i)) for i in range(51, 501)]
    assert row.value("tok_s") == pytest.approx(statistics.median(speeds))
    assert row.value("peak_memory") == 2**30 + 500_000
    assert row.value("minutes") == pytest.approx(499 * 512 / 1e5 / 60)
    assert row.status == "ok"
    assert row.seeds == (42,)


def test_a_run_in_progress_has_the_same_figures_as_its_summary_would_have(tmp_path):
    """The summary in the manifest and what is computed from the metrics are one thing."""
    (run,) = find_runs([write_run(tmp_path / "run", "train.steps=250")])
    assert run.metrics.summary() == pytest.approx(run.manifest["result"])


@pytest.mark.parametrize("size", [1, 3.5, 0.75])  # of bytes, of subwords, in rows that are a quarter filling
def test_loss_at_equal_tokens_is_where_the_shortest_finished_run_ended(tmp_path, size):
    sets = ("train.schedule='wsd'", "train.minutes=1.0")
    values = losses(400, 1.4, 42)
    for name, done in (("short", 250), ("long", 400), ("lossy", 400), ("crashed", 90)):
        write_run(
            tmp_path / name, *sets, f"model.hidden_size={256 + 8 * len(name)}", "train.lr=0.001", values=values[:done],
            status="crashed" if name == "crashed" else "ok", bytes_per_token=size,
        )  # fmt: skip
    # an override of minutes leaves BASE's steps; the settings a training resolves have only one of them
    lines = (tmp_path / "lossy/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "lossy/metrics.jsonl").write_text("".join(lines[:240] + lines[255:]))
    (group,) = collect(find_runs([tmp_path])).groups
    assert group.tokens == 250 * 512 * size
    assert any("mean of all steps where a run has fewer: 90" in note for note in group.notes)
    by_name = {row.runs[0].path.name: row for row in group.rows}
    for name in ("short", "long"):
        assert by_name[name].value("loss") == pytest.approx(values[150:250].mean())
    assert by_name["long"].value("last_100") == pytest.approx(values[300:400].mean())
    assert np.isnan(by_name["crashed"].value("loss"))
    assert np.isnan(by_name["lossy"].value("loss")), "the lines around that step are lost"
    assert [row.status for row in group.rows] == ["ok", "ok", "ok", "crashed"]


def test_a_heading_says_that_nothing_is_held_out(tmp_path):
    facts = {"protocol": protocol(settings("data.eval_bytes=5000"), DATA, 0)}
    run = write_run(tmp_path / "run", evaluations=0, **facts)
    assert "nothing held out" in render(collect(find_runs([run])), "markdown")


@pytest.mark.parametrize(("asked", "shown"), [("0.9035679810165069", "0.903568"), ("10", "10")])
def test_a_heading_has_no_more_digits_of_minutes_than_one_reads(asked, shown, tmp_path):
    """`elman resume --minutes +0.2` adds to what a clock has measured."""
    minutes = with_length(settings("train.schedule='wsd'"), None, float(asked))
    run = write_run(tmp_path / "run", protocol=protocol(minutes, DATA, 0), settings=minutes.to_dict())
    assert f"· {shown} minutes of 8 x 64 bytes" in render(collect(find_runs([run])), "markdown")


def test_rows_that_did_not_end_well_stand_last_however_low_their_loss(tmp_path):
    write_run(tmp_path / "good", level=2.0)
    write_run(
        tmp_path / "bad", "model.hidden_size=128", level=0.5, status="diverged@301", result={"bits_per_byte": 0.1}
    )
    write_run(tmp_path / "unevaluated", "model.hidden_size=64", evaluations=0, level=0.1)
    found = rows(tmp_path)
    assert [row.runs[0].path.name for row in found] == ["good", "unevaluated", "bad"]
    assert found[-1].status == "diverged@301"


@pytest.mark.parametrize(
    ("sort", "first"), [("bpb", "a"), ("tok_s", "b"), ("parameters", "c"), ("model", "c"), ("memory", "a")]
)
def test_sorting(tmp_path, sort, first):
    write_run(tmp_path / "a", "model.hidden_size=300", "train.steps=300", level=1.0, tok_s=1e3, parameters=30)
    write_run(tmp_path / "b", "model.hidden_size=310", level=1.2, tok_s=3e3, parameters=20)
    write_run(tmp_path / "c", "model.hidden_size=100", level=1.1, tok_s=2e3, parameters=10)
    assert rows(tmp_path, sort=sort)[0].runs[0].path.name == first
    with pytest.raises(ConfigError, match="--sort takes one of"):
        rows(tmp_path, sort="size")


# statuses ------------------------------------------------------------------------------------------------------------


def test_a_running_run_is_told_from_one_whose_process_is_gone(tmp_path):
    here = {"host": platform.node(), "device": "cpu"}
    run = write_run(tmp_path / "run", status="running", steps=100, hardware=here)
    (row,) = rows(run)
    assert row.status == "killed"
    assert "process is gone" in row.remark
    held = Lock(run / ".lock")
    (row,) = rows(run)
    assert row.status == "running"
    assert row.value("last_100") == pytest.approx(losses(300, 1.4, 42)[:100].mean())
    assert is_locked(run / ".lock"), "looking took nothing from the process"
    held.close()
    assert rows(run)[0].status == "killed"


def test_a_run_on_another_machine_counts_as_running_while_it_writes(tmp_path):
    run = write_run(tmp_path / "run", status="running", steps=10, hardware={"host": "elsewhere", "device": "cuda"})
    assert rows(run)[0].status == "running"
    for name in ("metrics.jsonl", "manifest.json"):
        os.utime(run / name, (time.time() - 3600, time.time() - 3600))
    (row,) = rows(run)
    assert row.status == "killed"
    assert "elsewhere" in row.remark


@pytest.mark.parametrize(
    ("said", "state", "wanted"),
    [
        ("ok", {"status": "ok", "contended": True}, "contended"),
        ("killed", {"status": "timeout"}, "timeout"),
        ("running", {"status": "oom"}, "oom"),
        ("running", {"status": "lost"}, "killed"),
        ("ok", {"status": "timeout"}, "ok"),
        ("oom", {"status": "ok"}, "oom"),
        ("diverged@7", {"status": "crashed", "contended": True}, "diverged@7"),
    ],
)
def test_the_run_and_its_job_give_one_status(tmp_path, said, state, wanted):
    done = {} if said == "ok" else {"steps": 20}
    write_suite(tmp_path / "s", [{"id": "a", "model": "toy", "status": said, "state": state, "hardware": None, **done}])
    assert rows(tmp_path / "s")[0].status == wanted
    assert rows(tmp_path / "s" / "runs" / "a")[0].status == wanted  # by itself, it still knows its job


@pytest.mark.parametrize(
    ("state", "wanted", "said"),
    [("waiting", "waiting", "–"), ("ok", "incomplete", "b: incomplete: it has no manifest.json")],
)
def test_a_job_without_a_run_waits_or_has_lost_it(tmp_path, state, wanted, said, capsys):
    jobs = [{"id": "a", "model": "toy"}, {"id": "b", "model": "toy2", "begun": False, "state": {"status": state}}]
    found = rows(write_suite(tmp_path / "s", jobs))
    assert [(row.model, row.status) for row in found] == [("toy", "ok"), ("toy2", wanted)]
    assert main(["results", str(tmp_path / "s")]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"status": "running"}', '{"settings": {}}'])
def test_a_damaged_or_empty_manifest_is_a_row_that_is_not_ok(tmp_path, content, capsys):
    run = write_run(tmp_path / "run")
    (run / "manifest.json").write_text(content)
    assert main(["results", str(run)]) == 0
    said = capsys.readouterr().out
    assert "protocol unknown" in said
    assert "ok" not in said.split()
    assert ("killed" if "status" in content else "incomplete") in said


@pytest.mark.parametrize(
    ("file", "where", "value"),
    [
        ("manifest.json", ("protocol",), -1), ("manifest.json", ("protocol", "data"), "text"),
        ("manifest.json", ("protocol", "evaluation"), [None]), ("manifest.json", ("result",), True),
        ("manifest.json", ("settings", "train"), 3), ("manifest.json", ("settings", "train", "steps"), [1]),
        ("manifest.json", ("settings", "train", "seed"), [1]), ("manifest.json", ("backends",), [None]),
        ("manifest.json", ("status",), {}), ("manifest.json", ("parameters",), "many"), ("manifest.json", ("hardware",), []),
        ("metrics.jsonl", ("loss",), {}), ("metrics.jsonl", ("seconds",), []), ("metrics.jsonl", ("step",), "x"),
        ("metrics.jsonl", ("kind",), None), ("suite.json", ("jobs", 0, "model"), {}), ("suite.json", ("jobs", 0), 7),
        ("suite.json", ("jobs", 0, "tuned"), 7), ("suite.json", ("jobs",), 7), ("a.json", ("attempts",), [None]),
        ("a.json", ("status",), 5),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_kind_stops_no_command(tmp_path, file, where, value, monkeypatch):
    """A file that was damaged, or written by another version: the rest is shown."""
    monkeypatch.setattr("elman_bench.results.plots.for_report", lambda *_: {})
    jobs = [
        {"id": "a", "model": "toy", "state": {"attempts": [{}]}},
        {"id": "b", "model": "other", "sets": ("model.hidden_size=64",)},
    ]
    suite = write_suite(tmp_path / "s", jobs)
    path = next(suite.rglob(f"runs/a/{file}"), None) or next(suite.rglob(file))
    lines = path.read_text().splitlines() if file == "metrics.jsonl" else [path.read_text()]
    tree = inner = json.loads(lines[-2] if file == "metrics.jsonl" else lines[-1])
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    lines[-2 if file == "metrics.jsonl" else -1] = json.dumps(tree)
    path.write_text("\n".join(lines))
    usable = file != "suite.json" or where != ("jobs",)
    for command in (["results"], ["results", "--by-model", "--format", "csv"], ["results", "--html"], ["compare"]):
        assert main([command[0], str(suite), *command[1:]]) in (
            (0, 2) if command == ["compare"] else (0,) if usable else (2,)
        )


# protocols -----------------------------------------------------------------------------------------------------------


def test_protocols_are_never_in_one_ranking_and_the_keys_that_differ_are_named(tmp_path, capsys):
    write_run(tmp_path / "a", level=1.4)
    write_run(tmp_path / "b", "model.hidden_size=128", level=1.5)
    write_run(tmp_path / "c", "train.precision='bf16'", "train.weight_decay=0.2", level=0.9)
    found = collect(find_runs([tmp_path]))
    assert [[row.runs[0].path.name for row in group.rows] for group in found.groups] == [["a", "b"], ["c"]]
    assert found.differences == {"train.precision": ("fp32", "bf16"), "train.weight_decay": (0.1, 0.2)}
    assert main(["results", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "2 protocols, each ranked by itself; they differ in:" in said
    assert "train.weight_decay: 0.1 | 0.2" in said


def test_a_run_that_was_extended_stands_apart(tmp_path):
    """`elman resume --steps +100` changes the settings and not the hash that the run began with."""
    write_run(tmp_path / "a")
    run = write_run(tmp_path / "b")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["settings"]["train"]["steps"] = 400
    (run / "manifest.json").write_text(json.dumps(manifest))
    found = collect(find_runs([tmp_path]))
    assert len(found.groups) == 2
    assert set(found.differences) == {"train.steps", "extended from"}


def test_runs_of_one_identity_have_one_protocol(tmp_path):
    """Whatever the protocol holds, and the model, sets runs apart; memory, speed and what is written do not."""
    (base,) = find_runs([write_run(tmp_path / "base")])
    held = {k for k in named(base.manifest["protocol"]) if k in known_keys()} | {k for k in TUNABLE if k != "train.lr"}
    apart = {**dict.fromkeys(held, "other"), "train.lr": 0.5, "model.hidden_size": 1, "model.options": {"a": 1}}
    alike = ("train.seed", "train.accumulate", "train.device", "train.save_every", "train.launch", "data.path")
    for key, value in {**apart, **dict.fromkeys(alike, "other")}.items():
        table, name = key.split(".")
        tree = {**base.settings, table: {**base.settings[table], name: value}}
        assert (identity(replace(base, manifest={"settings": tree})) == identity(base)) == (key in alike), key


def test_notes_say_what_the_hash_does_not(tmp_path):
    write_run(tmp_path / "a", parameters=50_000_000)
    write_run(tmp_path / "b", "model.hidden_size=64", parameters=60_000_000, act_hooks={"elman_loss": ["plugin"]},
              hardware={"gpu": "NVIDIA H200", "device": "cuda"})  # fmt: skip
    (group,) = collect(find_runs([tmp_path])).groups
    notes = " ".join(group.notes)
    assert "different hardware" in notes
    assert "NVIDIA H200" in notes
    assert "hooks" in notes
    assert "not models of equal size" in notes


def test_speeds_without_a_kernel_and_kernels_that_nobody_verified_are_noted(tmp_path):
    gpu = {"device": "cuda", "gpu": "NVIDIA H200"}
    write_run(tmp_path / "a", hardware=gpu, backends=["layers 0-5 ToyMixer: torch (ELMAN_KERNELS=off)"])
    write_run(tmp_path / "b", "model.hidden_size=64", hardware=gpu, backends=["layers 0-5 ToyMixer: fla"],
              kernels={"toy T=64": {"plan": "x", "skipped": True, "stamp": None}})  # fmt: skip
    write_run(tmp_path / "c", "model.hidden_size=32", hardware=gpu, backends=["layers 0, 2, 4 Attention: sdpa"])
    (group,) = collect(find_runs([tmp_path])).groups
    plain, unverified = [n for n in group.notes if "kernel" in n]
    assert "toy@256x6 (layers 0-5 ToyMixer: torch (ELMAN_KERNELS=off))" in plain
    assert "fla" not in plain
    assert "Attention" not in plain
    assert unverified.endswith("(ELMAN_VERIFY=skip): b")
    assert not [n for n in collect(find_runs([write_run(tmp_path / "cpu")])).groups[0].notes if "kernel" in n]


def test_a_narrow_terminal_gets_whole_columns_and_the_names_of_the_rest(suite, capsys, monkeypatch):
    monkeypatch.setattr("elman_bench.cli.results.columns", lambda: 80)
    for words in (["results"], ["compare"]):
        assert main([*words, str(suite)]) == 0
        said = capsys.readouterr().out
        assert max(len(line) for line in said.splitlines()) <= 80
        if words == ["results"]:
            assert "bits/byte" in said
            assert "not shown at this width: " in said


# suites --------------------------------------------------------------------------------------------------------------


def test_a_suite_shows_the_chosen_learning_rates_and_says_what_it_hides(suite, capsys):
    assert main(["results", str(suite)]) == 0
    said = capsys.readouterr().out
    assert "16 runs with values of tuned settings that were not chosen: --all shows them" in said
    assert "lr 1e-3 of 3e-4, 1e-3, 3e-3" in said
    found = rows(suite, everything=False)
    assert {row.tuned["train.lr"] for row in found} == {1e-3}
    assert len(found) == 8
    assert len(rows(suite)) == 24
    assert all(row.tried == {"train.lr": (3e-4, 1e-3, 3e-3)} for row in rows(suite))


def test_jobs_that_have_not_begun_have_the_name_of_those_that_have(tmp_path):
    """Only a run that has begun has resolved settings: they must not make its model another one."""
    jobs = [
        {"id": "a1", "model": "toy", "sets": ("train.seed=1",)},
        {"id": "a2", "model": "toy", "sets": ("train.seed=2",), "begun": False, "state": {"status": "waiting"}},
    ]
    suite = write_suite(tmp_path / "s", jobs)
    manifest = suite / "runs" / "a1" / "manifest.json"
    facts = json.loads(manifest.read_text())
    # Presets and defaults are written out when a model is built.
    facts["settings"]["model"]["options"] = {"expansion": 2.0}
    facts["settings"]["train"]["precision"] = "bf16"
    manifest.write_text(json.dumps(facts))
    assert [row.model for row in rows(suite)] == ["toy", "toy"]
    (row,) = rows(suite, by_model=True)
    assert (row.status, row.remark, row.seeds) == ("ok", "left out: waiting (seed 2)", (1,))


def test_means_over_seeds(suite):
    found = rows(suite, by_model=True, everything=False)
    assert [row.model for row in found] == ["toy-a", "toy-d", "toy-b", "toy <c>"]
    single = [row for row in rows(suite, everything=False) if row.model == "toy-a"]
    values = [row.value("bits_per_byte") for row in single]
    figure = found[0].figures["bits_per_byte"]
    assert figure.value == pytest.approx(statistics.fmean(values))
    assert figure.spread == pytest.approx(statistics.stdev(values))
    assert figure.count == 2
    assert found[0].seeds == (1, 2)


def test_a_mean_leaves_out_seeds_without_a_number_and_names_those_that_did_not_end_well(tmp_path):
    for seed, heldout, status in ((1, None, "ok"), (2, 2.0, "ok"), (3, 4.0, "ok"), (4, 1.0, "crashed")):
        evaluations = 4 if heldout else 0
        write_run(tmp_path / str(seed), f"train.seed={seed}", heldout=heldout, evaluations=evaluations, status=status)
    (row,) = rows(tmp_path, by_model=True)
    assert (row.value("bits_per_byte"), row.figures["bits_per_byte"].count) == (3.0, 2)
    assert (row.remark, row.seeds) == ("left out: crashed (seed 4)", (1, 2, 3))


def test_seeds_that_shared_a_gpu_are_no_mean_with_one_that_was_killed(tmp_path):
    shared = {"state": {"contended": True, "status": "ok"}}
    jobs = [{"id": f"s{s}", "model": "toy", "sets": (f"train.seed={s}",), "heldout": 2.0, **shared} for s in (1, 2, 3)]
    jobs[2] |= {"status": "killed", "steps": 100, "state": {}}
    (row,) = rows(write_suite(tmp_path / "s", jobs), by_model=True)
    assert (row.value("bits_per_byte"), row.status, row.seeds) == (2.0, "contended", (1, 2))
    jobs[2] |= {"status": "ok", "steps": None}
    (group,) = collect(find_runs([write_suite(tmp_path / "t", jobs)]), by_model=True).groups
    assert (group.rows[0].status, group.rows[0].seeds) == ("ok", (3,))
    assert "toy: left out: contended (seed 1), contended (seed 2)" in group.notes


def test_a_repeated_run_is_no_second_seed_of_a_mean(tmp_path):
    for name, seed, heldout in (("a", 1, 2.0), ("again", 1, 2.0), ("other", 2, 2.3)):
        write_run(tmp_path / name, f"train.seed={seed}", heldout=heldout)
    (row,) = rows(tmp_path, by_model=True)
    assert (row.value("bits_per_byte"), row.figures["bits_per_byte"].count) == (pytest.approx(2.15), 2)
    assert (row.remark, row.seeds, len(row.runs)) == ("left out: repeated (seed 1)", (1, 2), 3)


@pytest.mark.parametrize(("count", "text"), [(999_400, "999K"), (999_700, "1M"), (16_384_000, "16.4M"), (999, "999")])
def test_short_counts_have_no_exponent(count, text):
    assert short(count) == text


def tried(lr, level, **rest):
    tuned = {"sets": (f"train.lr={lr}",), "tuned": {"train.lr": lr}}
    return {"id": f"lr{lr}", "model": "toy", "level": level, **tuned, **rest}


def test_a_learning_rate_without_a_run_that_ended_well_is_not_chosen(tmp_path):
    suite = write_suite(tmp_path / "s", [tried(0.1, 0.5, status="oom"), tried(0.2, 1.5)])
    assert [row.runs[0].path.name for row in rows(suite, everything=False)] == ["lr0.2"]


def test_a_repeated_run_is_no_second_seed_of_a_learning_rate(tmp_path):
    for name, jobs in (("s", [tried(0.1, 1.5), tried(0.2, 1.2)]), ("again", [tried(0.1, 1.5)])):
        write_suite(tmp_path / name, jobs)
    assert [row.tuned["train.lr"] for row in rows(tmp_path, everything=False)] == [0.2]


@pytest.mark.parametrize(
    ("levels", "note"),
    [
        ((1.5, 1.4, 1.3), "toy: the best train.lr, 0.03, is the largest value tried"),
        ((1.2, 1.4, 1.3), "toy: the best train.lr, 0.01, is the smallest value tried"),
        ((1.5, 1.2, 1.3), ""),
    ],
)
def test_a_best_value_at_the_edge_of_those_tried_is_noted(tmp_path, levels, note):
    for contended in (False, True):
        state = {"state": {"status": "ok", "contended": contended}}
        jobs = [tried(lr, level, **state) for lr, level in zip((0.01, 0.02, 0.03), levels, strict=True)]
        notes = " ".join(collect(find_runs([write_suite(tmp_path / f"{contended}", jobs)])).groups[0].notes)
        assert note in notes
        assert ("value tried" in notes) == bool(note)


def test_sizes_of_a_suite_are_ranked_apart(tmp_path):
    """One sized by hand stands with the nearest; with a single size, all stand together."""
    jobs = [
        {"id": f"{t}-{size}", "model": "toy", "sets": (f"model.hidden_size={size}",), "target": t, "parameters": size}
        for t, size in (("1k", 1000), ("8k", 8000), (None, 1100), (None, 2900), (None, 9000))
    ]
    found = collect(find_runs([write_suite(tmp_path / "s", jobs)]))
    sizes = {group.target: sorted(row.value("parameters") for row in group.rows) for group in found.groups}
    assert sizes == {"1k": [1000, 1100], "8k": [2900, 8000, 9000]}
    assert found.differences == {}
    (group,) = collect(
        find_runs([write_suite(tmp_path / "one", [job for job in jobs if job["target"] != "8k"])])
    ).groups
    assert (group.target, len(group.rows)) == (None, 4)


def test_runs_with_one_name_are_told_apart_by_their_settings(tmp_path):
    for name, sets in (("a", ()), ("b", ("train.lr=0.004",)), ("c", ("train.seed=3",))):
        write_run(tmp_path / name, *sets)
    found = labels(find_runs([tmp_path]))
    assert found == ["toy@256x6 lr=1e-3", "toy@256x6 lr=4e-3", "toy@256x6 lr=1e-3"]
    assert [spelled(x) for x in (0.1, 3e-4, 1e-5, 2.5e-3, True)] == ["0.1", "3e-4", "1e-5", "2.5e-3", "true"]


def test_a_label_keeps_the_preset_and_the_options_that_were_asked_for(tmp_path):
    asked = {"variant": "toy:wide", "options": {"heads": 3}}
    write_run(tmp_path / "a", "model.options.heads=3", "model.options.n=8", asked=asked)
    write_run(tmp_path / "b", "model.options.n=8", asked={"variant": "toy:wide", "options": {}})
    assert labels(find_runs([tmp_path])) == ["toy:wide@256x6 heads=3", "toy:wide@256x6"]


# finding, formats ----------------------------------------------------------------------------------------------------


def test_a_run_given_twice_counts_once_and_folders_are_searched(tmp_path):
    run = write_run(tmp_path / "deep" / "er" / "a")
    write_run(tmp_path / "deep" / "b")
    (tmp_path / "deep" / "empty").mkdir()
    assert len(find_runs([tmp_path, run, run / ".." / "a"])) == 2


def test_what_is_no_run_is_one_line_and_exit_2(tmp_path, capsys):
    assert main(["results", str(tmp_path / "none")]) == 2
    assert main(["results", str(tmp_path)]) == 2
    assert main(["results", str(tmp_path), "--format", "xml"]) == 2
    write_run(tmp_path / "a")
    assert main(["results", str(tmp_path), "--format", "xml"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4
    assert "there is no run in" in said[1]
    assert "--format takes one of terminal, markdown, csv, json" in said[3]


def test_csv_and_json_hold_the_same_figures_as_the_table(suite, capsys):
    assert main(["results", str(suite), "--format", "csv", "--by-model"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert main(["results", str(suite), "--json", "--by-model"]) == 0
    data = json.loads(capsys.readouterr().out)
    (group,) = data["groups"]
    assert [r["model"] for r in table] == [r["model"] for r in group["rows"]] == ["toy-a", "toy-d", "toy-b", "toy <c>"]
    for line, row in zip(table, group["rows"], strict=True):
        assert float(line["bits_per_byte"]) == row["bits_per_byte"]
        assert float(line["bits_per_byte_spread"]) == row["spread"]["bits_per_byte"]
        assert line["tuned"] == "train.lr=1e-3"
    assert group["equal_tokens"] == 120 * 512
    assert data == json.loads(json.dumps(as_data(collect(find_runs([suite]), "bpb", True, False))))


def test_markdown_is_a_table_whatever_a_name_holds(tmp_path):
    jobs = [{"id": "a", "model": "a|b <i>*c*"}, {"id": "b", "model": "plain", "sets": ("model.hidden_size=64",)}]
    found = collect(find_runs([write_suite(tmp_path / "s", jobs)]))
    text = render(found, "markdown")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "a\\|b &lt;i>\\*c\\*" in text
    assert len(columns(found.groups[0])) == lines[0].count("|") - 1


def test_it_needs_no_torch(tmp_path):
    write_run(tmp_path / "a")
    code = (
        "import sys; from elman_core.cli import main; main(['results', sys.argv[1], '--json']);"
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    shown, _, modules = done.stdout.rstrip().rpartition("\n")
    assert modules == "[]"
    assert len(json.loads(shown)["groups"][0]["rows"]) == 1
