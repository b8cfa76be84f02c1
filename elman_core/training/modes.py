"""Launch modes of a step: eager, compiled, or recorded once and replayed as a CUDA graph, so that no kernel waits for the host.

The first steps of a captured run are eager, which compiles and warms up everything; the next one is recorded. The tensors that
a recorded step reads and writes keep their addresses: windows, learning rate and carried state are copied there before each
replay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elman_core.model.graph import WARM, CudaRecorder, HostCopy, Recorder, Recording, try_to_record
from elman_core.registry import ConfigError, KernelError

from .hooks import acting
from .objective import States
from .ranks.group import everywhere
from .settings import Settings
from .step import FROM_BATCH, Done, TrainStep, Windows

log = logging.getLogger("elman_core")


@dataclass(frozen=True)
class Mode:
    """The launch mode of a run's steps: "eager", "graph", "compile" or "compile+graph", and why, for the run's first lines.
    `asked`: the setting `train.launch`."""

    name: str
    why: str
    asked: str

    @property
    def compiles(self) -> bool:
        return self.name.startswith("compile")

    @property
    def captures(self) -> bool:
        return self.name.endswith("graph")

    def facts(self) -> dict[str, str]:
        """For the manifest."""
        return {"mode": self.name, "why": self.why, "asked": self.asked}


def choose_mode(settings: Settings, model: Any, device: torch.device, sharded: bool = False) -> Mode:
    """Return the mode that `train.launch` asks for. "auto" is a CUDA graph on a GPU unless something prevents it, such as
    weights that are `sharded` over the ranks. Raises `ConfigError` if the requested mode is unavailable, and says why."""
    asked = settings.train.launch
    against = _against_capture(settings, model, device)
    if sharded and asked == "auto":
        return Mode("eager", "the weights are sharded over the ranks", asked)
    if sharded and asked != "eager":
        raise ConfigError(f"train.launch={asked!r} does not work with train.parallel='fsdp': use 'auto'")
    if asked == "auto":
        return Mode("eager", against, asked) if against else Mode("graph", "on a GPU, and nothing prevents it", asked)
    if asked.endswith("graph") and against:
        raise ConfigError(f"train.launch={asked!r} is unavailable: {against}; use 'auto'")
    if asked.startswith("compile") and settings.data.sampling == "tbptt":
        raise ConfigError(f"train.launch={asked!r} is unavailable: a carried state cannot be compiled; use 'auto'")
    return Mode(asked, "asked for", asked)


def _against_capture(settings: Settings, model: nn.Module, device: torch.device) -> str:
    """Return the reason why the step cannot be captured, or ""."""
    train = settings.train
    if hooks := acting():
        names = sorted({name for plugins in hooks.values() for name in plugins})
        return f"{', '.join(names)} acts on every step, in {' and '.join(hooks)}"
    drops = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
    if train.gradient_checkpointing and drops:
        return "train.gradient_checkpointing draws the dropout again on the host"
    if device.type != "cuda":
        return f"no CUDA graphs on {device.type}"
    return ""


def make_step(step: TrainStep, mode: Mode) -> TrainStep | CapturedStep:
    if mode.compiles:
        step.model.model.compile(dynamic=False)
        step.compiled = True
    if not mode.captures:
        return step
    return CapturedStep(step, CudaRecorder(step.device), required=mode.asked != "auto")


class CapturedStep:
    """A `TrainStep` that is replayed. It is called in the same way and gives the same numbers, bit for bit.

    Args:
        step: forward, loss, backward, norm, clipping and update are recorded.
        recorder: records them, such as `CudaRecorder`.
        required: whether a step that cannot be recorded is an error; if not, it runs eager after one warning.

    Attributes:
        refused: why it could not be recorded; "" if it was recorded or has yet to be.
    """

    def __init__(self, step: TrainStep, recorder: Recorder, required: bool = False) -> None:
        self.step, self.recorder, self.required = step, recorder, required
        self.calls, self.refused = 0, ""
        self._replay: Recording | None = None
        self._static: Windows | None = None
        self._names: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        return self._replay is not None or (bool(self.refused) and self.calls > WARM)

    def __call__(self, windows: Windows, lr: float) -> Done:
        """As `TrainStep`; the carried states of the result are the same tensors every time.
        Raises `KernelError` if the step cannot be recorded, and `required`."""
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
            assert self._static is not None
            return Done(HostCopy.of(values), self._names, self._static.carry)

    def release(self) -> None:
        """Drop the recording, which holds collective operations. The next call records again."""
        recording, self._replay = self._replay, None
        if recording is not None:
            recording.release()

    def where_it_failed(self, windows: Windows, again: bool) -> dict[str, str] | None:
        return self.step.where_it_failed(windows, again)

    def _record(self, windows: Windows) -> None:
        self._static = windows.each(torch.clone)
        self.step.optimizer.zero_grad()  # the recording can use their memory
        recording = try_to_record(self.recorder, self._run)
        error, own_reason = None, ""
        if isinstance(recording, RuntimeError):
            error = recording
            own_reason = str(recording).splitlines()[0]
        else:
            self._replay = recording
        self.refused = self.step.processes.refusal(own_reason)
        if not self.refused:
            return
        self.release()
        if self.required:
            what = f"the step cannot be captured as a CUDA graph, use train.launch='eager': {self.refused}"
            raise everywhere(KernelError(what)) from error
        log.warning("elman: the step cannot be captured as a CUDA graph and runs eager: %s", self.refused)
        self.step.optimizer.zero_grad()

    def _run(self) -> Tensor:
        """The work to record. Everything it reads from outside has a fixed address."""
        assert self._static is not None
        values, self._names, carry = self.step.gradients(self._static)
        self.step.update()
        if carry is not None and self._static.carry is not None:
            for old, new in _pairs(self._static.carry, carry):
                old.copy_(torch.where(self.step.failed > 0, old, new))
        return values

    def _fill(self, windows: Windows) -> None:
        static = self._static
        assert static is not None
        for name in FROM_BATCH:
            mine = getattr(static, name)
            if mine is not None:
                mine.copy_(getattr(windows, name), non_blocking=True)
        if static.carry is not None:
            assert windows.carry is not None
            for mine, theirs in _pairs(static.carry, windows.carry):
                if mine is not theirs:
                    mine.copy_(theirs)


def _pairs(one: States, two: States) -> Iterator[tuple[Tensor, Tensor]]:
    for a, b in zip(one, two, strict=True):
        for name, tensor in (a or {}).items():
            assert b is not None
            yield tensor, b[name]
