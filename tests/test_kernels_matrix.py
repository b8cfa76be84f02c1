"""The op of a matrix-state cell. That its numbers are right is the contract's matter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from elman_core.kernels import matrix_plan, matrix_state
from elman_core.registry.errors import ConfigError

e88_op = pytest.importorskip("elman_e88.op")


def test_the_choice_of_a_kernel_is_a_constant_of_a_compiled_graph(monkeypatch):
    """What a GPU's tensors go through; here with kernels off, which needs no GPU."""
    [kernel] = [k for k in matrix_state._kernels.values() if k.name == "e88"]
    monkeypatch.setenv("ELMAN_KERNELS", "off")
    monkeypatch.setattr(kernel, "chosen", {})
    maps, plan = str(matrix_state.Maps()), matrix_state.matrix_plan.DEFAULT

    def choose(x: Tensor) -> Tensor:
        sizes = int(x.shape[0]), int(x.shape[1])
        return x + (2 if matrix_state._choose("e88", 0, *sizes, x.dtype, False, True, maps, plan) else 1)

    x = torch.zeros(16, 8)
    assert torch.equal(torch.compile(choose, fullgraph=True, backend="aot_eager")(x), x + 1)
    assert len(kernel.chosen) == 1


def test_a_launch_plan_is_asked_for_by_name_and_the_environment_comes_second(monkeypatch):
    assert matrix_plan.chosen() == matrix_plan.DEFAULT
    monkeypatch.setenv("ELMAN_MATRIX_PLAN", "paired")
    assert matrix_plan.chosen() == "paired"
    assert matrix_plan.chosen("half_paired") == "half_paired"
    monkeypatch.setenv("ELMAN_MATRIX_PLAN", "fastest")
    with pytest.raises(ConfigError, match=r"'fastest' is not a launch plan.*default, paired"):
        e88_op.matrix(*(torch.zeros(1, 2, 1, 4) for _ in range(3)), torch.zeros(1, 2, 1))


def test_each_plan_is_a_module_of_its_own_and_the_default_has_no_macros():
    size = matrix_state.Size(16, 16, torch.bfloat16, False, False, str(matrix_state.Maps()))
    made = {plan: e88_op.matrix.extension_for("cuda", replace(size, plan=plan)) for plan in matrix_plan.PLANS}
    assert len({e.key("sm_90") for e in made.values()}) == len({e.name for e in made.values()}) == len(made)
    assert not {"ELMAN_FORWARD", "ELMAN_BACKWARD"} & {name for name, _ in made[matrix_plan.DEFAULT].defines}
    assert dict(made["paired"].defines)["ELMAN_BACKWARD"] == "2401"


def test_a_plan_that_is_not_the_default_is_named_in_what_runs(monkeypatch):
    kernel = e88_op.matrix
    size = matrix_state.Size(16, 16, torch.bfloat16, False, False, str(matrix_state.Maps()))
    monkeypatch.delenv("ELMAN_KERNELS", raising=False)
    for plan, words in (("default", "cuda"), ("paired", "cuda, plan paired")):
        monkeypatch.setattr(kernel, "chosen", {(0, replace(size, plan=plan), True, "auto"): True})
        assert kernel.backend("cuda:0", 16, 16) == words
