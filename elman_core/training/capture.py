"""A step recorded once and replayed: on a GPU one CUDA graph, so that no kernel waits for the host to launch it.

The first steps run as they are, which compiles and warms up what they use; the next is recorded. What a recorded step reads
and writes lies at fixed addresses: windows, learning rate and carried state are copied in before each replay.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from elman_core.model.graph import Recorder, Recording, Sent, try_to_record
from elman_core.registry import KernelError

from .objective import States, restart
from .step import Done, TrainStep, Windows

log = logging.getLogger("elman_core")

WARM = 2
"""Steps before the recording: the first compiles and verifies kernels, the second finds the allocator as it stays."""


class CapturedStep:
    """A `TrainStep` that is replayed. It gives the same numbers, bit for bit, and is called in the same way.

    Args:
        step: forward, loss, backward, norm, clipping and update are recorded.
        recorder: what records.
        required: whether a step that cannot be recorded is an error; if not, it goes on as it is, after one warning.

    Attributes:
        ready: whether the next call runs at the final speed.
        refused: why it could not be recorded; "" if it was, or is yet to be.
    """

    def __init__(self, step: TrainStep, recorder: Recorder, required: bool = False) -> None:
        self.step, self.recorder, self.required = step, recorder, required
        self.calls, self.refused = 0, ""
        self._replay: Recording | None = None
        self._given: Windows | None = None
        self._fresh_B: Tensor | None = None

    @property
    def ready(self) -> bool:
        return self._replay is not None or (bool(self.refused) and self.calls > WARM)

    def __call__(self, windows: Windows, lr: float) -> Done:
        """As `TrainStep`; the carried states of the result are the same tensors every time.

        Raises:
            KernelError: the step cannot be recorded, and `required`.
        """
        with self.recorder.work():
            self.step.optimizer.set_lr(lr)
            if self._replay is not None:
                self._fill(windows)
            elif self.calls >= WARM and not self.refused:
                self._record(windows)
            self.calls += 1
            if self._replay is None:
                return self.step(windows, lr)
            values = self._replay()
            assert self._given is not None
            return Done(Sent.of(values), (), self._given.carry)

    def release(self) -> None:
        """Give up what was recorded, which holds the operations that several processes share. The next call records anew."""
        recording, self._replay = self._replay, None
        if recording is not None:
            recording.release()

    def where_it_failed(self, windows: Windows, again: bool) -> dict[str, str] | None:
        return self.step.where_it_failed(windows, again)

    def _record(self, windows: Windows) -> None:
        self._given = Windows(windows.tokens.clone(), None, _clones(windows.carry))
        if windows.carry is not None:
            assert windows.fresh is not None
            self._fresh_B = windows.fresh[:, 0].to(self.step.device)
            self._restarted(windows.carry, self._fresh_B)  # what it uses for one row is compiled before the recording
        self.step.optimizer.zero_grad()  # whose memory the recording can use
        found = try_to_record(self.recorder, self._run)
        failed = found if isinstance(found, RuntimeError) else None
        self.refused = self.step.processes.refusal(str(failed).splitlines()[0] if failed else "")
        if not isinstance(found, RuntimeError):
            self._replay = found
            if self.refused:
                self.release()
        if self.refused and self.required:
            error = KernelError(
                f"the step cannot be captured as a CUDA graph, use train.launch='eager': {self.refused}"
            )
            error.everywhere = True
            raise error from failed
        if self.refused:
            log.warning("elman: the step is not captured as a CUDA graph, and runs eager: %s", self.refused)
            self.step.optimizer.zero_grad()

    def _run(self) -> Tensor:
        """What is recorded. Everything it reads from outside has a fixed address."""
        assert self._given is not None
        windows = self._given
        if windows.carry is not None:
            assert self._fresh_B is not None
            windows = dataclasses.replace(windows, carry=self._restarted(windows.carry, self._fresh_B))
        values, _, carry = self.step.gradients(windows)
        self.step.update()
        if carry is not None and self._given.carry is not None:
            for old, new in _pairs(self._given.carry, carry):
                old.copy_(torch.where(self.step.failed > 0, old, new))
        return values

    def _restarted(self, carry: States, fresh_B: Tensor) -> States:
        with self.step.autocast():
            return restart(self.step.model, carry, fresh_B)

    def _fill(self, windows: Windows) -> None:
        given = self._given
        assert given is not None
        given.tokens.copy_(windows.tokens, non_blocking=True)
        if given.carry is not None:
            assert windows.carry is not None
            assert windows.fresh is not None
            assert self._fresh_B is not None
            self._fresh_B.copy_(windows.fresh[:, 0], non_blocking=True)
            for mine, theirs in _pairs(given.carry, windows.carry):
                if mine is not theirs:
                    mine.copy_(theirs)


def _clones(carry: States | None) -> States | None:
    return None if carry is None else [None if s is None else {n: t.clone() for n, t in s.items()} for s in carry]


def _pairs(one: States, two: States) -> Iterator[tuple[Tensor, Tensor]]:
    for a, b in zip(one, two, strict=True):
        for name, tensor in (a or {}).items():
            assert b is not None
            yield tensor, b[name]
