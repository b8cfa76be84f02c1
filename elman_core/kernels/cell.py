"""`Cell`: what plans, bindings and builds must know of a cell, so that none of them needs the kernel object."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Cell:
    """A cell in C++ and in PyTorch. Compiled modules are cached by cell, so it is equal only to itself.

    Attributes:
        name: of the kernel; lower case.
        header: the cell header, compiled together with a binding of `elman_csrc`.
        type: the C++ name of the cell.
        reference: the variant's own slow, obvious function: the truth. Of an elementwise or gated cell, its step.
        readout, update, accumulates, blocks: of a dense cell, as `DenseKernel` says.
        extras: names of the tensors that the cell reads beside its input.
        streams, vectors, states: of an elementwise cell, as `ElementwiseKernel` says.
        gates, kept, splits: of a gated cell, as `GatesKernel` says.
        uses_a: whether the backward of a dense cell is given a; as the header says.
        bare: of a dense cell with tied weights, which is given x of u = W silu(x) + b: the cell that is given u.
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
        """What a stamp covers besides the C++ sources: the reference's file and all files beside it."""
        reference = inspect.getsourcefile(inspect.unwrap(self.reference))
        return (*((Path(reference),) if reference else ()), *sorted(Path(module).parent.glob("*.py")))
