"""The op of a matrix-state cell. That its numbers are right is the contract's matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from elman_core.kernels import matrix_state

e88_op = pytest.importorskip("elman_e88.op")


def test_the_choice_of_a_kernel_is_a_constant_of_a_compiled_graph(monkeypatch):
    """What a GPU's tensors go through; here with kernels off, which needs no GPU."""
    [kernel] = [k for k in matrix_state._kernels.values() if k.name == "e88"]
    monkeypatch.setenv("ELMAN_KERNELS", "off")
    monkeypatch.setattr(kernel, "chosen", {})
    maps = str(matrix_state.Maps())

    def choose(x: Tensor) -> Tensor:
        sizes = int(x.shape[0]), int(x.shape[1])
        return x + (2 if matrix_state._choose("e88", 0, *sizes, x.dtype, False, True, maps) else 1)

    x = torch.zeros(16, 8)
    assert torch.equal(torch.compile(choose, fullgraph=True, backend="aot_eager")(x), x + 1)
    assert len(kernel.chosen) == 1
