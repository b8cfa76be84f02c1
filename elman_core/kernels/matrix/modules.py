"""What is compiled for a matrix-state kernel: one module for a size, a dtype and the maps of its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elman_core.kernels import build
from elman_core.kernels.build import Extension
from elman_core.kernels.cell import Cell
from elman_core.kernels.runtime import DTYPE_CODES
from elman_core.kernels.spec import Target
from elman_core.registry.errors import KernelError

SUPPORTED = "rows N: multiples of 4 from 4 to 128; columns V: 1 to 4096; float32, bfloat16, float16"
CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOST_DTYPES = (torch.float64, torch.float32)
KINDS = {"given": 0, "sigmoid": 1, "mamba": 2}


@dataclass(frozen=True)
class Maps:
    """What happens to the inputs before the recurrence. `decay` and `write`: "given", "sigmoid"; `decay` also "mamba"."""

    silu: bool = False
    l2: bool = False
    decay: str = "given"
    write: str = "given"

    def __str__(self) -> str:
        return f"{int(self.silu)}{int(self.l2)}{KINDS[self.decay]}{KINDS[self.write]}"

    @staticmethod
    def parse(text: str) -> Maps:
        names = list(KINDS)
        return Maps(text[0] == "1", text[1] == "1", names[int(text[2])], names[int(text[3])])


@dataclass(frozen=True)
class Size:
    """What one compiled module is for; fields as in the op."""

    rows: int
    columns: int
    dtype: torch.dtype
    linear: bool
    write: bool
    maps: str


def interval(rows: int, bits: int, backend: str) -> int:
    """Steps between saved states, as `Plan::interval` of `elman/matrix_state_plan.cuh` of `elman_csrc`."""
    return 16 if rows <= 32 or bits > 16 or backend == "host" else 8 if rows <= 64 else 4


def extension(cell: Cell, target: Target, size: Size) -> Extension:
    """What `kernels.build` compiles.

    Raises:
        KernelError: the sources are not installed.
    """
    short = str(size.dtype).removeprefix("torch.")
    words = [cell.name, "matrix", target, short, f"{size.rows}x{size.columns}"]
    words.append(f"{int(size.linear)}{int(size.write)}{size.maps}")
    silu, l2, kind0, kind1 = tuple(size.maps)
    return build.shipped(
        "_".join(words),
        "matrix_state_host.cpp" if target == "host" else "matrix_state_cuda.cu",
        cell.header,
        CELL=cell.type,
        LINEAR=int(size.linear),
        WRITE=int(size.write),
        DTYPE=DTYPE_CODES[size.dtype],
        ROWS=size.rows,
        LINES=size.columns,
        SILU=silu,
        L2=l2,
        KIND0=kind0,
        KIND1=kind1,
    )


def usual(cell: Cell, target: Target) -> Extension:
    """The same where no size is named."""
    dtype = torch.float64 if target == "host" else torch.bfloat16
    return extension(cell, target, Size(32, 32, dtype, False, False, str(Maps())))


def check(name: str, target: Target, size: Size) -> None:
    """Nothing is compiled for a size that has no kernel.

    Raises:
        KernelError: names what there is.
    """
    fits = size.rows % 4 == 0 and 4 <= size.rows <= 128 and 1 <= size.columns <= 4096
    if not fits or size.dtype not in (CUDA_DTYPES if target == "cuda" else HOST_DTYPES):
        host = "; the host's are float64 and float32" if target == "host" else ""
        raise KernelError(
            f"{name}: no kernel for N={size.rows} V={size.columns} in {size.dtype}. There are: {SUPPORTED}{host}"
        )
