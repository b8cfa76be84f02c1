"""GRU and LSTM against loops over numbers, written from the equations, and against torch's own modules; in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from elman_baselines.rnn import gru, gru_reference, lstm, lstm_reference
from elman_baselines.rnn.op import packed_for_cudnn

T, B, W, D = 7, 3, 5, 4


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def affine(w: np.ndarray, x: np.ndarray, b: np.ndarray) -> list[float]:
    return [sum(w[i, j] * x[j] for j in range(w.shape[1])) + b[i] for i in range(w.shape[0])]


def gru_by_hand(
    x: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, h0: Any, mask: Any
) -> tuple[np.ndarray, np.ndarray]:
    y, h = np.zeros((T, B, D)), h0.copy()
    for t in range(T):
        for row in range(B):
            if mask[t, row]:
                a, old, new = affine(w_ih, x[t, row], b_ih), h[row], np.zeros(D)
                if b_hh is not None:
                    u = affine(w_hh, old, b_hh)
                    for i in range(D):
                        r, z = sigmoid(a[i] + u[i]), sigmoid(a[D + i] + u[D + i])
                        n = math.tanh(a[2 * D + i] + r * u[2 * D + i])
                        new[i] = (1 - z) * n + z * old[i]
                else:
                    u = affine(w_hh[: 2 * D], old, np.zeros(2 * D))
                    r = np.array([sigmoid(a[i] + u[i]) for i in range(D)])
                    c = affine(w_hh[2 * D :], r * old, np.zeros(D))
                    for i in range(D):
                        z = sigmoid(a[D + i] + u[D + i])
                        new[i] = (1 - z) * math.tanh(a[2 * D + i] + c[i]) + z * old[i]
                h[row] = new
            y[t, row] = h[row]
    return y, h


def lstm_by_hand(
    x: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, h0: Any, c0: Any, mask: Any
) -> tuple[Any, Any, Any]:
    y, h, c = np.zeros((T, B, D)), h0.copy(), c0.copy()
    for t in range(T):
        for row in range(B):
            if mask[t, row]:
                a, u = affine(w_ih, x[t, row], b_ih), affine(w_hh, h[row], b_hh)
                s = [p + q for p, q in zip(a, u, strict=True)]
                for i in range(D):
                    c[row, i] = sigmoid(s[D + i]) * c[row, i] + sigmoid(s[i]) * math.tanh(s[2 * D + i])
                    h[row, i] = sigmoid(s[3 * D + i]) * math.tanh(c[row, i])
            y[t, row] = h[row]
    return y, h, c


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(gates: int, both: bool = True) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    weights = [draw(gates * D, W, seed=1), draw(gates * D, D, seed=2), draw(gates * D, seed=3), draw(gates * D, seed=4)]
    mask = torch.rand(T, B, generator=torch.Generator().manual_seed(5)) < 0.7
    mask[:, 1] = True
    mask[:, 2] = False
    return draw(T, B, W, seed=6), tuple(weights[: 4 if both else 3]), draw(B, D, seed=7), mask


def close(actual: torch.Tensor, expected: Any) -> None:
    np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("both", [True, False], ids=["reset after", "reset before"])
@pytest.mark.parametrize("run", [gru, gru_reference])
def test_gru_follows_its_equations(run: Any, both: bool, masked: bool) -> None:
    x, weights, h0, mask = problem(3, both)
    mask = mask if masked else torch.ones_like(mask)
    arrays = [w.numpy() for w in weights] + ([] if both else [None])
    y, h = run(x, weights, h0, mask if masked else None)
    y_expected, h_expected = gru_by_hand(x.numpy(), *arrays, h0.numpy(), mask.numpy())
    close(y[mask], y_expected[mask.numpy()])
    close(h, h_expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("run", [lstm, lstm_reference])
def test_lstm_follows_its_equations(run: Any, masked: bool) -> None:
    x, weights, h0, mask = problem(4)
    mask, c0 = mask if masked else torch.ones_like(mask), draw(B, D, seed=8)
    y, h, c = run(x, weights, h0, c0, mask if masked else None)
    arrays = [w.numpy() for w in weights]
    y_expected, h_expected, c_expected = lstm_by_hand(x.numpy(), *arrays, h0.numpy(), c0.numpy(), mask.numpy())
    close(y[mask], y_expected[mask.numpy()])
    close(h, h_expected)
    close(c, c_expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("run", "reference", "gates"), [(gru, gru_reference, 3), (lstm, lstm_reference, 4)])
def test_fused_gradients_equal_the_references(run: Any, reference: Any, gates: int, masked: bool) -> None:
    x, weights, h0, mask = problem(gates)
    states = (h0,) if gates == 3 else (h0, draw(B, D, seed=8))
    tensors = [t.requires_grad_() for t in (x, *weights, *states)]
    grads = []
    for op in (run, reference):
        y, *end = op(x, weights, *states, mask if masked else None)
        kept = y[mask] if masked else y
        total = (kept * draw(*kept.shape, seed=9)).sum() + sum(
            (e * draw(B, D, seed=10 + i)).sum() for i, e in enumerate(end)
        )
        grads.append(torch.autograd.grad(total, tensors))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("op", "module", "gates"), [(gru, torch.nn.GRU, 3), (lstm, torch.nn.LSTM, 4)])
def test_parameters_are_torchs(op: Any, module: Any, gates: int) -> None:
    x, weights, h0, _ = problem(gates)
    theirs = module(W, D).double()
    for name, w in zip(("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"), weights, strict=True):
        getattr(theirs, name).data = w
    states = (h0,) if gates == 3 else (h0, draw(B, D, seed=8))
    with torch.no_grad():
        expected, _ = theirs(x, states[0][None] if gates == 3 else tuple(s[None] for s in states))
        close(op(x, weights, *states)[0], expected.numpy())


def test_weights_for_cudnn_are_one_block_in_its_order_with_their_gradients() -> None:
    """The layout of `torch.nn.GRU.flatten_parameters`: a test on a GPU holds that it is, by torch's own warning."""
    weights = [torch.randn(12, 5), torch.randn(12, 4), torch.randn(12), torch.randn(12)]
    leaves = [w.clone().requires_grad_() for w in weights]
    views = packed_for_cudnn(leaves)
    ends = [0, 60, 108, 120]
    assert [v.storage_offset() for v in views] == ends
    assert len({v.untyped_storage().data_ptr() for v in views}) == 1
    assert all(torch.equal(v, w) for v, w in zip(views, weights, strict=True))
    above = [torch.randn_like(w) for w in weights]
    assert all(torch.equal(g, a) for g, a in zip(torch.autograd.grad(views, leaves, above), above, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("error:RNN module weights")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cudnn_takes_them_without_a_copy_of_its_own(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 it errs as torch's own module does, beside a floor of 16 eps: cuDNN's float32 is no exact one."""
    torch.manual_seed(0)
    x = torch.randn(9, 4, 24, device="cuda", dtype=dtype, requires_grad=True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # torch allows it to cuDNN unless told otherwise
    kinds = ((gru, gru_reference, torch.nn.GRU, 3, 1), (lstm, lstm_reference, torch.nn.LSTM, 4, 2))
    for run, reference, module, gates, states in kinds:
        shapes = [(gates * 16, 24), (gates * 16, 16), (gates * 16,), (gates * 16,)]
        weights = [(torch.randn(s, device="cuda") / 4).requires_grad_() for s in shapes]
        begin = [torch.zeros(4, 16, device="cuda") for _ in range(states)]

        def with_gradients(y: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
            loss = y.to(torch.promote_types(y.dtype, torch.float32)).square().sum()
            return [y, *torch.autograd.grad(loss, leaves)]

        wide = [w.detach().double().requires_grad_() for w in weights]
        x64 = x.detach().double().requires_grad_()
        truth = with_gradients(reference(x64, wide, *(s.double() for s in begin))[0], x64, *wide)
        found = with_gradients(run(x, weights, *begin)[0], x, *weights)
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]
        limits = [16 * torch.finfo(dtype).eps] * len(errors)
        if dtype == torch.float32:
            own = module(24, 16, device="cuda")
            leaves = [getattr(own, f"{n}_l0") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            with torch.no_grad():
                for leaf, w in zip(leaves, weights, strict=True):
                    leaf.copy_(w)
            theirs = with_gradients(own(x)[0], x, *leaves)
            limits = [
                limit + 2 * float((a.double() - b).norm() / b.norm())
                for limit, a, b in zip(limits, theirs, truth, strict=True)
            ]
        assert all(e <= limit for e, limit in zip(errors, limits, strict=True)), (
            f"{run.__name__}: {errors} of y and the gradients of x and the weights, limits {limits}"
        )
