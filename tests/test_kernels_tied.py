"""`Tied`: one matrix for input and recurrence, one product a step. T time, B batch, d width.

The launch itself needs a GPU: `elman verify e42_tied_silu`, test_kernels_dense_gpu.py and test_kernels_sanitized.py. Here: what
runs where there is none, what the operator makes of what the launch returns, and which problems it is verified on.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from elman_core.kernels import dispatch
from elman_core.kernels.dense import native
from elman_core.kernels.dense.plan import Plan
from elman_core.kernels.runtime import check
from elman_core.registry.errors import ConfigError, KernelError

elman_e42 = pytest.importorskip("elman_e42")
from elman_e42.op import e42 as dense  # noqa: E402
from elman_e42.reference import e42_reference  # noqa: E402

tied = dense._tied


def whole(x, w, b, h0, mask_TB=None):
    """The kernel's call, with the projection."""
    return dense(x, w, h0, mask_TB, v=w, b=b, silu=True)


T, B, D = 6, 3, 8


def problem(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """x, W, b, h_0 as leaves."""
    g = torch.Generator().manual_seed(0)
    shapes = ((T, B, D), (D, D), (D,), (B, D))
    drawn = [torch.randn(s, generator=g, dtype=torch.float64) / (s[0] ** 0.5 if s == (D, D) else 1) for s in shapes]
    return [x.to(dtype).requires_grad_() for x in drawn]


def mask() -> torch.Tensor:
    return torch.arange(T)[:, None] >= torch.tensor([0, 2, 4])


def results(call, inputs, mask_TB):
    y, last = call(*inputs, mask_TB)
    visible = y if mask_TB is None else y[mask_TB]
    return y, last, *torch.autograd.grad(visible.square().sum() + last.sin().sum(), inputs)


def by_the_reference(x, w, b, h0, mask_TB=None):
    return e42_reference(F.linear(F.silu(x), w, b), w, h0, mask_TB)


@pytest.mark.parametrize("masked", [False, True])
def test_without_a_gpu_it_is_the_product_and_the_kernel(masked):
    mask_TB = mask() if masked else None
    found, expected = (results(call, problem(), mask_TB) for call in (whole, by_the_reference))
    seen = (slice(None) if mask_TB is None else mask_TB,)
    torch.testing.assert_close(found[0][seen], expected[0][seen])
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine, theirs)
    assert dense.backend("cpu", D) == "torch, or cpu where that pays"


def test_a_bias_in_float32_beside_weights_of_16_bits():
    x, w, b, h0 = (t.detach() for t in problem(torch.float32))
    y, _ = whole(x.bfloat16(), w.bfloat16(), b, h0)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), by_the_reference(x, w, b, h0)[0], rtol=0.05, atol=0.1)


@pytest.fixture
def launched(monkeypatch):
    """The operator, its two launches in plain PyTorch: states, sums and products as the kernel gives them."""

    def forward(x, w, b, h0, mask_TB):
        h, states, sums = h0, [h0], []
        for t in range(len(x)):
            sums.append(h + F.silu(x[t]))
            a = sums[t] @ w.T + b
            h = a if mask_TB is None else torch.where(mask_TB[t, :, None], a, h)
            states.append(h)
        y = torch.stack(states[1:])
        y = y * F.silu(y) if mask_TB is None else torch.where(mask_TB[..., None], y * F.silu(y), 0.0)
        return {"y": y, "last": h, "history": torch.stack(states), "sums": torch.stack([*sums, h])}

    def backward(gy, g_last, x, w, history, mask_TB):
        gh, das, dxs = g_last, [], []
        for t in reversed(range(len(gy))):
            h, live = history[t + 1], True if mask_TB is None else mask_TB[t, :, None]
            s = torch.sigmoid(h)
            da = torch.where(torch.as_tensor(live), gy[t] * (2 * h * s + h * h * s * (1 - s)) + gh, 0.0)
            das.append(da)
            dxs.append(da @ w)
            gh = torch.where(torch.as_tensor(live), dxs[-1], gh + dxs[-1])
        da, p = torch.stack(das[::-1]), torch.sigmoid(x)
        dx = torch.stack(dxs[::-1]) * (p + x * p * (1 - p))
        return {"da": da, "dh0": gh, "dx": dx, "db": da.sum((0, 1))}

    def run(_cell, function, given, values):
        assert "a" not in given
        names = ("x", "w", "b", "h0") if function == "forward" else ("gy", "g_last", "x", "w", "history")
        made = {"forward": forward, "backward": backward}[function](*(given[n] for n in names), values["mask"])
        for name, x in made.items():
            given[name].copy_(x)

    monkeypatch.setattr(tied.operator, "_run", run)
    return lambda x, w, b, h0, mask_TB: tied.op(x, w, b, h0, mask_TB, None, "cuda")[:2]


@pytest.mark.parametrize("masked", [False, True])
def test_what_the_launches_return_makes_every_gradient(launched, masked):
    mask_TB = mask() if masked else None
    found, expected = (results(call, problem(), mask_TB) for call in (launched, by_the_reference))
    assert len(found) == 6
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine, theirs)
    if masked:
        assert not found[2][~mask_TB].any()  # nothing flows back into x where the state is held


def test_what_stands_in_front_of_the_recurrence_is_a_product_a_bias_and_silu_each_where_given():
    x, w, b, h0 = problem()
    torch.testing.assert_close(dense(x, w, h0, v=w, b=b), e42_reference(F.linear(x, w, b), w, h0))
    torch.testing.assert_close(dense(x, w, h0, v=w, silu=True), e42_reference(F.linear(F.silu(x), w), w, h0))
    torch.testing.assert_close(dense(x, w, h0, b=b, silu=True), e42_reference(F.silu(x) + b, w, h0))


def test_unasked_gradients_are_not_made_and_missing_ones_are_zeros(launched):
    x, w, b, h0 = problem()
    y, last = launched(x, w.detach(), b.detach(), h0.detach(), None)
    [alone] = torch.autograd.grad(last.sum(), [x], retain_graph=True)
    [expected] = torch.autograd.grad(by_the_reference(x, w, b, h0)[1].sum(), [x])
    torch.testing.assert_close(alone, expected)
    assert y.requires_grad
    with pytest.raises(NotImplementedError, match=r"e42_tied_silu has no second derivative"):
        torch.autograd.grad(y.sum(), [x], create_graph=True)


def test_shapes_are_known_without_running_it():
    x, w, b, h0 = (t.detach().to("meta", torch.bfloat16) for t in problem())
    y, last, history, a, sums = tied.op(x, w, b, h0.float(), None, None, "cuda")
    assert (y.shape, y.dtype) == ((T, B, D), torch.bfloat16)
    assert (last.shape, last.dtype) == ((B, D), torch.float32)
    assert history.shape == sums.shape == (T + 1, B, D)
    assert a.shape == (0, B, D)


def test_what_cannot_be_tied_is_refused():
    x, w, b, h0 = (t.detach() for t in problem())
    with pytest.raises(KernelError, match=r"e42_tied_silu: only a GPU's persistent launch has tied weights"):
        tied.op(x, w, b, h0, None, None, "host")


def test_a_bias_of_another_size_is_refused():
    x, w, b, h0 = (t.detach() for t in problem())
    with pytest.raises(ConfigError, match=r"e42_tied_silu: b must be \(8\) .* not \(4,\)"):
        check(tied.name, dense._wanted, (x, w, b[:4], h0, None, None))


def test_a_launch_that_was_named_is_refused_under_torch_func():
    class OnAGPU:
        is_cuda, dtype, shape, device = True, torch.bfloat16, torch.Size((1, 2, 8)), torch.device("cuda", 0)

        def dim(self):
            return 3

    def loss(w):
        dense._is_tied(tied, OnAGPU(), "cuda")
        return w.sum()

    with pytest.raises(NotImplementedError, match=r"e42_tied_silu: torch\.func .* backend='auto' or 'reference'"):
        torch.func.grad(loss)(torch.zeros(2))


def test_auto_is_a_launch_where_there_is_a_plan_and_verifies_it_first(monkeypatch):
    verified, plans = [], {8: Plan("grid", rows=8, groups=1, parts=1), 9: Plan("steps")}
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(native, "plan_for", lambda _cell, _rows, width, *_: plans[width])
    monkeypatch.setattr(native, "ready", lambda *_: None)
    monkeypatch.setattr(dispatch, "ensure_verified", lambda *given: verified.append(given))
    assert dispatch._prepare(tied, 0, torch.bfloat16, (3, 8))
    assert [(spec.name, str(case), plan) for spec, [case], plan in verified] == [
        ("e42_tied_silu", "T=64 B=3 d=8 bfloat16", str(plans[8]))
    ]
    assert not dispatch._prepare(tied, 0, torch.bfloat16, (3, 9))
    assert len(verified) == 1
