"""What a CUDA graph does, on a CPU: every operation is recorded with the tensors that it read and wrote, and a replay repeats
the operations on those very tensors. No line of Python runs again, so a number that was computed on the host stays what it was,
and an input that moved is not seen; and as in a capture, reading a value on the host is an error."""

from contextlib import contextmanager

import torch
from elman_megakernel.tape import Tape


class CpuRecorder:
    """A `Recorder`. `records` and `replays` count, and `held` what is not released; `operations` is what was recorded last."""

    burst = 4

    def __init__(self):
        self.records = self.replays = self.held = 0

    @contextmanager
    def work(self):
        yield

    def record(self, run):
        with Tape() as tape:
            result = run()  # a capture would not execute it: so the first replay has happened
        self.records += 1
        self.operations = tape.operations
        self.held += 1
        return _CpuRecording(self, tape, result)


class _CpuRecording:
    def __init__(self, recorder, tape, result):
        self.recorder, self.tape, self.result, self.executed = recorder, tape, result, True

    def __call__(self):
        self.recorder.replays += 1
        if not self.executed:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                for operation in self.tape.operations:
                    operation.again()()
        self.executed = False
        return self.result

    def release(self):
        self.recorder.held -= 1
        self.tape = None
