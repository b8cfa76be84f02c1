"""Two models side by side: pairs of the same batches, honest words, and what makes a comparison less than it seems."""

import copy
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from elman_bench.results.compare import against_best, against_first, contenders, describe, verdict
from elman_bench.results.runs import find_runs
from elman_bench.results.statistics import (
    block_length,
    bootstrap_mean,
    student_mean,
    student_quantile,
)
from packed_files import documents, write_packed, write_tokenizer
from results_helpers import DATA, example_suite, losses, write_run, write_suite
from train_helpers import TINY

from elman_core.cli import main
from elman_core.training.settings import apply_sets, from_dict
from elman_core.training.start import start

BITS = 1 / math.log(2)
OTHER = "model.hidden_size=128"


def pair(folder: Path, *sets: str, **more):
    """A comparison of run a, of level 1.40 with seed 42, and a run b."""
    if not (folder / "a").exists():
        write_run(folder / "a", "train.steps=800", level=1.40)
    write_run(folder / "b", "train.steps=800", OTHER, *sets, **more)
    (found,) = against_first(find_runs([folder / "a", folder / "b"]))
    return found


def test_a_pair_is_the_difference_of_its_losses_step_by_step(tmp_path):
    found = pair(tmp_path, level=1.45)
    difference = (losses(800, 1.40, 42) - losses(800, 1.45, 42))[-200:] * BITS
    (only,) = found.pairs
    assert (only.paired, only.steps, only.seeds) == (True, (601, 800), (42, 42))
    wanted = bootstrap_mean(difference)
    assert only.loss.mean == pytest.approx(difference.mean())
    assert (only.loss.low, only.loss.high) == pytest.approx((wanted.low, wanted.high))
    assert only.heldout == pytest.approx(-0.05 * BITS)
    assert verdict(found).startswith("toy@256x6 is better than toy@128x6 by 0.0")
    assert any("one seed" in text for text in found.caveats)


def test_pairing_sees_what_the_noise_of_the_batches_hides(tmp_path):
    """Levels 0.01 nats apart where batches add 0.1 nats of noise: one seed in common tells them apart, another does not."""
    close = pair(tmp_path / "same", level=1.41)
    far = pair(tmp_path / "other", "train.seed=43", level=1.41)
    assert close.decisive.clear
    assert not far.pairs[0].paired
    assert not far.decisive.clear
    assert far.decisive.half_width > 3 * close.decisive.half_width
    assert any("no seed in common" in text for text in far.caveats)
    assert "equal within noise" in verdict(far)


def test_what_is_the_same_is_equal_within_noise(tmp_path):
    values = losses(800, 1.40, 42) + 0.02 * np.random.default_rng(5).standard_normal(800)
    found = pair(tmp_path, values=values, heldout=2.0)
    assert not found.decisive.clear
    assert found.decisive.low < 0 < found.decisive.high
    assert "equal within noise" in verdict(found)


def test_last_says_how_many_steps_are_compared(tmp_path):
    pair(tmp_path, level=1.45)
    (found,) = against_first(find_runs([tmp_path / "a", tmp_path / "b"]), last=50)
    assert found.pairs[0].steps == (751, 800)


def test_runs_of_different_length_are_compared_on_the_steps_that_both_did(tmp_path):
    found = pair(tmp_path, level=1.45, status="crashed", steps=500)
    assert found.pairs[0].steps == (301, 500)
    assert found.pairs[0].heldout is None  # not evaluated where it ended
    assert any("b is crashed" in text for text in found.caveats)


def test_over_seeds_the_interval_is_students_of_the_pairs(tmp_path):
    levels = {1: (1.40, 1.45), 2: (1.41, 1.45), 3: (1.40, 1.47)}
    for seed, (one, two) in levels.items():
        write_run(tmp_path / f"a{seed}", "train.steps=800", f"train.seed={seed}", level=one)
        write_run(tmp_path / f"b{seed}", "train.steps=800", f"train.seed={seed}", OTHER, level=two)
    (found,) = against_first(find_runs(sorted(tmp_path.iterdir())))
    assert [p.seeds for p in found.pairs] == [(1, 1), (2, 2), (3, 3)]
    assert found.loss == student_mean([p.loss.mean for p in found.pairs])
    by_hand = np.array([-0.05, -0.04, -0.07]) * BITS
    assert found.heldout.mean == pytest.approx(by_hand.mean())
    assert found.heldout.half_width == pytest.approx(4.30265 * by_hand.std(ddof=1) / math.sqrt(3), rel=1e-4)
    assert found.decisive == found.heldout
    assert "(held out, 3 seeds)" in verdict(found)
    assert found.caveats == ()


def test_a_run_done_twice_is_no_second_seed(tmp_path):
    write_run(tmp_path / "a", "train.steps=800", level=1.40)
    write_run(tmp_path / "again", "train.steps=800", level=1.40)
    write_run(tmp_path / "broken", "train.steps=800", level=1.40, status="crashed", steps=700)
    write_run(tmp_path / "other", "train.steps=800", OTHER, level=1.45)
    (found,) = against_first(find_runs([tmp_path / n for n in ("broken", "a", "again", "other")]))
    assert len(found.pairs) == 1
    assert found.pairs[0].steps == (601, 800)  # not those of the run that crashed
    assert found.loss is None
    assert any("several runs of one seed" in text for text in found.caveats)


@pytest.mark.parametrize(
    ("sets", "more", "wanted", "paired"),
    [
        (("train.precision='bf16'",), {}, "the protocols differ (train.precision)", True),
        (("train.batch_size=16",), {}, "the same batches", False),
        (("data.documents='pack'",), {}, "the same batches", False),
        (("data.documents='reset'",), {}, "the protocols differ (data.documents)", True),
        ((), {"parameters": 1_100_000}, "the sizes differ: 1,000,000 and 1,100,000", True),
        ((), {"act_hooks": {"elman_loss": ["x"]}}, "hooks of different plugins", True),
    ],
)
def test_what_makes_a_comparison_unfair_is_said(tmp_path, sets, more, wanted, paired):
    found = pair(tmp_path, *sets, **more)
    assert any(wanted in text for text in found.caveats), found.caveats
    assert found.pairs[0].paired is paired
    assert wanted in describe(found)


def test_another_text_is_not_the_same_batches(tmp_path, monkeypatch):
    write_run(tmp_path / "a", "train.steps=800")
    monkeypatch.setitem(DATA, "blake2b", "another")
    found = pair(tmp_path)
    assert not found.pairs[0].paired
    assert any("texts or windows differ" in text for text in found.caveats)
    write_run(tmp_path / "a2", "train.steps=800")  # the model of a, on the other text
    (found,) = against_first(find_runs([tmp_path / "a", tmp_path / "a2"]))
    assert found.second.name == f"{found.first.name.removesuffix(' (a)')} (a2)"


def test_a_run_on_tokens_and_one_on_bytes_are_compared_in_bits_per_byte(tmp_path, capsys):
    tokenizer = write_tokenizer(tmp_path / "bpe", documents())
    text = write_packed(tmp_path / "text.bin", documents(), tmp_path / "bpe", tokenizer)
    (tmp_path / "raw").write_text("\x1e".join(documents()), encoding="utf-8")
    for name, path in (("bytes", tmp_path / "raw"), ("tokens", text)):
        how = (f"data.path={path}", "data.heldout=0.2", "train.steps=60", "train.lr=0.02", "train.eval_every=60")
        start(from_dict(apply_sets(copy.deepcopy(TINY), how)), tmp_path / name, quiet=True).fit()
    runs = [tmp_path / "bytes", tmp_path / "tokens"]
    assert main(["compare", *map(str, runs), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    steps = [[line["bits_per_byte"] for line in each if line["kind"] == "step"][-30:] for each in lines]
    ends = [[line["bits_per_byte"] for line in each if line["kind"] == "evaluation"][-1] for each in lines]
    (one,) = found["pairs"]
    assert one["loss"]["mean"] == pytest.approx(np.mean(steps[0]) - np.mean(steps[1]))
    assert one["heldout"] == pytest.approx(ends[0] - ends[1])
    assert not one["paired"]
    assert any("did not read the same batches" in text for text in found["caveats"])
    assert main(["results", *map(str, runs), "--json"]) == 0
    rows = [row for group in json.loads(capsys.readouterr().out)["groups"] for row in group["rows"]]
    assert sorted(row["bits_per_byte"] for row in rows) == pytest.approx(sorted(ends))
    assert main(["results", str(runs[1]), "--format", "markdown"]) == 0
    assert re.search(
        r"60 steps of \d+ x \d+ tokens .* held out: up to [\d,]+ tokens in windows", capsys.readouterr().out
    )


def test_a_difference_that_still_changes_is_said(tmp_path):
    values = losses(800, 1.40, 42) + np.linspace(0, 0.8, 800)
    found = pair(tmp_path, values=values)
    early, late = found.pairs[0].drift
    assert late.mean < early.mean < 0
    assert any("still changing" in text for text in found.caveats)
    assert pair(tmp_path / "steady", level=1.45).pairs[0].drift is None


def test_steps_without_a_target_that_counts_are_left_out(tmp_path):
    wanted = pair(tmp_path, level=1.45).pairs[0]
    for name in ("a", "b"):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        empty = [
            line | {"loss": 0.0, "counted": 0.0} if line["step"] in (650, 700) and "lr" in line else line
            for line in lines
        ]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in empty))
    (found,) = against_first(find_runs([tmp_path / "a", tmp_path / "b"]))
    assert found.pairs[0].loss.mean == pytest.approx(wanted.loss.mean, rel=0.02)
    assert found.pairs[0].steps == (599, 800)
    assert found.pairs[0].loss.count == 200


def test_too_few_steps_say_nothing(tmp_path):
    found = pair(tmp_path, status="crashed", steps=6)
    assert found.decisive is None
    assert "too few steps" in verdict(found)
    assert "fewer than 10 steps" in describe(found)


def test_one_model_alone_is_an_error(tmp_path, capsys):
    run = write_run(tmp_path / "a")
    assert main(["compare", str(run)]) == 2
    assert "at least two models" in capsys.readouterr().err
    (tmp_path / "s").mkdir()
    write_run(tmp_path / "s" / "a")
    assert main(["compare", str(tmp_path / "s")]) == 2
    assert "fewer than two models" in capsys.readouterr().err


def test_a_damaged_run_that_is_left_out_is_named(tmp_path, capsys):
    runs = [write_run(tmp_path / name, f"train.lr={i + 1}e-3") for i, name in enumerate("abcdef")]
    (runs[0] / "manifest.json").write_text("{")
    (runs[1] / "metrics.jsonl").write_text("x\n")
    (runs[2] / "metrics.jsonl").write_text("")
    (runs[3] / "metrics.jsonl").unlink()
    assert main(["compare", *map(str, runs)]) == 0
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith(f"elman: {runs[0]} is left out: {runs[0]}/manifest.json is damaged")
    assert others == [f"elman: {run} is left out: no step in metrics.jsonl" for run in runs[1:4]]


def test_of_a_suite_the_best_stands_beside_each_other_one_at_its_own_learning_rate(tmp_path, capsys):
    suite = example_suite(tmp_path / "s", seeds=(1, 2), steps=240)
    found = against_best(find_runs([suite]))
    assert [(c.first.name, c.second.name) for c in found] == [("toy-a", n) for n in ("toy-d", "toy-b", "toy <c>")]
    assert {run.settings["train"]["lr"] for c in found for run in c.second.runs} == {1e-3}
    assert main(["compare", str(suite), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [d["verdict"] for d in data] == [verdict(c) for c in found]
    assert data[0]["pairs"][0]["loss"]["mean"] == found[0].pairs[0].loss.mean
    assert main(["compare", str(suite)]) == 0
    assert "steps 121 to 240" in capsys.readouterr().out


def test_of_a_suite_a_seed_that_was_killed_is_not_compared(tmp_path):
    jobs = [
        {"id": f"{m}-s{s}", "model": m, "sets": (f"train.seed={s}", f"model.hidden_size={w}"), "level": level}
        for m, w, level in (("a", 256, 1.0), ("b", 264, 1.1))
        for s in (1, 2, 3)
    ]
    jobs[-1] |= {"status": "killed", "steps": 60}
    (found,) = against_best(find_runs([write_suite(tmp_path / "s", jobs)]))
    assert [pair.seeds for pair in found.pairs] == [(1, 1), (2, 2)]


def test_a_run_of_a_suite_that_was_extended_is_no_seed_of_the_others(tmp_path):
    jobs = [{"id": f"{m}-s{s}", "model": m, "sets": (f"train.seed={s}",), "level": 1.4} for m in "ab" for s in (1, 2)]
    suite = write_suite(
        tmp_path / "s", [{**job, "sets": (*job["sets"], f"model.variant={job['model']}")} for job in jobs]
    )
    manifest = json.loads((suite / "runs/a-s2/manifest.json").read_text())
    manifest["settings"]["train"]["steps"] = 400
    (suite / "runs/a-s2/manifest.json").write_text(json.dumps(manifest))
    found = {c.name: len(c.runs) for c in contenders(find_runs([suite]))}
    assert found == {"a (a-s1)": 1, "a (a-s2)": 1, "b": 2}


def test_a_tuned_value_is_chosen_for_each_text_by_itself(tmp_path, monkeypatch):
    for text, levels in (("1" * 32, (1.0, 1.3)), ("2" * 32, (2.0, 1.6))):
        monkeypatch.setitem(DATA, "blake2b", text)
        jobs = [
            {"id": f"lr{lr}", "model": "a", "sets": (f"train.lr={lr}",), "tuned": {"train.lr": lr}, "level": level}
            for lr, level in zip((0.001, 0.003), levels, strict=True)
        ]
        write_suite(tmp_path / text, jobs)
    found = contenders(find_runs([tmp_path]))
    assert [run.path.name for contender in found for run in contender.runs] == ["lr0.001", "lr0.003"]


def test_without_a_common_seed_the_interval_is_said_to_be_that_of_batches(tmp_path):
    found = pair(tmp_path, "train.seed=7", level=1.45)
    assert any(text.startswith("no seed in common") for text in found.caveats)
    assert "one run of each: the interval reflects batch noise, not seed-to-seed variation" in found.caveats


def test_under_minutes_the_schedules_differ_at_equal_steps(tmp_path):
    minutes = ("train.minutes=1.0", "train.schedule='wsd'")
    write_run(tmp_path / "a", *minutes, level=1.4)
    write_run(tmp_path / "b", *minutes, OTHER, level=1.5)
    (found,) = against_first(find_runs([tmp_path / "a", tmp_path / "b"]))
    assert any("given in minutes" in text for text in found.caveats)
    assert " is better than " in verdict(found)
    assert " at equal steps by " in verdict(found)


def test_a_run_that_was_killed_early_does_not_count_beside_whole_ones(tmp_path):
    for name, level, sets in (("a", 1.40, ()), ("b", 1.30, ("model.hidden_size=264",))):
        for seed in (1, 2, 3):
            values = losses(300, level, seed)
            if (name, seed) == ("b", 1):
                values = values[:60] + 2.0  # as of a model that begins slowly
            status = "ok" if len(values) == 300 else "killed"
            write_run(tmp_path / f"{name}{seed}", *sets, f"train.seed={seed}", values=values, status=status)
    (found,) = against_first(find_runs([tmp_path]))
    assert [pair.seeds[0] for pair in found.pairs] == [2, 3, 1]
    assert found.loss.count == 2
    assert found.loss.low > 0
    assert [text for text in found.caveats if "seed" in text or "killed" in text] == [
        "two seeds: the interval over seeds comes from two numbers; run a third seed",
        "b1 is killed",
    ]


# intervals: against hand computations, tables, and how often they cover the truth ------------------------------------


def autoregressive(correlation: float, count: int, length: int, seed: int = 1) -> np.ndarray:
    """`count` series with mean zero."""
    noise = np.random.default_rng(seed).standard_normal((length + 200, count))
    series = noise.copy()
    for i in range(1, length + 200):
        series[i] = correlation * series[i - 1] + noise[i]
    return np.ascontiguousarray(series[200:].T)


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),  # printed tables of Student's t
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 30, 2.042),
        (0.995, 4, 4.604),
    ],
)
def test_quantiles_of_student_are_those_of_the_tables(probability, freedom, value):
    assert student_quantile(probability, freedom) == pytest.approx(value, abs=6e-4)


def test_an_interval_over_seeds_by_hand():
    # differences 0.010, 0.014, 0.018: mean 0.014, deviation 0.004, error 0.004 / sqrt 3, t(0.975, 2) = 4.3027
    found = student_mean([0.010, 0.014, 0.018])
    assert found.mean == pytest.approx(0.014)
    assert found.half_width == pytest.approx(4.30265 * 0.004 / math.sqrt(3), rel=1e-5)
    assert found.clear
    assert not student_mean([-0.01, 0.03]).clear
    with pytest.raises(ValueError, match="two seeds"):
        student_mean([1.0])


def test_the_block_length_of_independent_values_is_short_and_of_correlated_ones_that_of_theory():
    n = 20_000
    assert block_length(np.random.default_rng(0).standard_normal(n)) < 3
    for correlation in (0.5, 0.8):
        theory = (2 * correlation / (1 - correlation**2)) ** (2 / 3) * n ** (1 / 3)  # G / g(0) = 2ρ / (1 - ρ²)
        found = np.median([block_length(s) for s in autoregressive(correlation, 7, n)])
        assert found == pytest.approx(theory, rel=0.2)


@pytest.mark.parametrize("series", [np.ones(9), np.array([*np.ones(20), np.nan])])
def test_too_few_values_or_one_that_is_not_finite_is_an_error(series):
    with pytest.raises(ValueError, match="finite values"):
        bootstrap_mean(series)


@pytest.mark.parametrize(("correlation", "length", "least"), [(0.0, 150, 0.92), (0.6, 200, 0.90), (0.6, 1000, 0.925)])
def test_it_covers_what_it_says(correlation, length, least):
    """Of 300 simulated series, 95 of 100 intervals should hold the true mean; independence assumed would give 0.67 for 0.6."""
    series = autoregressive(correlation, 300, length)
    found = [bootstrap_mean(s, draws=400) for s in series]
    covered = np.mean([i.low < 0 < i.high for i in found])
    assert least <= covered <= 0.99
    ideal = 1.96 / (1 - correlation) / math.sqrt(length)  # half the width, were the correlation known
    assert 0.9 <= np.mean([i.half_width for i in found]) / ideal <= 1.3
    naive = np.mean([abs(s.mean()) < 1.96 * s.std() / math.sqrt(length) for s in series])
    assert correlation < 0.5 or naive < 0.75
