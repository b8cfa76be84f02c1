"""The matrix-state skeleton with other cells than E88's: its C++ loops, its GPU source on emulated threads, and nvcc."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import LIBRARY, compile_emulated, emulated_spec
from torch import Tensor

from elman_core.kernels import MatrixKernel
from elman_core.kernels.build import build
from elman_core.kernels.cell import Cell
from elman_core.kernels.matrix import modules
from elman_core.kernels.matrix import native as matrix_native
from elman_core.kernels.matrix import op as matrix_op
from elman_core.kernels.matrix.modules import Maps
from elman_core.kernels.matrix.spec import case
from elman_core.kernels.spec import Case
from elman_core.kernels.verify import failures, verify
from elman_core.nn import full_precision
from elman_core.testing.kernel import need_host_compiler, need_nvcc

CELL = """
#pragma once
#include <elman/matrix_state_cell.h>
namespace {name} {{
template <bool Linear, bool WriteGate>
struct Cell {{
  static constexpr int lines = 1, scalars = WriteGate ? 2 : 1;
  static constexpr bool squashes = !Linear, {flags};
  template <class Math, class T>
  static ELMAN_HD elman::MatrixLine<T> line(T r, const T* in, const T* c) {{
    return {{c[0], (WriteGate ? c[scalars - 1] : T(1)) * ({wrong})}};
  }}
  template <class Math, class T>
  static ELMAN_HD elman::MatrixLineGrad<T, lines, scalars> line_backward(T dkeep, T dwrite, T r, const T* in, const T* c) {{
    elman::MatrixLineGrad<T, lines, scalars> g;
    g.din[0] = (WriteGate ? c[scalars - 1] : T(1)) * dwrite;
    g.dr = {dr};
    g.dc[0] = {dkeep};
    if (WriteGate) g.dc[scalars - 1] = dwrite * ({wrong});
    return g;
  }}
}};
}}  // namespace {name}
"""
# What is retrieved is read after the decay, so that the decay has two gradients; and nothing is retrieved at all.
CELLS = {
    "made_up_after": {
        "flags": "retrieves = true, scalar_keep = false, backward_uses_r = true",
        "wrong": "in[0] - c[0] * r", "dr": "-c[0] * g.din[0]", "dkeep": "dkeep - g.din[0] * r",
    },
    "made_up_adding": {
        "flags": "retrieves = false, scalar_keep = true, backward_uses_r = false",
        "wrong": "in[0]", "dr": "T(0)", "dkeep": "dkeep",
    },
}  # fmt: skip


def reference_of(name: str) -> Any:
    @full_precision
    def reference(
        q_BTHN: Tensor,
        k_BTHN: Tensor,
        v_BTHV: Tensor,
        decay_BTH: Tensor,
        write_BTH: Tensor | None = None,
        state_BHNV: Tensor | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
        *,
        linear_state: bool = False,
    ) -> tuple[Tensor, Tensor]:
        s = q_BTHN.new_zeros(*q_BTHN[:, 0].shape, v_BTHV.shape[-1]) if state_BHNV is None else state_BHNV
        outputs = []
        for t in range(q_BTHN.shape[1]):
            k, kept = k_BTHN[:, t, :, :, None], s * decay_BTH[:, t, :, None, None]
            wrong = v_BTHV[:, t, :, None] - (kept * k).sum(-2, keepdim=True) * (name == "made_up_after")
            new = kept + k * wrong * (1 if write_BTH is None else write_BTH[:, t, :, None, None])
            new = new if linear_state else new.tanh()
            s = new if mask_BT is None else torch.where(mask_BT[:, t, None, None, None], new, s)
            outputs.append((s * q_BTHN[:, t, :, :, None]).sum(-2))
        return torch.stack(outputs, 1), s

    return reference


@pytest.fixture(scope="module", params=CELLS)
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MatrixKernel:
    name = request.param
    header = tmp_path_factory.mktemp(name) / f"{name}_cell.h"
    header.write_text(CELL.format(name=name, **CELLS[name]))
    return MatrixKernel(name, header=header, cell=f"{name}::Cell", reference=reference_of(name))


GATED = str(Maps(True, True, "mamba", "sigmoid"))
HOST = [
    case((2, 33, 2, 8, 12), torch.float64, write=True, masked=True),
    case((2, 21, 2, 8, 8), torch.float64, maps=GATED, write=True, masked=True),
    case((1, 17, 2, 4, 3), torch.float64, linear=True, strided=True),
    case((2, 19, 3, 8, 8), torch.float32),
]
EMULATED = [
    case((2, 35, 3, 16, 16), torch.bfloat16, maps=GATED, write=True, masked=True),
    case((1, 18, 1, 32, 24), torch.bfloat16),  # keeps what was retrieved
    case((1, 18, 2, 32, 20), torch.float32, write=True, masked=True),  # without tensor cores
    case((1, 17, 1, 64, 72), torch.bfloat16, linear=True),
]


def test_the_loops_of_the_host_equal_the_reference(kernel: MatrixKernel) -> None:
    need_host_compiler()
    report = verify(kernel.spec(), "host", cases=HOST)
    assert report.passed, "\n".join(failures(report))


@pytest.mark.parametrize("problem", EMULATED, ids=str)
def test_the_gpu_source_equals_the_reference(
    kernel: MatrixKernel, problem: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_host_compiler()

    def load(cell: Cell, _target: str, size: Any) -> Any:
        extension = modules.extension(cell, "cuda", size)
        made = tmp_path / f"{extension.name}.so"
        if not made.exists():
            compile_emulated(extension, extension.binding, made, *LIBRARY, "-D__CUDA_ARCH_LIST__=900")
        return matrix_native.open_library(made)

    monkeypatch.setattr(matrix_op, "_load", load)
    report = verify(emulated_spec(kernel), "emulated", cases=[problem], opcheck=False)
    assert report.passed, "\n".join(failures(report))


def test_it_compiles_for_a_gpu(kernel: MatrixKernel, tmp_path: Path) -> None:
    need_nvcc()
    assert build(kernel.extension("cuda"), "sm_90", tmp_path).is_file()
