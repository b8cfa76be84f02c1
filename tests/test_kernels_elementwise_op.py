"""The op of an elementwise cell: two states, gradients, compilation, refusals. Plugins' contracts check those of one state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.func import jvp
from torch.utils.checkpoint import checkpoint

from elman_core.kernels import ElementwiseKernel
from elman_core.kernels.verify import failures, verify
from elman_core.nn import gate
from elman_core.testing.kernel import need_host_compiler

T, B, D = 4, 2, 3


def diagonal_lstm(h, c, *given):
    i, f, o, z = (x + p * h for x, p in zip(given[:4], given[4:], strict=True))
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, c, h


lstm = ElementwiseKernel(
    "made_up_lstm",
    header=Path(__file__).parents[1] / "csrc_common" / "tests" / "elementwise_cells.h",
    cell="elman::made_up::DiagonalLstm",
    step=diagonal_lstm,
    streams=("i", "f", "o", "z"),
    vectors=("p_i", "p_f", "p_o", "p_z"),
    states=("h", "c"),
)


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(T, B, D)] * 4 + [(D,)] * 4 + [(B, D)] * 2
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("backend", ["torch", "host"])
def test_a_cell_of_two_states_passes_the_quick_grid(backend):
    need_host_compiler()
    report = verify(lstm.specs()[0], backend, opcheck=False)
    assert report.passed, list(failures(report))
    assert {"y", "h_T", "c_T", "d h", "d c", "d i", "d p_z"} <= {row.tensor for row in report.rows}


def test_compiled_and_recomputed_it_gives_the_same_gradients():
    def loss(*given):
        y, h, c = lstm(*given)
        return (y * y).sum() + h.sum() + c.sum()

    given = inputs()
    wanted = torch.autograd.grad(loss(*given), given)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for made in (compiled(*given), checkpoint(loss, *given, use_reentrant=False)):
        for x, y in zip(torch.autograd.grad(made, given), wanted, strict=True):
            torch.testing.assert_close(x, y)


def test_states_before_steps_are_kept_only_for_a_backward():
    given = inputs()
    marks = None, None
    with torch.no_grad():
        h0 = torch.stack(given[-2:])
        y, _, kept = lstm.op(*given[:-2], h0, *marks, False, "torch")
        assert kept.numel() == 0
    assert torch.equal(y, lstm(*given)[0])
    y, _ = jvp(lambda x: lstm(x, *given[1:])[0], (given[0],), (given[0],))  # the reference
    torch.testing.assert_close(y, lstm(*given)[0])


def test_what_cannot_be_is_refused():
    given = inputs()
    with pytest.raises(TypeError, match=r"made_up_lstm takes \(i, f, o, z, p_i, .* mask=None, starts=None\), not 9"):
        lstm(*given[:-1])
    y, *_ = lstm(*given)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), given[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"backend='auto' or 'reference'"):
        jvp(lambda x: lstm(x, *given[1:], backend="torch")[0], (given[0],), (given[0],))


def test_a_gate_nearly_shut_keeps_the_digits_of_its_slope():
    logit = torch.tensor([-30.0, -5.0, 0.0, 5.0, 12.0, 30.0], requires_grad=True)
    exact = torch.sigmoid(logit.double()), torch.sigmoid(-logit.double())
    for half, wide in zip(gate(logit), exact, strict=True):
        torch.testing.assert_close(half.double(), wide, rtol=1e-6, atol=0)
        (slope,) = torch.autograd.grad(half.sum(), logit, retain_graph=True)
        torch.testing.assert_close(slope.double().abs(), exact[0] * exact[1], rtol=1e-6, atol=0)
