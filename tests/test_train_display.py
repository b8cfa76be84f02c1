"""What is shown: a bar on a terminal, plain lines elsewhere, all lines in console.log."""

import functools
import io
import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from elman_authors.testing.kernel import need_host_compiler
from rich.console import Console
from train_helpers import closed_pipe, settings

from elman_core.cli import main
from elman_core.cli.train import on_gpus
from elman_core.kernels import dispatch
from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.training import estimate, loop
from elman_core.training.estimate import seconds_a_step
from elman_core.training.objective import forward_loss
from elman_core.training.run.display import Display, backends
from elman_core.training.start import _first_lines, start


@pytest.mark.parametrize("length", [{"steps": 12}, {"minutes": 0.01}])
def test_a_terminal_gets_a_bar_with_the_figures(length, text, tmp_path):
    shown = io.StringIO()
    asked = settings(text, "train.log_every=4")
    asked = replace(asked, train=replace(asked.train, **{"steps": None, **length}))
    trainer = start(asked, tmp_path / "run", quiet=True)
    trainer.display = Display(trainer.folder.log, Console(file=shown, force_terminal=True, width=140))
    trainer.fit()
    bar = shown.getvalue()
    for part in ("bpb", "tok/s", "GiB", "100%", "step "):
        assert part in bar
    assert "lr " not in bar.split("held out")[0]  # plain lines do not interrupt the bar
    logged = (tmp_path / "run" / "console.log").read_text()
    assert "step 4 " in logged
    assert "held out at step" in logged
    assert "saved " in logged


def test_a_terminal_of_80_columns_breaks_no_word_and_no_figure(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = io.StringIO()
    trainer = start(settings(text), Path("run"), quiet=True)
    display = Display(lambda _: None, Console(file=shown, force_terminal=True, width=80, color_system=None))
    header = list(_first_lines(trainer.plan, trainer.path))
    for line in header:
        display.say(line, indent=12)
    lines = shown.getvalue().splitlines()
    assert max(len(line) for line in lines if str(text) not in line) <= 80  # a path is not broken either
    assert shown.getvalue().split() == " ".join(header).split()
    shown.truncate(0)
    with display.progress(1000, 0, 0):
        display.step(
            {"step": 123, "loss": 0.7, "bits_per_byte": 1.01, "tok_s": 1_234_567.0, "memory": 2**32}, 123, 1000, False
        )
    assert "1.010 bpb  1,234,567 tok/s" in shown.getvalue()
    assert "left -:--:--" in shown.getvalue()


def test_a_step_in_which_no_target_counts_shows_no_loss():
    lines = []
    display = Display(lines.append, Console(file=io.StringIO(), force_terminal=True, width=140))
    with display.progress(10, 0, 0):
        for loss, counted, shown in ((0.0, 0.0, "loss –  – bpb"), (2.0, 0.5, "2.000 bpb"), (0.0, 0.0, "2.000 bpb")):
            metrics = {"loss": loss, "bits_per_byte": loss, "counted": counted, "tok_s": 1.0, "memory": 2**30}
            display.step({"step": 3, "lr": 1e-3, "grad_norm": 0.0, **metrics}, 3, 3, False)
            assert shown in display.bar.tasks[0].fields["figures"]
    assert ["loss –  – bpb" in line for line in lines] == [True, False, True]


def test_an_evaluation_has_a_bar_of_its_own():
    shown = io.StringIO()
    display = Display(lambda _: None, Console(file=shown, force_terminal=True, width=80, color_system=None))

    def drawn() -> str:
        shown.truncate(0)
        display.bar.refresh()
        return shown.getvalue()

    with display.progress(10, 7, 7):
        halfway = [drawn() for _ in display.evaluating(range(4))][2]
        assert "evaluating" in halfway
        assert " 50%" in halfway
        assert "step" not in halfway
        assert next(iter(display.evaluating(range(4)))) == 0, "left early, as by a signal"
        assert "step 7" in drawn()
        assert "evaluating" not in drawn()


@pytest.mark.parametrize(
    ("variant", "length", "whole"),
    [
        ("e42", {"steps": 720}, ", 10.0 hours in all"),
        ("e88:conv_linear", {"steps": 60}, ", 50.0 minutes in all"),
        ("transformer", {"steps": 6}, ", 5.0 minutes in all"),
        ("e42", {"minutes": 5 / 3}, ""),
    ],
)
def test_a_slow_cpu_is_said_before_the_first_step_and_trying_it_changes_nothing(
    variant, length, whole, text, tmp_path, monkeypatch
):
    asked = settings(text, f"model.variant={variant}", "model.hidden_size=64", "train.accumulate=2")
    asked = replace(asked, train=replace(asked.train, **{"steps": None, **length}))
    trainer = start(asked, tmp_path / "run", quiet=True)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()} | {"random": torch.get_rng_state()}
    assert 0 < seconds_a_step(trainer.model, 2, 16, 2) < 60
    after = trainer.model.state_dict() | {"random": torch.get_rng_state()}
    assert all(torch.equal(before[k], after[k]) for k in after)
    assert all(p.grad is None for p in trainer.model.parameters())
    assert trainer.model.training
    monkeypatch.setattr(loop, "seconds_a_step", lambda *_: 50.0)
    monkeypatch.setattr(trainer, "_one_step", lambda: os.kill(os.getpid(), signal.SIGINT))
    trainer.fit()
    said = (tmp_path / "run" / "console.log").read_text()
    assert f"slow: about 50 s a step{whole} on this CPU (layers 0" in said
    assert ("--minutes 10 limits the run" in said) == bool(whole)
    assert ("1.667 minutes, wsd" in said) == (not whole)


@pytest.mark.parametrize(
    ("variant", "compiler", "length"),
    [("e42", "", 16), ("e88:conv_linear", "", 256), ("e88:conv_linear", "none", 16), ("e74:surprise_gate", "", 16)],
)
def test_the_estimate_is_of_the_recurrence_that_runs(variant, compiler, length, tmp_path, monkeypatch):
    """Without its kernel, a matrix state would seem twenty times as slow as its steps are."""
    need_host_compiler()
    if compiler:
        monkeypatch.setenv("CXX", compiler)
        monkeypatch.setenv("ELMAN_CACHE", str(tmp_path))
        monkeypatch.setattr(dispatch, "_decided", {})
    model, read = LadderForCausalLM(LadderConfig(variant=variant, hidden_size=64, num_hidden_layers=1)), []

    def reading(model, tokens_BT, *given, **how):
        read.append(tokens_BT.shape[1])
        return forward_loss(model, tokens_BT, *given, **how)

    monkeypatch.setattr(estimate, "forward_loss", reading)
    seconds_a_step(model, 2, 512)
    assert read == [2, length]


def test_the_estimate_is_read_again_where_the_machine_was_busy(monkeypatch):
    model, read = LadderForCausalLM(LadderConfig(variant="e42", hidden_size=16, num_hidden_layers=1)), []

    def reading(model, tokens_BT, *given, **how):
        read.append(tokens_BT.shape[1])
        time.sleep(0.3 if len(read) in (2, 3) else 0)
        return forward_loss(model, tokens_BT, *given, **how)

    monkeypatch.setattr(estimate, "forward_loss", reading)
    assert seconds_a_step(model, 2, 512) < estimate.SLOW
    assert read == [2, 16, 16, 16]


def test_several_gpus_are_started_by_torchrun(text, monkeypatch, capsys):
    begun = []
    monkeypatch.setattr("os.execv", lambda *words: begun.append(words))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    words = ["train", "e42@16x1", "--data", str(text), "--gpus", "5"]
    assert main(words) == 2
    assert "--gpus 5: this machine has 4 GPUs" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["elman", *words])
    on_gpus(4)
    [(_, command)] = begun
    assert command[command.index("--nproc-per-node") + 1] == "4"
    assert command[-len(words) - 2 :] == ["-m", "elman_core", *words]
    assert [flags for python, flags in itertools.pairwise(command) if python == sys.executable] == ["-uP", "-uP"]
    monkeypatch.setenv("RANK", "1")
    on_gpus(4)
    assert len(begun) == 1, "a process that torchrun started trains"


def test_a_missing_text_is_said_without_torch(tmp_path):
    code = """
import sys
from elman_core.cli import main
code = main(["train", "e42", "--data", sys.argv[1]])
assert "torch" not in sys.modules
sys.exit(code)
"""
    (tmp_path / "short").write_bytes(b"x" * 100)
    for name, words in (("none", "there is no file"), ("short", "too short")):
        done = subprocess.run([sys.executable, "-c", code, tmp_path / name], capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_layers_that_run_the_same_are_joined_and_those_without_a_recurrence_left_out():
    def model(*ran):
        mixers = [type(name, (), {"backend": lambda _self, back=back: back})() for name, back in ran]
        return SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(mixer=m) for m in mixers]))

    a, b, none = ("A", "cuda"), ("A", "torch"), ("Mlp", "")
    assert backends(model(a, a, b)) == ["layers 0-1 A: cuda", "layer 2 A: torch"]
    assert backends(model(none, a, none, none, a)) == ["layers 1, 4 A: cuda"]
    assert backends(model(a, none, a, none, a, none, a)) == ["layers 0, 2, … 6 A: cuda"]
    assert backends(model(a, a, none, a, a)) == ["layers 0, 1, 3, 4 A: cuda"]
    assert backends(model(none)) == []


NO_DEVICE = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
FULL = pytest.param(functools.partial(open, "/dev/full", "w"), marks=NO_DEVICE)


@pytest.mark.parametrize("output", [closed_pipe, FULL], ids=["the reader has gone", "the disk is full"])
def test_a_training_whose_output_fails_continues(output, text, tmp_path, monkeypatch):
    with output() as file:
        monkeypatch.setattr("sys.stdout", file)
        result = start(settings(text, "train.steps=3"), tmp_path / "run").fit()
    assert (result.status, result.step) == ("ok", 3)
    assert "step 3 " in (tmp_path / "run" / "console.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere closed terminals are other errors")
def test_a_training_whose_terminal_was_closed_goes_on(text, tmp_path, monkeypatch):
    """With a bar, as after `disown`: no signal comes, and every write is an error."""
    outside, inside = os.openpty()
    with os.fdopen(inside, "w") as file:
        monkeypatch.setattr("sys.stdout", file)
        trainer = start(settings(text, "train.steps=3", "train.eval_every=2"), tmp_path / "run")
        assert trainer.display.console.is_terminal
        os.close(outside)
        result = trainer.fit()
    assert (result.status, result.step) == ("ok", 3)
    assert "step 3 " in (tmp_path / "run" / "console.log").read_text()
