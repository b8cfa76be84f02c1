"""Programs of one kernel: a `*_gpu_driver.cu` compiled with a module that ships, for a GPU or for emulated threads."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from elman_core.kernels import MatrixKernel
from elman_core.kernels.build import Extension
from elman_core.kernels.decode import native as decoding
from elman_core.kernels.dense.native import source
from elman_core.kernels.gates import native as gated
from elman_core.kernels.matrix.native import extension
from elman_core.kernels.matrix.spec import Maps, Size
from elman_core.kernels.runtime import DTYPE_CODES
from elman_core.kernels.spec import Cell

rnn = pytest.importorskip("elman_baselines.rnn.op")
NAMES = ("e1", "e42", "e75", "e88", "e97")
e1, e42, e75, e88, e97 = (vars(pytest.importorskip(f"elman_{name}.op"))[name] for name in NAMES)
e23 = pytest.importorskip("elman_e23.op")
HERE = Path(__file__).parent
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
PLAIN, FUSED = Maps(), e88.cell.maps[0]


@dataclass(frozen=True)
class Program:
    """A driver, and the module that it runs."""

    driver: str
    extension: Extension

    @property
    def source(self) -> Path:
        return HERE / f"{self.driver}_gpu_driver.cu"


def dense(kind: str, spill: int, wide: int, dtype: torch.dtype, width: int, tied: bool = False) -> Program:
    bare = source(e42._tied.cell if tied else e42.cell, "cuda")
    macros = {"DTYPE": DTYPE_CODES[dtype], "WIDTH": width, "KIND": kind, "SPILL": spill, "WIDE": wide}
    name = f"dense_{'tied_' if tied else ''}{kind}{spill}{wide}_{str(dtype).removeprefix('torch.')}_{width}"
    defines = tuple((f"ELMAN_{key}", str(value)) for key, value in macros.items())
    return Program("dense", replace(bare, name=name, defines=(*bare.defines, *defines)))


def gates(cell: Cell, rows: int, dtype: torch.dtype, width: int, heads: int = 1) -> Program:
    return Program("gates", gated.extension(cell, "cuda", dtype, width, rows, heads=heads))


def matrix(
    rows: int, columns: int, dtype: torch.dtype, maps: Maps = PLAIN, write: bool = False, of: MatrixKernel = e88,
    linear: bool = False, step: bool = False,
) -> Program:  # fmt: skip
    size = Size(rows, columns, dtype, of.cell.form(maps, [linear], write), step)
    return Program("matrix_step" if step else "matrix_state", extension(of.cell, "cuda", size))


def decode(dtype: torch.dtype, cell: Cell | None = None) -> Program:
    return Program("decode", decoding.extension(dtype, cell))


def tape(dtype: torch.dtype, width: int, packed: bool = False) -> Program:
    bare = e23.extension(dtype, width, packed)
    return Program("e23", replace(bare, include=(*bare.include, HERE / "no_python"), python=False))


def name_of(program: Program) -> str:
    return program.extension.name
