"""`Cell`: what plans, bindings and builds need to know about a cell. So none of them needs the kernel object."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Cell:
    """A cell in C++ and in PyTorch. Compiled modules are cached by cell, so a cell is equal only to itself.

    Attributes:
        name: of the kernel; lower case.
        header: the cell header, compiled together with a binding of `elman_csrc`.
        type: the C++ name of the cell.
        reference: the truth: the variant's own slow, obvious function; for an elementwise or gated cell, its step.
        readout, update, accumulates, blocks: of a dense cell; see `DenseKernel`.
        extras: names of the tensors that the cell reads beside its input.
        streams, vectors, states: of an elementwise cell; see `ElementwiseKernel`.
        gates, kept, splits: of a gated cell; see `GatesKernel`.
        uses_a: whether the backward of a dense cell reads a; as in the header.
        bare: for a dense cell with tied weights, which takes x of u = W silu(x) + b: the same cell taking u.
    """

    name: str
    header: Path
    type: str
    reference: Callable[..., Any]
    readout: Callable[..., Tensor] = lambda h, *_rest: h
    update: Callable[..., Tensor] | None = None
    extras: tuple[str, ...] = ()
    uses_a: bool = False
    accumulates: str | None = None
    blocks: bool = False
    bare: Cell | None = None
    streams: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    gates: int = 1
    kept: int = 0
    splits: bool = False

    def python(self, module: str) -> tuple[Path, ...]:
        """The Python that a stamp covers: the reference's file, and all files in the folder of `module`."""
        reference = inspect.getsourcefile(inspect.unwrap(self.reference))
        return (*((Path(reference),) if reference else ()), *sorted(Path(module).parent.glob("*.py")))
