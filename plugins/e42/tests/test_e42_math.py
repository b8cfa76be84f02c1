"""E42 against an oracle written from the equations: forward and every gradient, float64, relative error at most 1e-9."""

import elman_e42.op
import numpy as np
import pytest
import torch
from elman_e42.mixer import E42Config, E42Mixer
from elman_e42.op import e42
from elman_e42.reference import e42_reference

from .oracle import Row, power_iteration

B, T, D = 3, 7, 10
LIMIT = 1e-9
OPTIONS = [
    {},
    {"r_h_mode": "none"},
    {"expansion": 1.5, "use_conv": True},
    {"expansion": 0.5, "use_conv": True, "d_conv": 2, "r_h_mode": "none"},
    {"use_conv": True, "d_conv": 9, "spectral_radius": 0.7},
    {"mamba2_init": True, "r_h_init_gain": 1.0},
    {"mamba2_init": "s4d", "use_conv": True, "r_h_mode": "none"},
    {"dropout": 0.4, "use_conv": True},
]
MASK_BT = torch.tensor([[c == "1" for c in row] for row in ("1111111", "0011111", "1011001")])


def relative(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.linalg.norm(expected) > 0
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def make(options, seed=0):
    """A float64 mixer with every parameter off its initial value."""
    torch.manual_seed(seed)
    mixer = E42Mixer(D, E42Config(**options)).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        if mixer.spectral is not None:
            mixer.spectral.start(mixer.w)
    return mixer


def random_state(mixer):
    spec = mixer.state_spec(D, mixer.config)
    return {n: torch.randn(B, *shape, dtype=torch.float64).mul_(0.7) for n, (shape, _) in spec.items()}


def oracle(mixer, x, state, mask, keep, g_out, g_end):
    p = {n: v.detach().numpy() for n, v in mixer.state_dict().items()}
    grads = {n: np.zeros_like(v.detach().numpy()) for n, v in mixer.named_parameters()}
    radius = mixer.config.spectral_radius if mixer.config.r_h_mode == "spectral_norm" else None
    out, dx = np.zeros((B, T, D)), np.zeros((B, T, D))
    end = {n: np.zeros(v.shape) for n, v in state.items()}
    start = {n: np.zeros(v.shape) for n, v in state.items()}
    for b in range(B):
        on = mask[b].numpy()
        window = state["conv"][b].numpy() if "conv" in state else None
        row = Row(p, radius, x[b].numpy()[on], state["h"][b].numpy(), window, keep[b][on])
        out[b, on] = row.out
        g_row = {n: g[b].numpy() for n, g in g_end.items()}
        dx[b, on], d_start = row.backward(grads, g_out[b].numpy()[on], g_row)
        for n in end:
            end[n][b], start[n][b] = row.end[n], d_start[n]
    return out, end, {**grads, "x": dx, **{f"start {n}": v for n, v in start.items()}}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("recurrence", [e42, e42_reference], ids=["op", "reference"])
def test_forward_and_every_gradient_equal_the_oracle(monkeypatch, recurrence, options, masked, training):
    monkeypatch.setattr(elman_e42.op, "e42", recurrence)
    mixer = make(options).train(training)
    mask = MASK_BT if masked else torch.ones(B, T, dtype=torch.bool)
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    state = {n: v.requires_grad_() for n, v in random_state(mixer).items()}
    keep = np.ones((B, T, mixer.inner))
    if training and mixer.config.dropout:  # what the dropout kept, as a factor
        mixer.dropout.register_forward_hook(lambda _m, i, o: keep.__setitem__(..., (o / i[0]).detach().transpose(0, 1)))
    y, end = mixer(x, state, mask if masked else None)
    assert training is False or not mixer.config.dropout or {0.0} < set(keep.flatten().round(6))
    g_out = torch.randn_like(y) * mask[..., None]
    g_end = {n: torch.randn_like(v) for n, v in end.items()}
    loss = (y * g_out).sum() + sum((end[n] * g_end[n]).sum() for n in end)
    names = [n for n, _ in mixer.named_parameters()]
    leaves = [*mixer.parameters(), x, *state.values()]
    grads = dict(zip([*names, "x", *(f"start {n}" for n in state)], torch.autograd.grad(loss, leaves), strict=True))

    with torch.no_grad():
        detached = {n: v.detach() for n, v in state.items()}
        expected, expected_end, expected_grads = oracle(mixer, x.detach(), detached, mask, keep, g_out, g_end)
    assert relative(y.detach()[mask], expected[mask.numpy()]) <= LIMIT
    for name in end:
        assert relative(end[name].detach(), expected_end[name]) <= LIMIT, name
    assert grads.keys() == expected_grads.keys()
    for name in grads:
        assert relative(grads[name], expected_grads[name]) <= LIMIT, name


def test_the_vectors_are_those_of_the_power_iteration():
    """15 iterations where the weight is first used; then 3 in training when the weight has moved, and none otherwise."""
    torch.manual_seed(0)
    mixer = E42Mixer(64, E42Config()).train()
    mixer(torch.randn(1, 2, 64))
    w, u = mixer.w.detach().double().numpy(), mixer.spectral.u.double().numpy()
    largest = np.linalg.norm(w, 2)
    again, _ = power_iteration(w, u, 1)
    assert abs(u @ w @ mixer.spectral.v.double().numpy()) > 0.95 * largest
    assert np.linalg.norm(again - u) < 0.2
    mixer = mixer.double().train()
    with torch.no_grad():
        mixer.w.add_(0.01 * torch.randn_like(mixer.w))
    before = mixer.spectral.u.clone()
    x = torch.randn(1, 2, 64, dtype=torch.float64)
    mixer(x)
    expected_u, expected_v = power_iteration(mixer.w.detach().numpy(), before.numpy(), 3)
    assert relative(mixer.spectral.u, expected_u) <= LIMIT
    assert relative(mixer.spectral.v, expected_v) <= LIMIT
    kept = mixer.spectral.u.clone()
    mixer(x)
    assert torch.equal(mixer.spectral.u, kept)
    with torch.no_grad():
        mixer.w.add_(0.01 * torch.randn_like(mixer.w))
    mixer.eval()(x)
    assert torch.equal(mixer.spectral.u, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reference_computes_16_bits_in_float32(dtype):
    torch.manual_seed(0)
    u, w, h0 = torch.randn(T, B, D).to(dtype), (torch.randn(D, D) / D).to(dtype), torch.randn(B, D)
    with torch.autocast("cpu", torch.bfloat16):
        y, h = e42_reference(u, w, h0)
    expected_y, expected_h = e42_reference(u.float(), w.float(), h0)
    assert y.dtype == dtype
    assert torch.equal(y, expected_y.to(dtype))
    assert h.dtype == torch.float32
    assert torch.equal(h, expected_h)
