"""What a process does before it parts from the others, and when a library does not let it."""

import logging
import time

import pytest
import torch
from cpu_graph import CpuRecorder
from train_helpers import losses, settings, write_text

from elman_core.model.graph import CudaRecorder
from elman_core.training.modes import WARM, CapturedStep
from elman_core.training.ranks.group import in_time
from elman_core.training.start import start


def test_libraries_that_do_not_part_are_left_within_the_time(caplog):
    codes = []
    with caplog.at_level(logging.ERROR), in_time(7, 0.05, codes.append):
        until = time.monotonic() + 10
        while not codes and time.monotonic() < until:
            time.sleep(0.01)
    assert codes == [7]
    assert "did not close within" in caplog.text


def test_libraries_that_part_in_time_are_not_hurried():
    codes = []
    with in_time(7, 0.2, codes.append):
        pass
    time.sleep(0.4)
    assert codes == []


def test_a_captured_step_that_was_given_up_is_recorded_anew(tmp_path):
    text = write_text(tmp_path / "text")

    def trainer(name):
        return start(settings(text, "train.steps=12"), tmp_path / name, quiet=True)

    trainer("eager").fit()
    made = trainer("captured")
    made.compute = CapturedStep(made.compute, recorder := CpuRecorder(), required=True)
    made.ranks.hold(made.compute)
    made.advance(WARM + 2)
    assert recorder.held == 1
    made.ranks.release(wait=True)
    assert recorder.held == 0
    made.ranks.release(wait=True)
    assert recorder.held == 0
    made.fit()
    assert recorder.records == 2
    assert losses(tmp_path / "captured") == losses(tmp_path / "eager")


@pytest.mark.parametrize("fails", [False, True])
def test_a_cuda_graph_is_destroyed_when_it_is_released_and_when_recording_it_fails(fails, monkeypatch):
    """The calls, without a GPU: an error's traceback refers to the graph that it happened in."""
    done = []

    class Graph:
        def reset(self):
            done.append("reset")

        def replay(self):
            done.append("replay")

    class Capture:
        def __init__(self, *_, **how):
            assert how["capture_error_mode"] == "thread_local"

        def __enter__(self):
            done.append("begin")

        def __exit__(self, *_):
            done.append("end")

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    recorder = CudaRecorder(torch.device("cuda", 0))
    if fails:
        with pytest.raises(RuntimeError, match="not permitted"):
            recorder.record(lambda: (_ for _ in ()).throw(RuntimeError("not permitted")))
        assert done == ["begin", "end", "reset"]
        return
    result = torch.ones(1)
    recording = recorder.record(lambda: result)
    assert recording() is result
    recording.release()
    assert done == ["begin", "end", "replay", "reset"]
