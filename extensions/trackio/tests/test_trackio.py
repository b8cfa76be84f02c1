"""The logger of trackio, which brings a web server: here the three calls that the logger makes stand for it."""

import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
from train_helpers import manifest, metrics, train_words

from elman_core.cli import main


class Curves:
    """What `trackio.init` returns, with all that was logged in any run."""

    lines: list[dict] = []  # noqa: RUF012

    def __init__(self, project, name, config, resume):
        assert config["train.batch_size"] == 4
        assert config["parameters"] > 0
        self.name, self.resume = name, resume

    def log(self, figures, step):
        self.lines.append({"run": self.name, "step": step, **figures})

    def finish(self):
        self.lines.append({"run": self.name, "finished": self.resume})


def test_every_step_and_evaluation_of_a_run_that_was_resumed(text, tmp_path, monkeypatch):
    if "elman_trackio" in sys.modules:
        pytest.skip("the real trackio is in use")
    if "trackio" not in entry_points(group="elman.loggers").names:
        pytest.skip("elman-trackio is not installed: pip install --no-deps -e extensions/trackio")
    stand_in = SimpleNamespace(init=Curves, __spec__=ModuleSpec("trackio", None))  # transformers asks for the spec
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    run = tmp_path / "run"
    assert main(train_words(text, run, "train.steps=3", "train.eval_every=2", "train.loggers=trackio")) == 0
    assert main(["resume", str(run), "--steps", "+2"]) == 0
    lines = Curves.lines
    assert {line["run"] for line in lines} == {f"run-{manifest(run)['id'][:8]}"}
    steps = {line["step"]: line for line in lines if "train/loss" in line}
    assert list(steps) == [1, 2, 3, 4, 5]
    for line in metrics(run):
        assert steps[line["step"]]["train/loss"] == line["loss"]
        assert steps[line["step"]]["train/tok_s"] == line["tok_s"]
    scored = [(line["step"], line["heldout/bits_per_byte"]) for line in lines if "heldout/loss" in line]
    assert scored == [(m["step"], m["bits_per_byte"]) for m in metrics(run, "evaluation")]
    assert [line["finished"] for line in lines if "finished" in line] == ["allow", "allow"]
