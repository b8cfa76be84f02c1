"""E88 against an oracle written from the equations: forward and every gradient, float64, relative error at most 1e-9."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from elman_e88.config import E88Config
from elman_e88.mixer import E88Mixer
from elman_e88.reference import e88_reference

from .oracle import Row

B, T, D = 3, 7, 6
LIMIT = 1e-9
SMALL = {"n_heads": 3, "n_state": 4}
PLAIN = {**SMALL, "use_gate": False, "use_output_norm": False}
CHOICES = {
    "expansion": (1.0, 2.0),
    "n_state": (4, 8),
    "n_heads": (1, 3),
    "use_conv": (False, True),
    "use_gate": (False, True),
    "gate_activation": ("sigmoid", "silu"),
    "use_silu": (False, True),
    "l2_norm": (False, True),
    "decay": ("mamba", "simple", "constant", "none"),
    "use_write_gate": (False, True),
    "value_residual": (False, True),
    "tie_kv": (False, True),
    "linear_state": (False, True),
    "use_output_norm": (False, True),
    "head_mix": ("concat", "weighted_sum", "per_head", "input_weighted", "sum"),
}
ONE_AT_A_TIME = [{**PLAIN, name: value} for name, values in CHOICES.items() for value in values]


def pairs(options):
    return {(a, options[a], b, options[b]) for a in CHOICES for b in CHOICES if a < b}


def combinations():
    """Random ones, the same every time, until every pair of choices that can be built has occurred."""
    draw, found, seen = random.Random(0), [], set()
    wanted = {(a, x, b, y) for a in CHOICES for b in CHOICES if a < b for x in CHOICES[a] for y in CHOICES[b]}
    wanted.remove(("expansion", 2.0, "tie_kv", True))
    while wanted - seen:
        tries = [{name: draw.choice(values) for name, values in CHOICES.items()} for _ in range(50)]
        tries = [o for o in tries if not (o["tie_kv"] and o["expansion"] != 1.0)]
        found.append(max(tries, key=lambda o: len(pairs(o) - seen)))
        seen |= pairs(found[-1])
    return found


MASK_BT = torch.tensor([[c == "1" for c in row] for row in ("1111111", "0011111", "1011001")])


def relative(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def make(options, seed=0):
    """A float64 mixer with every parameter off its initial value."""
    torch.manual_seed(seed)
    mixer = E88Mixer(D, E88Config(**options)).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer


def oracle(mixer, x, state, mask, g_out, g_end):
    p = {n: v.detach().numpy() for n, v in mixer.named_parameters()}
    grads = {n: np.zeros_like(v) for n, v in p.items()}
    options = dataclasses.asdict(mixer.config)
    out, dx = np.zeros((B, T, D)), np.zeros((B, T, D))
    end, start = ({n: np.zeros(v.shape) for n, v in state.items()} for _ in range(2))
    for b in range(B):
        on = mask[b].numpy()
        row = Row(p, options, x[b].numpy()[on], {n: v[b].numpy() for n, v in state.items()})
        out[b, on] = row.out
        dx[b, on], d_start = row.backward(grads, g_out[b].numpy()[on], {n: g[b].numpy() for n, g in g_end.items()})
        for n in end:
            end[n][b], start[n][b] = row.end[n], d_start[n]
    return out, end, {**grads, "x": dx, **{f"start {n}": v for n, v in start.items()}}


@pytest.mark.parametrize("options", ONE_AT_A_TIME + combinations(), ids=str)
def test_forward_and_every_gradient_equal_the_oracle(options):
    mixer = make(options)
    for mask in (torch.ones(B, T, dtype=torch.bool), MASK_BT):
        x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
        spec = mixer.state_spec(D, mixer.config)
        state = {n: (0.7 * torch.randn(B, *s, dtype=torch.float64)).requires_grad_() for n, (s, _) in spec.items()}
        y, end = mixer(x, state, None if mask.all() else mask)
        g_out = torch.randn_like(y) * mask[..., None]
        g_end = {n: torch.randn_like(v) for n, v in end.items()}
        loss = (y * g_out).sum() + sum((end[n] * g_end[n]).sum() for n in end)
        names = [*(n for n, _ in mixer.named_parameters()), "x", *(f"start {n}" for n in state)]
        leaves = [*mixer.parameters(), x, *state.values()]
        grads = dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))

        detached = {n: v.detach() for n, v in state.items()}
        expected, expected_end, expected_grads = oracle(mixer, x.detach(), detached, mask, g_out, g_end)
        assert relative(y.detach()[mask], expected[mask.numpy()]) <= LIMIT
        for name in end:
            assert relative(end[name].detach(), expected_end[name]) <= LIMIT, name
        assert grads.keys() == expected_grads.keys()
        for name in grads:
            size = np.linalg.norm(expected_grads[name])
            if name.startswith("head_") and options["n_heads"] == 1:  # the softmax of one number: 0 up to rounding
                assert np.linalg.norm(grads[name]) < 1e-12 > size
            else:
                assert size > 0
                assert np.linalg.norm(grads[name].numpy() - expected_grads[name]) <= LIMIT * size, name


def test_the_state_of_the_linear_cell_is_not_that_of_the_tanh_cell():
    tanh, linear = make(PLAIN), make({**PLAIN, "linear_state": True})
    x = torch.randn(B, T, D, dtype=torch.float64)
    assert relative(linear(x)[1]["S"].detach(), tanh(x)[1]["S"].detach()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reference_computes_16_bits_in_float32(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, 2, 4).to(dtype) / 2 for _ in range(3))
    decay = torch.rand(B, T, 2)
    with torch.autocast("cpu", torch.bfloat16):
        o, s = e88_reference(q, k, v, decay)
    expected_o, expected_s = e88_reference(q.float(), k.float(), v.float(), decay)
    assert o.dtype == dtype
    assert torch.equal(o, expected_o.to(dtype))
    assert s.dtype == torch.float32
    assert torch.equal(s, expected_s)
