"""The op of a matrix-state cell. That its numbers are right is the contract's matter."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from elman_core.kernels import matrix_state
from elman_core.registry import ConfigError

e88 = pytest.importorskip("elman_e88.op").e88


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


@pytest.mark.parametrize("training", [True, False])
def test_a_size_is_verified_before_it_is_used_trained_or_not(training, monkeypatch):
    """With stand-ins for the GPU, the compiler and the checker."""
    [kernel] = [k for k in matrix_state._kernels.values() if k.name == "e88"]
    asked = []
    monkeypatch.setattr(matrix_state.torch.cuda, "device", lambda _index: nullcontext())
    monkeypatch.setattr(type(kernel), "load", lambda *_: "a module")
    monkeypatch.setattr(matrix_state, "ensure_verified", lambda spec, case, _plan: asked.append((spec.name, str(case))))
    monkeypatch.setattr(kernel, "chosen", {})
    monkeypatch.delenv("ELMAN_KERNELS", raising=False)
    given = ("e88", 0, 16, 8, torch.bfloat16, False, True, str(matrix_state.Maps()))
    with torch.set_grad_enabled(training):
        assert matrix_state._choose(*given)
        assert matrix_state._choose(*given)
    [(name, case)] = asked
    assert name == "e88"
    assert "N=16 V=8" in case


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"decay": "exp"}, "decay must be given, sigmoid, mamba, not 'exp'"),
        ({"n_state": 0}, "30 columns, which 2 heads of 2 x 0 keys and V values do not fill"),
        ({"n_state": 8}, "30 columns, which 2 heads of 2 x 8 keys and V values do not fill"),
        ({"decay": "mamba"}, "A_log and dt_bias belong to decay='mamba'"),
    ],
)
def test_a_fused_call_that_cannot_be_is_said_before_anything_runs(changed, said):
    with pytest.raises(ConfigError, match=said):
        e88.fused(torch.zeros(2, 5, 30), torch.zeros(2, 5, 2), **{"n_state": 4, "decay": "given"} | changed)
