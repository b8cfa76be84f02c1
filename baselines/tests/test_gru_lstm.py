"""GRU and LSTM against their equations in NumPy, and the fused recurrences against the references; in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from elman_authors.testing import VariantContract, initial, sigmoid
from elman_baselines.rnn import gru, gru_reference, lstm, lstm_reference
from elman_baselines.rnn.mixer import GRUConfig, GRUMixer, LSTMConfig, LSTMMixer
from elman_baselines.rnn.op import packed_for_cudnn

from elman_core import ConfigError

T, B, W, D = 7, 4, 5, 4
Step = Callable[..., tuple[np.ndarray, ...]]


class TestGRU(VariantContract):
    variant = "gru"
    options = (
        {},
        {"reset_after": False, "expansion": 1.5, "init": "normal"},
        {"in_proj": False, "zero_out_proj": True},
        {"in_proj": False, "out_proj": False},
    )

    def initial_values(self, o: Any) -> dict[str, Any]:
        normal, bias = o["init"] == "normal", o.get("forget_bias", 0.0)
        gates = 4 if "forget_bias" in o else 3
        apart = lambda w: w.unflatten(-2, (gates, -1))  # noqa: E731
        maps = dict.fromkeys(("in_proj.weight", "out_proj.weight"), initial.NORMAL if normal else initial.xavier)
        maps["out_proj.weight"] = 0.0 if o["zero_out_proj"] else maps["out_proj.weight"]
        return maps | {
            "weight_ih": (apart, initial.NORMAL if normal else initial.xavier),
            "weight_hh": (apart, initial.orthogonal(1.0)),
            "bias_ih": (lambda b: b.unflatten(-1, (gates, -1)), torch.tensor([[0.0], [bias], [0.0], [0.0]][:gates])),
            "bias_hh": 0.0,
        }


class TestLSTM(TestGRU):
    variant = "lstm"
    options = (
        {},
        {"expansion": 1.5, "init": "normal", "forget_bias": 0.5},
        {"in_proj": False, "zero_out_proj": True},
        {"in_proj": False, "out_proj": False},
    )


MIXERS: dict[str, Any] = {"gru": (GRUMixer, GRUConfig), "lstm": (LSTMMixer, LSTMConfig)}


@pytest.mark.parametrize(("variant", "plain"), [("gru", torch.nn.GRU), ("lstm", torch.nn.LSTM)])
def test_without_its_maps_the_mixer_is_torchs_own_layer(variant: str, plain: type[torch.nn.RNNBase]) -> None:
    kind, config = MIXERS[variant]
    mixer = kind(W, config(in_proj=False, out_proj=False)).double()
    layer = plain(W, W, batch_first=True, dtype=torch.float64)
    layer.load_state_dict({f"{name}_l0": value for name, value in mixer.state_dict().items()})
    x = draw(B, T, W, seed=1)
    torch.testing.assert_close(mixer(x)[0], layer(x)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{"expansion": 2.0}, {"zero_out_proj": True}])
def test_a_mixer_without_an_output_map_is_as_wide_as_the_model(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="out_proj=false needs"):
        LSTMMixer(W, LSTMConfig(out_proj=False, **options))


def gru_step(x: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, h: np.ndarray) -> tuple[np.ndarray, ...]:
    r_in, z_in, n_in = np.split(w_ih @ x + b_ih, 3)
    r_back, z_back, n_back = np.split(w_hh @ h + b_hh, 3)
    r, z = sigmoid(r_in + r_back), sigmoid(z_in + z_back)
    return ((1 - z) * np.tanh(n_in + r * n_back) + z * h,)


def gru_step_reset_before(x: Any, w_ih: Any, w_hh: Any, b_ih: Any, h: np.ndarray) -> tuple[np.ndarray, ...]:
    (r_in, z_in, n_in), (w_r, w_z, w_n) = np.split(w_ih @ x + b_ih, 3), np.split(w_hh, 3)
    r, z = sigmoid(r_in + w_r @ h), sigmoid(z_in + w_z @ h)
    return ((1 - z) * np.tanh(n_in + w_n @ (r * h)) + z * h,)


def lstm_step(x: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, h: Any, c: Any) -> tuple[np.ndarray, ...]:
    i, f, g, o = np.split(w_ih @ x + b_ih + w_hh @ h + b_hh, 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


KINDS: dict[str, tuple[Any, Any, Step, int, int, int]] = {
    "gru": (gru, gru_reference, gru_step, 3, 4, 1),
    "gru, reset before": (gru, gru_reference, gru_step_reset_before, 3, 3, 1),
    "lstm": (lstm, lstm_reference, lstm_step, 4, 4, 2),
}
"""Fused recurrence, reference, one step in NumPy; numbers of gates, weights and states."""


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(gates: int, weights: int, states: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """x, weights and states."""
    shapes = ((gates * D, W), (gates * D, D), (gates * D,), (gates * D,))
    given = [draw(*shape, seed=i) for i, shape in enumerate(shapes[:weights])]
    return draw(T, B, W, seed=6), given, [draw(B, D, seed=7 + i) for i in range(states)]


def flags(masked: bool, packed: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Mask and starts: a row that is whole, one with holes, one of which nothing counts, and one without its last document."""
    mask, starts = (
        torch.tensor([[c == "1" for c in row] for row in rows]).T
        for rows in (("1111111", "0110101", "0000000", "1111000"), ("0001010", "0101000", "0010000", "1000010"))
    )
    return mask if masked else None, starts if packed else None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_both_paths_follow_the_equations(kind: str, masked: bool, packed: bool) -> None:
    fused, reference, step, *sizes = KINDS[kind]
    x, weights, states = problem(*sizes)
    mask, starts = flags(masked, packed)
    on = np.ones((T, B), bool) if mask is None else mask.numpy()
    y_expected, end_expected = np.zeros((T, B, D)), [s.numpy().copy() for s in states]
    for t, b in np.ndindex(T, B):
        if starts is not None and starts[t, b]:
            for s in end_expected:
                s[b] = 0
        if on[t, b]:
            after = step(x[t, b].numpy(), *(w.numpy() for w in weights), *(s[b] for s in end_expected))
            for s, value in zip(end_expected, after, strict=True):
                s[b] = value
            y_expected[t, b] = after[0]
    for run in (fused, reference):
        y, *end = run(x, weights, *states, mask, starts)
        for actual, expected in ((y.numpy()[on], y_expected[on]), *zip(end, end_expected, strict=True)):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_fused_gradients_equal_the_references(kind: str, masked: bool, packed: bool) -> None:
    fused, reference, _, *sizes = KINDS[kind]
    x, weights, states = problem(*sizes)
    mask, starts = flags(masked, packed)
    tensors = [t.requires_grad_() for t in (x, *weights, *states)]
    grads = []
    for run in (fused, reference):
        y, *end = run(x, weights, *states, mask, starts)
        kept = [y if mask is None else y[mask], *end]
        grads.append(torch.autograd.grad(kept, tensors, [draw(*k.shape, seed=9) for k in kept]))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


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
