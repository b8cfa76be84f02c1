"""Probing: what is measured is the trainer's own step, and running out of memory is an answer."""

import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import train_helpers
from elman_bench import measure, memory, probe
from elman_bench.measure import Measurement, Probe
from elman_bench.probe import largest
from scheduler_helpers import alone

from elman_core.cli import main
from elman_core.registry import KernelError, OutOfMemoryError, resolve
from elman_core.size import count
from elman_core.training.loop import Trainer
from elman_core.training.settings import Settings

GIB = 2**30


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return train_helpers.write_text(tmp_path / "text")


def in_this_process(
    settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.05
) -> dict[str, Any]:
    """What the measuring process would answer."""
    folder.mkdir(exist_ok=True)
    asked = {"settings": settings.to_dict(), "seconds": seconds, "folder": str(folder)}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asked)))
    monkeypatch.setattr(sys, "argv", ["measure", str(folder / "answer.json")])
    measure.main()
    return json.loads((folder / "answer.json").read_text())


# the measurement


def test_the_command_measures_a_training_and_keeps_nothing(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    words = ["probe", "e42", "--dim", "32", "--depth", "2", "--batch", "8", "--chunk", "16", "--seconds", "0.2"]
    assert (
        main([*words, "--data", str(text), "--set", "train.accumulate=2", "--set", "train.device=cpu", "--json"]) == 0
    )
    said = capfd.readouterr()
    assert "a few training steps of e42@32x2, each 8 rows of 16 bytes: minutes for a large model on a CPU" in said.err
    facts = json.loads(said.out)
    assert (facts["model"], facts["precision"], facts["largest"]) == ("e42@32x2", "fp32", None)
    assert facts["parameters"] == count(resolve("e42"), 32, 2)
    found = facts["measurement"]
    assert (found["batch_size"], found["chunk_size"], found["accumulate"]) == (8, 16, 2)
    assert found["steps"] >= 3
    assert found["tok_s"] * found["step_seconds"] == pytest.approx(8 * 16)
    assert 50e6 < found["idle_memory"] <= found["peak_memory"] < 2 * GIB  # libraries and all
    assert list(place.iterdir()) == []


def test_the_trainers_own_step_is_what_is_measured(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    inner = Trainer.train_step

    def counted(trainer: Trainer) -> dict[str, float]:
        steps.append(trainer.step)
        return inner(trainer)

    monkeypatch.setattr(Trainer, "train_step", counted)
    answer = in_this_process(train_helpers.settings(text), tmp_path / "one", monkeypatch)
    assert steps == list(range(len(steps)))
    assert len(steps) == measure.WARMUP + answer["measurement"]["steps"]
    assert not (tmp_path / "one/run/checkpoints").exists()


def test_the_seconds_of_a_step_are_those_of_rows_that_packing_leaves_half_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_bytes(b"eight b\x1e" * 3000)
    packed = train_helpers.settings(tmp_path / "text", "data.documents=pack", "train.chunk_size=15")
    found = in_this_process(packed, tmp_path / "one", monkeypatch, seconds=1e-9)["measurement"]
    half = found["tok_s"] * found["step_seconds"] / packed.tokens_per_step
    assert 0.4 < half < 0.7


def test_one_step_of_each_kind_is_enough_where_a_step_takes_long(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "SLOW", 0.0)
    answer = in_this_process(train_helpers.settings(text), tmp_path / "one", monkeypatch, seconds=1e-9)
    assert answer["measurement"]["steps"] == 1


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (OutOfMemoryError("no room"), "OutOfMemoryError", "does not fit"),
        (MemoryError(), "OutOfMemoryError", "does not fit"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "OutOfMemoryError", "does not fit"),
        (KernelError("too many rows"), "KernelError", "too many rows"),
        (RuntimeError("odd\nthing"), "ElmanError", "RuntimeError: odd thing"),
    ],
)
def test_errors_of_the_measuring_process_arrive(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str, says: str
) -> None:
    def fail(_: Trainer) -> None:
        raise error

    monkeypatch.setattr(Trainer, "train_step", fail)
    answer = in_this_process(train_helpers.settings(text), tmp_path / "bad", monkeypatch)
    assert answer["kind"] == kind
    assert says in answer["error"]


def test_a_process_that_is_killed_is_out_of_memory(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what the system does to it."""
    monkeypatch.setattr(probe, "PYTHON", ("false",))
    with pytest.raises(Exception, match="ended with code 1: no message"):
        probe.probe(train_helpers.settings(text))
    monkeypatch.setattr(probe, "_run", lambda *_: (-signal.SIGKILL, ""))
    with pytest.raises(OutOfMemoryError, match="at batch 4: out of memory"):
        probe.probe(train_helpers.settings(text))


def test_an_interrupt_ends_the_measuring_process(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupt() -> None:
        while not note.exists() or not note.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        probe._run([sys.executable, "-c", code], "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


# the search


def pretend(most: int, error: Exception | None = None, device: str = "cpu") -> Any:
    """In the place of `probe`: `most` rows fit."""

    def attempt(settings: Settings, seconds: float) -> Probe:
        rows = settings.train.batch_size
        assert settings.train.accumulate == 1
        if rows > most:
            raise error or OutOfMemoryError("does not fit")
        return Probe(1, device, "fp32", [], Measurement(rows, 16, 1, 3, 1.0, 1.0, 1.0, rows, 0))

    return attempt


@pytest.mark.parametrize("most", [1, 2, 3, 5, 31, 32, 33, 100, 777, 5000, 65536])
@pytest.mark.parametrize("first", [1, 4, 256])
def test_the_largest_batch_is_found_within_three_percent(
    text: Path, most: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "probe", pretend(most))
    settings = train_helpers.settings(text, f"train.batch_size={first}")
    found = largest(settings)
    assert found.rows <= most
    assert most - found.rows <= max(0, most // 32)
    assert found.probe.measurement.batch_size == found.rows
    assert found.tried[found.rows] == "fits"
    assert all((outcome == "fits") == (rows <= most) for rows, outcome in found.tried.items())
    assert found.limited_by == ("memory" if most < 65536 else "65536 rows are the most that are tried")
    assert len(found.tried) <= 24


def test_a_batch_that_fits_for_a_few_steps_only_is_not_the_largest(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, more = pretend(1088), pretend(1040)
    monkeypatch.setattr(probe, "probe", lambda settings, seconds: (more if seconds else few)(settings, seconds))
    found = largest(train_helpers.settings(text))
    assert 1040 - 1040 // 32 <= found.rows == found.probe.measurement.batch_size <= 1040
    assert found.limited_by == "memory"


def test_a_batch_that_a_kernel_refuses_bounds_the_search(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "probe", pretend(90, KernelError("at most 90 rows")))
    found = largest(train_helpers.settings(text))
    assert (found.limited_by, found.tried[128]) == ("at most 90 rows", "at most 90 rows")
    assert 88 <= found.rows <= 90


def test_a_model_that_does_not_fit_at_all_raises(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "probe", pretend(0))
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        largest(train_helpers.settings(text))


def test_the_command_shows_the_largest_batch(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "probe", pretend(40, device="cuda"))
    words = ["probe", "e42@16x2", "--batch", "16", "--chunk", "16", "--data", str(text)]
    assert main([*words, "--set", "train.device=cpu"]) == 0
    said = capsys.readouterr()
    assert "batch 32: fits" in said.err
    assert "largest batch: 40 rows of 16; limited by: memory" in said.out


# memory


def test_control_groups_limit_memory(tmp_path: Path) -> None:
    """The group of a process, and those around it."""
    (tmp_path / "names").write_text("0::/job/step\n")
    (tmp_path / "job/step").mkdir(parents=True)
    for name, text in (("max", "9000"), ("current", "8000"), ("stat", "anon 5\ninactive_file 1000")):
        (tmp_path / f"job/memory.{name}").write_text(f"{text}\n")
    (tmp_path / "job/step/memory.max").write_text("max\n")
    assert memory.available(tmp_path / "names", tmp_path) == 9000 - (8000 - 1000)
    (tmp_path / "job/memory.max").write_text("max\n")
    assert memory.available(tmp_path / "names", tmp_path) > 10**7


# on a GPU, where memory is what torch allocates ----------------------------------------------------------------------


MODEL = ("model.hidden_size=512", "model.num_hidden_layers=4", "train.chunk_size=256", "train.device=cuda")


@pytest.mark.gpu
def test_memory_is_measured_and_the_search_ends_beside_the_memory_of_the_gpu(tmp_path: Path) -> None:
    alone()
    text = train_helpers.write_text(tmp_path / "text")
    settings = train_helpers.settings(text, *MODEL, "train.batch_size=1024")  # each doubling takes ten seconds
    before = torch.cuda.memory_allocated()
    found = probe.probe(settings, 0.5)
    measured, total = found.measurement, torch.cuda.get_device_properties(0).total_memory
    assert found.device.startswith("cuda")
    assert 4 * found.parameters <= measured.idle_memory < measured.peak_memory  # float32 weights, then Adam's state
    assert measured.first_step_seconds > measured.step_seconds
    best = largest(settings, found, 0.5)
    assert best.limited_by == "memory"
    assert best.probe.measurement.peak_memory > 0.75 * total
    assert any(outcome == "out of memory" for outcome in best.tried.values())
    assert torch.cuda.memory_allocated() == before  # nothing ran in this process
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        probe.probe(train_helpers.settings(text, *MODEL, f"train.batch_size={2 * best.rows}"), 0.5)
