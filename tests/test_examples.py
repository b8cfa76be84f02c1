"""The plugins under examples/: built, installed into a folder of their own, and used by a training and its resumption."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from broken_plugins import pip
from train_helpers import metrics, train_words, write_text

EXAMPLES = Path(__file__).parents[1] / "examples"

TRACKIO = '''
"""Stands for trackio, which brings a web server: the three calls, written to a file."""
import json, os

class Run:
    def __init__(self, **how):
        self.how = how
    def log(self, figures, step=None):
        with open(os.environ["TRACKIO_LOG"], "a") as out:
            print(json.dumps({"run": self.how["name"], "step": step, **figures}), file=out)
    def finish(self):
        with open(os.environ["TRACKIO_LOG"], "a") as out:
            print(json.dumps({"run": self.how["name"], "finished": self.how["resume"]}), file=out)

def init(project, name=None, config=None, resume="never"):
    assert config["train.batch_size"] == 4 and config["parameters"] > 0
    return Run(project=project, name=name, resume=resume)
'''

CODE = """
import json, sys
from elman_core.cli import main
words = json.loads(sys.argv[1])
assert main(words) == 0
assert main(["resume", words[words.index("--out") + 1], "--steps", "+2"]) == 0
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three steps and two more, with both plugins installed."""
    folder = tmp_path_factory.mktemp("examples")
    names = ["trackio"] + (["tensorboard"] if importlib.util.find_spec("tensorboard") else [])
    site = folder / "site"
    folders = [str(EXAMPLES.parent / "extensions" / name) for name in names]
    pip("install", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site), *folders)
    (site / "trackio.py").write_text(TRACKIO)
    text = write_text(folder / "text")
    words = train_words(text, folder / "run", "train.steps=3", "train.eval_every=2")
    environment = {
        **os.environ,
        "PYTHONPATH": str(site),
        "ELMAN_STRICT": "1",
        "ELMAN_PLUGINS": ",".join(["e42", *names]),
        "TRACKIO_LOG": str(folder / "trackio.log"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(words)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_trackio_has_every_step_and_evaluation_of_a_run_that_was_resumed(trained):
    lines = [json.loads(line) for line in (trained / "trackio.log").read_text().splitlines()]
    assert {line["run"] for line in lines} == {"run"}
    steps = {line["step"]: line for line in lines if "train/loss" in line}
    assert list(steps) == [1, 2, 3, 4, 5]
    for line in metrics(trained / "run"):
        assert steps[line["step"]]["train/loss"] == line["loss"]
        assert steps[line["step"]]["train/tok_s"] == line["tok_s"]
    scored = [(line["step"], line["heldout/bits_per_byte"]) for line in lines if "heldout/loss" in line]
    assert scored == [(m["step"], m["bits_per_byte"]) for m in metrics(trained / "run", "evaluation")]
    assert [line["finished"] for line in lines if "finished" in line] == ["allow", "allow"]


def test_tensorboard_reads_one_curve_of_a_run_that_was_resumed(trained):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(trained / "run" / "tensorboard"))
    read.Reload()
    losses = {event.step: event.value for event in read.Scalars("train/loss")}
    assert losses == pytest.approx({m["step"]: m["loss"] for m in metrics(trained / "run")})
    assert list(losses) == [1, 2, 3, 4, 5]
    scored = {event.step: event.value for event in read.Scalars("heldout/bits_per_byte")}
    assert scored == pytest.approx({m["step"]: m["bits_per_byte"] for m in metrics(trained / "run", "evaluation")})
    assert '"batch_size": 4' in read.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()


def test_the_plain_loop_trains_saves_and_writes(tmp_path):
    assert len((EXAMPLES / "plain_loop.py").read_text().splitlines()) <= 60
    text = write_text(tmp_path / "text", 200_000)
    command = [sys.executable, EXAMPLES / "plain_loop.py", text, "--steps", "3", "--out", tmp_path / "model"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "held out: " in done.stdout
    assert (tmp_path / "model" / "model.safetensors").is_file()
