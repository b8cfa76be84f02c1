"""What is compiled for a matrix-state kernel: one module for a size, a dtype and the maps of its inputs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from elman_core.kernels.build import Extension
from elman_core.kernels.spec import Target
from elman_core.registry.errors import KernelError

SUPPORTED = "rows N: multiples of 4 from 4 to 128; columns V: 1 to 4096; float32, bfloat16, float16"
DTYPE_CODES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
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


def installed() -> bool:
    """Whether the sources of the kernels are there."""
    return importlib.util.find_spec("elman_csrc") is not None


def extension(name: str, header: Path, cell: str, target: Target, size: Size) -> Extension:
    """What `kernels.build` compiles.

    Args:
        name: of the variant. header, cell: as of `MatrixKernel`.

    Raises:
        KernelError: the sources are not installed.
    """
    if not installed():
        raise KernelError("the kernel sources are not installed: type `pip install elman-csrc`")
    import elman_csrc

    short = str(size.dtype).removeprefix("torch.")
    words = [name, "matrix", target, short, f"{size.rows}x{size.columns}"]
    words.append(f"{int(size.linear)}{int(size.write)}{size.maps}")
    return Extension(
        name="_".join(words),
        binding=elman_csrc.get_bindings() / ("matrix_state_host.cpp" if target == "host" else "matrix_state_cuda.cu"),
        include=(elman_csrc.get_include(),),
        header=header,
        defines=(
            ("ELMAN_CELL", cell),
            ("ELMAN_LINEAR", str(int(size.linear))),
            ("ELMAN_WRITE", str(int(size.write))),
            ("ELMAN_DTYPE", str(DTYPE_CODES[size.dtype])),
            ("ELMAN_ROWS", str(size.rows)),
            ("ELMAN_LINES", str(size.columns)),
            ("ELMAN_SILU", size.maps[0]),
            ("ELMAN_L2", size.maps[1]),
            ("ELMAN_KIND0", size.maps[2]),
            ("ELMAN_KIND1", size.maps[3]),
        ),
        python=False,
    )


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
