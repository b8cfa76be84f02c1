"""Compile and launch a model's program."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elman_core.extension import (
    TIMEOUT_NS,
    Family,
    FamilyRow,
    KernelError,
    KernelExtension,
    beside,
    build_kernel,
    contiguous,
    current_stream,
    emulated,
    error_word,
    find_kernel,
    local_arch,
    on_device,
    opened,
    shipped,
    writable_cache,
    write_text,
)

from .source import Source, State

PROGRAM = Family(
    "whole",
    sizes={"T": "steps", "J": "jobs_count", "V": "classes", "F": "floats", "W": "words", "O": "own_floats"},
    functions={"run": "table jobs constants states exchanged token shown seen"},
    members=(
        FamilyRow("table", "VD"), FamilyRow("jobs", "J3", "index"), FamilyRow("constants", "C", "compute"),
        FamilyRow("states", "F", "compute"), FamilyRow("own", "O", "compute"), FamilyRow("exchanged", "W", "index"),
        FamilyRow("token", "1", "index"), FamilyRow("shown", "T", "index"), FamilyRow("waits", "TV", "compute"),
        FamilyRow("seen", "V", "bool"),
    ),
    numbers="blocks first top_k timeout_ns error stream",
    reals="penalty temperature below",
)  # fmt: skip


_States = Sequence[Mapping[str, Tensor] | None]
_compiling: dict[str, threading.Thread] = {}


def extension(text: str, dtype: torch.dtype, device: torch.device) -> KernelExtension:
    """The module of a program's header, which is written to the cache of kernels; an emulated one for the processor."""
    header = writable_cache() / "programs" / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.h"
    if not header.exists():
        header.parent.mkdir(parents=True, exist_ok=True)
        write_text(header, text)
    made = shipped(f"whole_{str(dtype).removeprefix('torch.')}", "whole_cuda.cu", header, DTYPE=dtype)
    return emulated(made) if device.type == "cpu" else made


def compiling(what: KernelExtension) -> threading.Thread | None:
    """The thread that compiles a module, started here; None once it is compiled, or cannot be."""

    def work() -> None:
        with contextlib.suppress(KernelError):  # which `Program` meets again
            build_kernel(what, arch)

    arch = local_arch(what)
    if not find_kernel(what, arch) and (name := what.file_name(arch)) not in _compiling:
        _compiling[name] = beside(work, "writes long texts of this model quicker")
    thread = _compiling.get(what.file_name(arch))
    return thread if thread is not None and thread.is_alive() else None


class Program:
    """A model's program with its weights.

    Args:
        source: of the program. module: its extension. device: of the weights.
        placed: gives a recorded tensor in the dtype of the weights on this device, contiguous.
        blocks: how many run together; None for one on each multiprocessor.

    Raises:
        KernelError: it cannot be compiled.
    """

    def __init__(
        self,
        source: Source,
        module: KernelExtension,
        device: torch.device,
        placed: Callable[[Tensor], Tensor],
        blocks: int | None = None,
    ) -> None:
        self.source, self.device = source, device
        self.weights = [contiguous(placed(w)) for w in source.weights]
        jobs = [[w.data_ptr(), len(w), w.shape[1] * w.element_size()] for w in self.weights]
        constants = torch.cat([c.float().flatten() for c in source.constants] or [torch.zeros(1)])
        if blocks is None:
            blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self.blocks = min(blocks, source.blocks)
        self.fixed: dict[str, Any] = {
            "table": contiguous(placed(source.embedding)), "jobs": torch.tensor(jobs).to(device),
            "constants": constants.to(device), "blocks": self.blocks, "timeout_ns": TIMEOUT_NS,
        }  # fmt: skip
        with on_device(self.fixed["table"]):
            self.module = opened(module, PROGRAM)

    def begin(self, states: _States, token: Tensor) -> Run:
        """A text that goes on from these states of each layer and this token."""
        return Run(self, by_name(states), token)


class Run:
    """A text under way. States and token stay in its own memory from launch to launch.

    Args:
        states: to begin with, of one sample. token: what is fed first.
    """

    def __init__(self, program: Program, states: Mapping[State, Tensor], token: Tensor) -> None:
        source, self.program = program.source, program
        zeros = functools.partial(torch.zeros, device=program.device)
        self.states, self.exchanged = zeros(source.floats), zeros(source.words, dtype=torch.long)
        self.token, self._steps = token.reshape(1).to(torch.long).clone(), 0
        self._given = {"states": self.states, "exchanged": self.exchanged, "token": self.token}
        if source.own:
            self._given["own"] = zeros(program.blocks * source.own)
        for key, at in source.states.items():
            self.states[at : at + states[key].numel()].copy_(states[key].reshape(-1))

    def save(self, states: Mapping[State, Tensor]) -> None:
        """Copy the states into these tensors."""
        for key, at in self.program.source.states.items():
            states[key].copy_(self.states[at : at + states[key].numel()].view(states[key].shape))

    def draw(self, shown_T: Tensor, waits_TV: Tensor | None, seen_V: Tensor, **sampling: Any) -> None:
        """Feed the last token and draw T more, on the current stream.

        Args:
            shown_T: int64, receives them; -1 where logits are not finite or a block waited in vain for another.
            waits_TV, seen_V, sampling: as of `elman_core.kernels.decode.op.draw`.
        """
        given = {**self.program.fixed, **self._given, "shown": shown_T, "seen": seen_V, "first": 1 + self._steps}
        given |= {**sampling, "below": 1 - top_p if (top_p := sampling["top_p"]) < 1 else -1}
        del given["top_p"]
        if waits_TV is not None:
            given["waits"] = waits_TV
        with on_device(shown_T):
            self.program.module.run("run", error=error_word(shown_T.device), stream=current_stream(shown_T), **given)
        self._steps += len(shown_T)


def by_name(states: _States) -> dict[State, Tensor]:
    """States by layer and name."""
    return {(layer, name): x for layer, state in enumerate(states) for name, x in (state or {}).items()}
