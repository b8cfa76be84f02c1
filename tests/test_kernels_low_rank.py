"""A dense recurrence whose W is a product of two matrices: computed step by step, refused where nothing runs it yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from elman_core.kernels import DenseKernel
from elman_core.kernels.verify import failures, verify
from elman_core.nn import full_precision
from elman_core.registry import ConfigError, KernelError


@full_precision
def reference(
    u_TBd: Tensor,
    left_dr: Tensor,
    right_rd: Tensor,
    h0_Bd: Tensor,
    mask_TB: Tensor | None = None,
    starts_TB: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = tanh(left right h_{t-1} + u_t), y = h."""
    h_Bd, outputs = h0_Bd, []
    for t, u_Bd in enumerate(u_TBd):
        new_Bd = torch.tanh(h_Bd @ (left_dr @ right_rd).t() + u_Bd)
        if mask_TB is not None:
            new_Bd = torch.where(mask_TB[t, :, None], new_Bd, h_Bd)
        h_Bd = new_Bd
        outputs.append(h_Bd)
    y_TBd = torch.stack(outputs)
    return (y_TBd if mask_TB is None else torch.where(mask_TB[..., None], y_TBd, 0.0)), h_Bd


low = DenseKernel(
    "lowrank",
    header=Path("cell.h"),
    cell="elman::lowrank::Cell",
    reference=reference,
    readout=lambda h, _: h,
    update=lambda a, _: torch.tanh(a),
    factors=("left", "right"),
)


def inputs(dtype: torch.dtype = torch.float64, rank: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = [(5, 3, 6), (6, rank), (rank, 6), (3, 6)]
    return [(0.5 * torch.randn(s, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("rank", [1, 2, 6])
def test_gradients_of_both_factors_agree_with_finite_differences(rank: int) -> None:
    mask = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)) > 0.3
    assert torch.autograd.gradcheck(lambda *a: low(*a, mask, backend="torch"), inputs(rank=rank))


def test_verify_passes_on_the_per_step_path_and_knows_no_other() -> None:
    spec = low.spec()
    assert spec.targets == ()
    cases = [c for c in spec.cases("host", "quick") if c.sizes["T"] < 100]
    report = verify(spec, "torch", cases=cases)
    assert report.passed, "\n".join(failures(report))
    assert {row.tensor for row in report.rows} == {"y", "h_T", "d u", "d left", "d right", "d h0"}


def test_a_factor_that_wants_no_gradient_gets_none() -> None:
    given = inputs()
    given[1].requires_grad_(False)
    y, _ = low(*given, backend="torch")
    y.sum().backward()
    assert given[1].grad is None
    assert given[2].grad is not None


@pytest.mark.parametrize("backend", ["cuda", "host"])
def test_the_persistent_launch_is_refused_with_the_reason_and_the_way_out(backend: str) -> None:
    with pytest.raises(KernelError, match=r"W in 2 factors \(left, right\).*use backend='torch'"):
        low(*inputs(torch.float32), backend=backend)  # type: ignore[arg-type]
    assert low.backend("cpu", 6) == "torch"


def test_what_a_gpu_runs_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELMAN_KERNELS", raising=False)
    assert low.backend("cuda:0", 6) == "torch (W in 2 factors has no persistent launch)"


def test_factors_that_do_not_chain_are_named_and_a_missing_one_is_too() -> None:
    u, left, right, h0 = inputs()
    with pytest.raises(ConfigError, match=r"right must be \(2, 6\)"):
        low(u, left, right[:1], h0)
    with pytest.raises(TypeError, match="u, left, right, h0, mask=None, starts=None"):
        low(u, left, h0)


def test_slots_that_share_w_are_further_rows() -> None:
    u, left, right, h0 = inputs()
    slots = torch.stack([u, 2 * u], 2)  # (T, B, S, d)
    y, last = low(slots.flatten(1, 2), left, right, h0.repeat_interleave(2, 0))
    for i, x in enumerate((u, 2 * u)):
        wanted, end = low(x, left, right, h0)
        torch.testing.assert_close(y.unflatten(1, (3, 2))[:, :, i], wanted)
        torch.testing.assert_close(last.unflatten(0, (3, 2))[:, i], end)


def test_a_compiled_function_computes_the_same() -> None:
    given = inputs(torch.float32)
    compiled = torch.compile(lambda *a: low(*a)[0].square().sum(), fullgraph=True, backend="aot_eager")
    made = torch.autograd.grad(compiled(*given), given)
    wanted = torch.autograd.grad(low(*given)[0].square().sum(), given)
    for a, b in zip(made, wanted, strict=True):
        torch.testing.assert_close(a, b)
