"""Pictures: the right series on the right axes, in files that open; and one real training read by every command."""

import json
import math
import warnings
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import train_helpers
from elman_bench.results import plots
from elman_bench.results.compare import against_best
from elman_bench.results.curves import curve, smooth
from elman_bench.results.runs import find_runs
from results_helpers import example_suite, losses, write_run, write_suite

from elman_core.cli import main

PNG = b"\x89PNG\r\n\x1a\n"


def assert_pictures(folder: Path, names: set[str]) -> None:
    assert {p.name for p in folder.iterdir()} == {f"{n}.{kind}" for n in names for kind in ("png", "svg")}
    for path in folder.iterdir():
        if path.suffix == ".png":
            assert path.read_bytes().startswith(PNG)
            assert path.stat().st_size > 10_000
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
            assert "<dc:date>" not in path.read_text()
            assert f"stroke: {plots.DARK[0]} !important" in path.read_text()


# series --------------------------------------------------------------------------------------------------------------


def test_a_moving_mean_by_hand():
    values = np.array([1.0, 2.0, 3.0, 4.0, 50.0])
    assert smooth(values, 3).tolist() == [1.5, 2.0, 3.0, 19.0, 27.0]
    assert smooth(values, 1).tolist() == values.tolist()
    assert smooth(np.array([1.0, np.nan, 3.0]), 3).tolist() == [1.0, 2.0, 3.0]


def test_a_curve_is_what_the_metrics_say(tmp_path):
    (run,) = find_runs([write_run(tmp_path / "a", "train.steps=100", tok_s=512.0)])
    found = curve(run)
    assert found.steps["bits"] == pytest.approx(losses(100, 1.4, 42) / math.log(2))
    assert found.steps["tokens"].tolist() == [512.0 * i for i in range(1, 101)]
    assert found.steps["minutes"][60] == pytest.approx(1.0)
    assert found.heldout["step"].tolist() == [25, 50, 75, 100]
    assert found.heldout["minutes"] == pytest.approx([0.4, 49 / 60, 74 / 60, 99 / 60])


# pictures ------------------------------------------------------------------------------------------------------------


def axes_of(figures, name: str):
    return figures[name].axes[0]


def test_a_suite_is_drawn_at_the_chosen_learning_rates(tmp_path, capsys):
    suite = example_suite(tmp_path / "s", seeds=(1, 2), steps=120)
    assert main(["plot", str(suite)]) == 0
    assert_pictures(suite / "plots", {"loss-tokens", "loss-minutes", "speed-quality"})
    assert capsys.readouterr().out.splitlines()[0] == str(suite / "plots" / "loss-tokens.png")


def test_the_trials_that_chose_a_value_stand_in_no_picture(tmp_path, monkeypatch):
    trials = [("b-trial", "train.lr=0.1"), ("a-trial", "train.lr=0.2")]
    made = {id: write_job(id, sets, "train.steps=40") for id, sets in trials}
    finals = [write_job("a", "train.lr=0.1", "train.steps=120"), write_job("b", "train.lr=0.2", "train.steps=120")]
    suite = write_suite(tmp_path / "s", [*made.values(), *finals])
    listed = json.loads((suite / "suite.json").read_text())
    for job in listed["jobs"]:
        job["trials"] = [] if job["id"].endswith("-trial") else list(made)
    (suite / "suite.json").write_text(json.dumps(listed))
    runs = find_runs([suite])
    assert [run.path.name for run in runs if run.is_trial] == list(made)
    assert len(against_best(runs)) == 1, "nor in a comparison"
    assert len(against_best([run for run in runs if run.is_trial])) == 1
    figures: dict = {}
    monkeypatch.setattr(plots, "_save", lambda _, found: figures.update(found))
    plots.plot(runs, tmp_path, "tokens")
    lines = axes_of(figures, "loss-tokens").legend_.get_texts()
    assert len(lines) == 2
    plots.plot([run for run in runs if run.is_trial], tmp_path, "tokens")
    assert len(axes_of(figures, "loss-tokens").legend_.get_texts()) == 2, "alone they are what is asked for"


def write_job(id: str, *sets: str) -> dict:
    return {"id": id, "model": id[0], "sets": sets, "level": 1.4, "tok_s": 1e5, "parameters": 10, "state": {}}


def test_lines_hold_the_losses_and_no_two_look_alike(tmp_path, monkeypatch):
    figures: dict = {}
    monkeypatch.setattr(plots, "_save", lambda _, found: figures.update(found))
    plots.plot(find_runs([example_suite(tmp_path / "s", seeds=(1, 2), steps=120)]), tmp_path, "tokens")
    axes = axes_of(figures, "loss-tokens")
    named = {t.get_text(): line for t, line in zip(axes.legend_.get_texts(), axes.legend_.get_lines(), strict=True)}
    assert list(named) == [f"{n} (2 seeds)" for n in ("toy-a", "toy-d", "toy-b", "toy <c>")]
    looks = {(line.get_color(), str(line.get_linestyle())) for line in named.values()}
    assert len({colour for colour, _ in looks}) == len({dash for _, dash in looks}) == 4
    line = next(line for line in axes.lines if line.get_label() == "toy-a (2 seeds)")
    levels = [1.30 + 0.002 * math.sin(7 * seed) for seed in (1, 2)]
    both = [losses(120, level, seed) for level, seed in zip(levels, (1, 2), strict=True)]
    wanted = np.mean([smooth(v / math.log(2)) for v in both], axis=0)
    assert line.get_ydata() == pytest.approx(wanted)
    assert line.get_xdata() == pytest.approx([512 * i for i in range(1, 121)])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("bytes seen", "bits per byte")
    scatter = axes_of(figures, "speed-quality")
    assert scatter.get_xscale() == "log"
    assert len(scatter.containers) == 4


def test_a_line_is_the_mean_of_the_seeds_in_the_table(tmp_path, monkeypatch):
    for name, seed, ended in (("a", 1, "killed"), ("b", 1, "ok"), ("c", 1, "ok"), ("d", 2, "ok"), ("e", 3, "killed")):
        steps = 120 if ended == "ok" else 30
        write_run(tmp_path / name, "train.steps=120", f"train.seed={seed}", status=ended, steps=steps)
    figures: dict = {}
    monkeypatch.setattr(plots, "_save", lambda _, found: figures.update(found))
    plots.plot(find_runs([tmp_path]), tmp_path, "tokens")
    line = axes_of(figures, "loss-tokens").lines[0]
    assert line.get_label() == "toy@256x6 (2 seeds)"
    both = [losses(120, 1.4, seed) for seed in (1, 2)]
    assert line.get_ydata() == pytest.approx(np.mean([smooth(v / math.log(2)) for v in both], axis=0))


VISIONS = {
    "normal": np.eye(3),
    "no green cones": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "no red cones": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
}  # what they see of linear RGB (Machado, Oliveira and Fernandes, 2009)
TO_XYZ = np.array([[0.4124, 0.2126, 0.0193], [0.3576, 0.7152, 0.1192], [0.1805, 0.0722, 0.9505]])


@pytest.mark.parametrize(("colours", "paper"), [(plots.COLOURS, plots.PAPER[0]), (plots.DARK, plots.PAPER[1])])
@pytest.mark.parametrize("vision", VISIONS)
def test_everybody_can_tell_all_colours_apart(colours, paper, vision):
    rgb = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in (*colours, paper)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ VISIONS[vision].T
    xyz = np.cbrt(np.clip(linear, 0, 1) @ TO_XYZ / [0.9505, 1, 1.089])
    lab = np.stack([116 * xyz[:, 1], 500 * (xyz[:, 0] - xyz[:, 1]), 200 * (xyz[:, 1] - xyz[:, 2])], -1)
    apart = np.linalg.norm(lab[:, None] - lab, axis=-1)[np.triu_indices(len(lab), 1)]
    assert apart.min() > 12, "2 is the least that a trained eye sees"


LITTLE = [
    (["train.steps=1"], {}), ([], {"evaluations": 0, "status": "crashed", "steps": 30}),
    ([], {"values": np.array([3.0, math.nan, 2.5, 2.4]), "result": {}}),
]  # fmt: skip


@pytest.mark.parametrize(("sets", "how"), LITTLE)
def test_little_is_drawn_too(tmp_path, sets, how, monkeypatch):
    figures: dict = {}
    monkeypatch.setattr(plots, "_save", lambda _, found: figures.update(found) or [])
    run = write_run(tmp_path / "a", *sets, **how)
    assert main(["plot", str(run), "--out", str(tmp_path / "p")]) == 0
    figures["loss-tokens"].draw_without_rendering()


def test_nothing_to_draw_and_a_wrong_axis_are_one_line(tmp_path, capsys):
    run = write_run(tmp_path / "a", status="crashed", steps=0, evaluations=0)
    assert main(["plot", str(run)]) == 2
    assert main(["plot", str(write_run(tmp_path / "b")), "--x", "hours"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "no run has done a step" in said[0]
    assert "--x takes one of tokens, steps, minutes" in said[1]
    assert len(said) == 2


# a real training -----------------------------------------------------------------------------------------------------


def test_real_runs_are_read_paired_drawn_and_reported(tmp_path, capsys):
    """What `elman train` writes is what these commands read: no made-up folder stands between."""
    from elman_core.training.start import start

    text = train_helpers.write_text(tmp_path / "text")
    for name, lr in (("a", 1e-2), ("b", 1e-3)):
        start(train_helpers.settings(text, f"train.lr={lr}"), tmp_path / "runs" / name, quiet=True).fit()
    assert main(["results", str(tmp_path / "runs"), "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    by_name = {Path(row["runs"][0]).name: row for row in group["rows"]}
    for name, row in by_name.items():
        run = tmp_path / "runs" / name
        manifest = json.loads((run / "manifest.json").read_text())
        assert row["bits_per_byte"] == manifest["result"]["bits_per_byte"]
        assert row["last_100"] == pytest.approx(np.mean(list(train_helpers.losses(run).values())))
        assert row["loss"] == pytest.approx(row["last_100"])
        assert (row["status"], row["parameters"]) == ("ok", manifest["parameters"])
        assert group["protocol_hash"] == manifest["protocol_hash"]
    a, b = (train_helpers.losses(tmp_path / "runs" / name) for name in "ab")
    assert a[1] == b[1]  # one seed: the same weights and the same first batch
    runs = [str(tmp_path / "runs" / name) for name in "ab"]
    assert main(["compare", *runs, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["pairs"][0]["paired"]
    first, last = found["pairs"][0]["steps"]
    wanted = np.mean([(a[s] - b[s]) / math.log(2) for s in range(first, last + 1)])
    assert found["pairs"][0]["loss"]["mean"] == pytest.approx(wanted)
    assert main(["results", str(tmp_path / "runs"), "--html"]) == 0


def test_a_name_is_drawn_as_it_is_whatever_it_holds():
    for name in ("_mine", "$x_{$", "$5 or $6"):
        picture = plots.by_length({name: {1: [0.5], 2: [0.7]}}, "title", "x", "y", 0.5).decode()
        assert f"{name} -->" in picture, name


def test_characters_that_no_font_has_are_drawn_without_a_warning(caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = plots.by_length({"模型 모형": {1: [0.5], 2: [0.7]}}, "表題", "長さ", "y", 0.5)
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert not caplog.records, "matplotlib logs each font that it does not find"
