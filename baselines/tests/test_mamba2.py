"""Mamba-2 against its equations in NumPy, its chunks against its steps, and the mixer against transformers'; with gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from elman_authors.testing import initial, silu
from elman_baselines.mamba2 import Mamba2, Mamba2Config, op, ssd_chunked, ssd_reference
from transformers import Mamba2Config as TheirConfig
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from elman_core.kernels.causal_conv.op import causal_conv
from elman_core.registry import ConfigError

from .library_contract import LibraryContract

# The functions of mamba_ssm, causal_conv1d and fla as they document them.


def begins(seq_idx):  # type: ignore[no-untyped-def]
    """Where the number of the document is another; what is before the row is of document 0."""
    return None if seq_idx is None else seq_idx != F.pad(seq_idx[:, :-1], (1, 0))


def scan_as_documented(x, dt, a, b, c, chunk_size, D, initial_states, return_final_states, seq_idx):  # type: ignore[no-untyped-def]
    assert return_final_states
    assert b.shape[2] == c.shape[2] == 1, "one group"
    return ssd_reference(x, dt, a, b[:, :, 0], c[:, :, 0], D, initial_states, begins(seq_idx))


def step_as_documented(state, x, dt, A, B, C, D, dt_bias, dt_softplus):  # type: ignore[no-untyped-def]
    assert dt_softplus
    assert not any((dt.stride(-1), dt_bias.stride(-1), A.stride(-1), A.stride(-2))), "a fast path of the kernel"
    dt, a = F.softplus(dt + dt_bias)[:, None, :, 0], A[:, 0, 0]
    y, end = ssd_reference(x[:, None], dt, a, B, C, D[:, 0], state.clone(), None)
    state.copy_(end)
    return y[:, 0]


def norm_as_documented(x, weight, bias, z, eps, norm_before_gate):  # type: ignore[no-untyped-def]
    assert bias is None
    assert not norm_before_gate
    return F.rms_norm(x * F.silu(z), weight.shape, weight, eps)


def conv_as_documented(x, weight, bias, activation):  # type: ignore[no-untyped-def]
    assert activation == "silu"
    return F.silu(F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=x.shape[1]))


def whole_as_documented(zxbcdt, weight, bias, dt_bias, a, D, chunk_size, activation, rmsnorm_weight, rmsnorm_eps, headdim,
                        ngroups, norm_before_gate, return_final_states, seq_idx):  # type: ignore[no-untyped-def]  # fmt: skip
    heads = len(D)
    inner, n = heads * headdim, (len(weight) - heads * headdim) // 2
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * n, heads], -1)
    mixed = F.silu(
        causal_conv(xbc.transpose(0, 1), weight, bias, None, None, None if seq_idx is None else begins(seq_idx).T)[0]
    )
    x, b, c = mixed.transpose(0, 1).split([inner, n, n], -1)
    x, dt = x.unflatten(-1, (heads, headdim)), F.softplus(dt + dt_bias)
    y, end = scan_as_documented(
        x, dt, a, b[:, :, None], c[:, :, None], chunk_size, D, None, return_final_states, seq_idx
    )
    return norm_as_documented(y.flatten(2), rmsnorm_weight, None, z, rmsnorm_eps, norm_before_gate), end


def fla_conv_as_documented(x, weight, bias, activation):  # type: ignore[no-untyped-def]
    return conv_as_documented(x.mT, weight, bias, activation).mT, None


def by_hand(
    config: Mamba2Config, p: dict[str, np.ndarray], u: np.ndarray, conv: np.ndarray, ssm: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row of real positions, head by head: outputs, last window, last state."""
    (heads, wide, n), keep = ssm.shape, config.d_conv - 1
    inner, window, h, out = heads * wide, [*conv], ssm.copy(), np.zeros_like(u)
    for t in range(len(u)):
        z, xbc, dt = np.split(p["in_proj.weight"] @ u[t], [inner, 2 * inner + 2 * n])
        window.append(xbc)
        mixed = p["conv1d.bias"] + sum(p["conv1d.weight"][:, 0, j] * window[j - keep - 1] for j in range(keep + 1))
        x, b, c = np.split(silu(mixed), [inner, inner + n])
        y = np.zeros(inner)
        for i in range(heads):
            part = slice(i * wide, (i + 1) * wide)
            delta = np.log1p(np.exp(dt[i] + p["dt_bias"][i]))
            h[i] = np.exp(-np.exp(p["A_log"][i]) * delta) * h[i] + delta * np.outer(x[part], b)
            y[part] = h[i] @ c + p["D"][i] * x[part]
        gated = y * silu(z)
        out[t] = p["out_proj.weight"] @ (gated / np.sqrt(np.mean(gated**2) + 1e-5) * p["norm.weight"])
    return out, np.array(window[-keep:]), h


class TestMamba2(LibraryContract):
    variant = "mamba2"
    options = (
        {"headdim": 8, "d_state": 6},
        {"headdim": 4, "d_state": 3, "d_conv": 2, "expand": 1.5, "init_depth": 3},
    )
    op, library, extra = op, "mamba_ssm", "mamba"
    by_hand, states = staticmethod(by_hand), ("conv", "ssm")

    def initial_values(self, o: Any) -> dict[str, Any]:
        a = o["d_conv"] ** -0.5
        conv = {n: initial.Uniform(-a, a) for n in ("conv1d.weight", "conv1d.bias")}
        out = (lambda w: w * math.sqrt(o["init_depth"] or 1), initial.linear)
        maps = {"in_proj.weight": initial.linear, "out_proj.weight": out}
        return conv | maps | initial.decays(1.0) | {"D": 1.0, "norm.weight": 1.0}

    ways = (
        op.Kernels(scan_as_documented, norm_as_documented, step_as_documented),
        op.Kernels(scan_as_documented, norm_as_documented, step_as_documented, conv=fla_conv_as_documented),
        op.Kernels(scan_as_documented, norm_as_documented, step_as_documented, whole=whole_as_documented),
    )

    @pytest.mark.parametrize("steps", [5, 70])
    def test_the_mixer_is_transformers_mamba2(self, steps: int) -> None:
        """transformers computes in float32 whatever it is given: equal to that precision, outputs and every gradient."""
        ours = self.make({"d_state": 16, "headdim": 8}, dtype=torch.float32)
        theirs = Mamba2Mixer(
            TheirConfig(
                hidden_size=16, num_heads=4, head_dim=8, state_size=16, n_groups=1, conv_kernel=4, expand=2, chunk_size=16,
                use_bias=False, use_conv_bias=True, layer_norm_epsilon=1e-5, num_hidden_layers=1, vocab_size=8,
            ),
            layer_idx=0,
        ).eval()  # fmt: skip
        theirs.load_state_dict(ours.state_dict())  # the same names, the same shapes
        x, weight = self.input(steps, dtype=torch.float32), self.input(steps, dtype=torch.float32, seed=3)
        results = []
        for module, inputs in ((ours, x.clone().requires_grad_()), (theirs, x.clone().requires_grad_())):
            y = module(inputs)
            y = y[0] if isinstance(y, tuple) else y
            (y * weight).sum().backward()
            results.append({"y": y.detach(), "x": inputs.grad} | {n: p.grad for n, p in module.named_parameters()})
        for name, expected in results[1].items():
            error = float((results[0][name] - expected).norm() / expected.norm())
            assert error < 2e-5, f"{name}: {error:.1e}"

    def test_a_width_without_whole_heads_is_refused(self) -> None:
        variant = self.declared()
        with pytest.raises(ConfigError, match=r"= 200, which must be a multiple of headdim 64; nearest: 192"):
            variant.check(100, variant.make_config())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunks_equal_steps_with_every_gradient(chunk: int, begin: bool, packed: bool) -> None:
    draw = torch.Generator().manual_seed(1)

    def leaf(*shape: int, positive: bool = False) -> torch.Tensor:
        value = torch.randn(shape, generator=draw, dtype=torch.float64)
        return (value.exp() if positive else value).requires_grad_()

    inputs = [leaf(2, 11, 3, 4), leaf(2, 11, 3, positive=True), leaf(3), leaf(2, 11, 5), leaf(2, 11, 5), leaf(3)]
    inputs[2] = (-inputs[2].detach().exp()).requires_grad_()
    state = leaf(2, 3, 4, 5) if begin else None
    starts = torch.tensor([[t in (3, 4, 8) for t in range(11)], [t in (0, 6) for t in range(11)]]) if packed else None
    leaves = inputs + ([state] if state is not None else [])
    g_y, g_end = leaf(2, 11, 3, 4).detach(), leaf(2, 3, 4, 5).detach()
    results = []
    for y, end in (ssd_reference(*inputs, state, starts), ssd_chunked(*inputs, state, starts, chunk=chunk)):
        grads = torch.autograd.grad((y * g_y).sum() + (end * g_end).sum(), leaves)
        results.append([y, end, *grads])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_extreme_decays_stay_finite() -> None:
    """A step so long that the state is forgotten at once: differences of large sums must not become 0 times infinity."""
    x, b = torch.randn(1, 130, 1, 2, requires_grad=True), torch.randn(1, 130, 3)
    dt = torch.full((1, 130, 1), 40.0, requires_grad=True)
    y, end = ssd_chunked(x, dt, torch.tensor([-16.0]), b, b, torch.ones(1), None)
    (y.sum() + end.sum()).backward()
    expected, _ = ssd_reference(x, dt, torch.tensor([-16.0]), b, b, torch.ones(1), None)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-3)
    for grad in (x.grad, dt.grad):
        assert grad is not None
        assert torch.isfinite(grad).all()


def test_the_start_is_mamba_ssms() -> None:
    torch.manual_seed(0)
    mixer = Mamba2(256, Mamba2Config(headdim=1, init_depth=16))
    a, dt = mixer.A_log.detach().exp(), torch.nn.functional.softplus(mixer.dt_bias.detach())
    assert 1 <= a.min() < 1.5
    assert 15.5 < a.max() <= 16
    assert dt.min() * 1.001 >= 1e-3
    assert dt.max() <= 0.1001
    assert float(mixer.out_proj.weight.detach().abs().max()) == pytest.approx(512**-0.5 / 4, rel=1e-3)
    assert float(mixer.in_proj.weight.detach().abs().max()) == pytest.approx(256**-0.5, rel=1e-3)
    assert mixer.D.unique().tolist() == mixer.norm.weight.unique().tolist() == [1.0]
