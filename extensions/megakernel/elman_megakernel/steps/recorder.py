"""Records a function's work on a CPU, once what repeats it is compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from elman_core import LadderForCausalLM
from elman_core.extension import (
    Family,
    FamilyRow,
    KernelError,
    KernelExtension,
    awaited,
    beside,
    find_host_compiler,
    find_kernel,
    kernel_mode,
    launcher,
    load_or_warn,
    local_arch,
    opened,
    row_by_row,
    shipped,
)

from .program import Checked, Program, compare
from .step import BatchedStep, batched_step

FAMILY = Family(
    "program",
    {"C": "count", "I": "words"},
    {"run": "code threads"},
    members=(FamilyRow("code", "CI", "index"),),
    numbers="threads stream",
)


def extension() -> KernelExtension:
    """What repeats a program; the same for all models."""
    return shipped("program", "program_cpu.cpp", cpu=True, DTYPE=torch.float32)


class CpuRecorder:
    """An `elman_core.extension.StepRecorder`. module: the compiled one."""

    burst = 1

    def __init__(self, module: Any) -> None:
        self.module = module

    def work(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def step_of(self, model: LadderForCausalLM, most: int) -> BatchedStep | None:
        """As `batched_step`."""
        return batched_step(model, self.record, most)

    def record(self, run: Callable[[], Tensor]) -> Program:
        """As `Recorder.record`: what `run` changes is as before afterwards.

        Raises:
            RuntimeError: it reads a value on the host, or multiplies what there is no instruction for.
            KernelError: an instruction does not compute what plain PyTorch does.
        """
        tape = Checked(self.module)
        try:
            with row_by_row(), tape:
                result = run()
            program, wholes = Program(tape, result), [whole for whole, _ in tape.before.values()]
            after = [whole.clone() for whole in wholes]
            with row_by_row():
                run()  # from where the first run ended: what no listed operation computed is another number now
            right = [whole.clone() for whole in wholes]
            _put(wholes, after)
            program()
            for whole, wanted in zip(wholes, right, strict=True):
                if whole.is_floating_point():
                    compare("state", whole, wanted, tape.coarsest)
            return program
        finally:
            _put([whole for whole, _ in tape.before.values()], [values for _, values in tape.before.values()])


def _put(xs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for x, value in zip(xs, values, strict=True):
        x.copy_(value)


_BUILT = "decodes on this CPU several times as fast"
_ready: list[Any] = []
_building: list[threading.Thread] = []
_one_at_a_time = threading.Lock()


def recorder_for(worth: bool, wait: bool) -> CpuRecorder | None:
    """`recorder_when_built`, or None for a text that does not pay for compiling what repeats its steps."""
    return recorder_when_built(wait) if worth or is_built() else None


def recorder_when_built(wait: bool = False) -> CpuRecorder | None:
    """The recorder of this machine. None without a compiler, with ELMAN_KERNELS=off, and while the module is compiled beside
    what runs; a process that ends before that waits for it, so that it happens once.

    Args:
        wait: until it is compiled.
    """
    what = "decoding on a CPU"
    if not _ready and load_or_warn(what, find_host_compiler if not is_built() else lambda: True) is None:
        return None

    def prepare() -> None:
        if (found := load_or_warn(what, lambda: opened(extension(), FAMILY))) is not None:
            _ready.append(found)

    with _one_at_a_time:
        if not _ready and (kernel_mode() == "require" or is_built()):
            prepare()
        elif not _ready and not _building:
            _building.append(beside(prepare, _BUILT))
    for thread in _building if wait else ():
        awaited(thread, _BUILT)
    return CpuRecorder(_ready[0]) if _ready and kernel_mode() != "off" else None


def is_built() -> bool:
    """Whether the module is compiled; it is not where its sources are missing."""
    try:
        return bool(_ready) or all(find_kernel(what, local_arch(what)) for what in (extension(), launcher()))
    except KernelError:
        return False
