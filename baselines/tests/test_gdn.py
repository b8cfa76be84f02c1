"""Gated DeltaNet against its equations in NumPy, its chunks against its steps and transformers' functions; with gradients."""

from __future__ import annotations

import itertools
import types
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from elman_authors.testing import initial, sigmoid, silu
from elman_baselines.gdn import GatedDeltaNet, GDNConfig, delta_rule_chunked, delta_rule_reference, op
from elman_baselines.library import Library
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from elman_core.nn import causal_conv, l2_normalize
from elman_core.registry import ConfigError, KernelError

from .library_contract import LibraryContract

H, K, V = 2, 4, 6

# fla's functions as it documents them.


def rule_as_documented(
    q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, A_log=None, dt_bias=None,
):  # type: ignore[no-untyped-def]  # fmt: skip
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    if use_gate_in_kernel:
        g = -A_log.exp() * F.softplus(g + dt_bias)
    beta = beta.sigmoid() if use_beta_sigmoid_in_kernel else beta
    return delta_rule_reference(l2_normalize(q, 1e-6), l2_normalize(k, 1e-6), v, g, beta, initial_state)


def norm_as_documented(x, g, weight, bias, activation, eps):  # type: ignore[no-untyped-def]
    assert bias is None
    assert activation == "swish"
    return F.rms_norm(x, weight.shape, weight, eps) * F.silu(g)


def by_hand(
    config: Any, p: dict[str, np.ndarray], x: np.ndarray, conv: np.ndarray, s: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row of real positions, head by head: outputs, last window, last state."""
    (heads, wide, values), keep, most = s.shape, len(conv), 2.0 if config.allow_neg_eigval else 1.0
    window, s, out = [*conv], s.copy(), np.zeros_like(x)
    taps = np.concatenate([p[f"{n}_conv1d.weight"][:, 0] for n in "qkv"])
    for t in range(len(x)):
        window.append(np.concatenate([p[f"{n}_proj.weight"] @ x[t] for n in "qkv"]))
        mixed = silu(sum(taps[:, j] * window[j - keep - 1] for j in range(keep + 1)))
        q, k, v = np.split(mixed, [heads * wide, 2 * heads * wide])
        gate, y = silu(p["g_proj.weight"] @ x[t]), np.zeros(heads * values)
        for h in range(heads):
            qh, kh = (a[h * wide : (h + 1) * wide] for a in (q, k))
            qh, kh = (a / np.sqrt(a @ a + 1e-6) for a in (qh, kh))
            part = slice(h * values, (h + 1) * values)
            softplus = np.log1p(np.exp(p["a_proj.weight"][h] @ x[t] + p["dt_bias"][h]))
            s[h] *= np.exp(-np.exp(p["A_log"][h]) * softplus)
            s[h] += most * sigmoid(p["b_proj.weight"][h] @ x[t]) * np.outer(kh, v[part] - s[h].T @ kh)
            o = s[h].T @ qh / np.sqrt(wide)
            y[part] = o / np.sqrt(np.mean(o**2) + 1e-5) * p["o_norm.weight"] * gate[part]
        out[t] = p["o_proj.weight"] @ y
    return out, np.array(window[-keep:]), s


class TestGatedDeltaNet(LibraryContract):
    variant = "gdn"
    options = (
        {"head_dim": 8},
        {"head_dim": 8, "n_heads": 3, "expand_v": 0.5, "d_conv": 2, "init": "linear", "allow_neg_eigval": True},
    )
    equations = ({"head_dim": 8, "init": "zero"},)
    op, library, extra = op, "fla", "fla"
    by_hand, states = staticmethod(by_hand), ("conv", "S")
    ways = (op.Kernels(rule_as_documented, rule_as_documented, norm_as_documented),)

    def initial_values(self, o: Any) -> dict[str, Any]:
        drawn = initial.linear if o["init"] == "linear" else initial.NORMAL
        maps = {f"{n}_proj.weight": drawn for n in "qkvgabo"} | {f"{n}_conv1d.weight": drawn for n in "qkv"}
        return (
            maps | ({"o_proj.weight": 0.0} if o["init"] == "zero" else {}) | initial.decays() | {"o_norm.weight": 1.0}
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"head_dim": 128}, "width 100 is not a multiple of head_dim 128: set n_heads; nearest width: 128"),
            ({"head_dim": 5, "expand_v": 1.5, "n_heads": 2}, "not a whole width; nearest: expand_v 1.6"),
        ],
    )
    def test_sizes_that_cannot_be_built_are_refused(self, options: dict[str, Any], message: str) -> None:
        variant = self.declared()
        with pytest.raises(ConfigError, match=message):
            variant.check(100, variant.make_config(options))


def problem(steps: int, dtype: torch.dtype, begin: bool = True) -> list[torch.Tensor]:
    """q, k (not normalised), v, log of the decay, beta, and a first state: leaves."""
    draw = torch.Generator().manual_seed(1)
    q, k, v, log, beta, s = (
        torch.randn(shape, generator=draw, dtype=dtype)
        for shape in ((2, steps, H, K), (2, steps, H, K), (2, steps, H, V), (2, steps, H), (2, steps, H), (2, H, K, V))
    )
    return [x.requires_grad_() for x in (q, k, v, -log.exp(), beta.sigmoid(), *([s] if begin else []))]


def gradients(outputs: tuple[torch.Tensor, torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    total = sum((o * torch.randn(o.shape, generator=draw, dtype=o.dtype)).sum() for o in outputs)
    return [*outputs, *torch.autograd.grad(total, leaves)]  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunks_equal_steps_with_every_gradient(chunk: int, begin: bool, packed: bool) -> None:
    leaves = problem(11, torch.float64, begin)
    q, k, *rest = leaves
    start = rest.pop() if begin else None
    starts = torch.tensor([[t in (3, 4, 8) for t in range(11)], [t in (0, 6) for t in range(11)]]) if packed else None
    expected, found = (
        gradients(rule(l2_normalize(q), l2_normalize(k), *rest, start, starts, **options), leaves)
        for rule, options in ((delta_rule_reference, {}), (delta_rule_chunked, {"chunk": chunk}))
    )
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("theirs", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_the_rule_is_transformers(theirs: Any, begin: bool) -> None:
    """Qwen3-Next's functions, which compute in float32: equal to that precision, outputs and every gradient."""
    leaves = problem(70, torch.float32, begin)
    q, k, v, log, beta, *rest = leaves
    start = rest[0] if begin else None
    ours = delta_rule_chunked(l2_normalize(q, 1e-6), l2_normalize(k, 1e-6), v, log, beta, start)
    other = theirs(
        q, k, v, g=log, beta=beta, initial_state=start, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    for actual, wanted in zip(gradients(ours, leaves), gradients(other, leaves), strict=True):
        error = float(((actual - wanted).norm() / wanted.norm()).detach())
        assert error < 1e-5, error


def test_with_init_zero_a_layer_starts_as_the_identity() -> None:
    mixer = GatedDeltaNet(16, GDNConfig(head_dim=8, init="zero"))
    assert not mixer.o_proj.weight.any()
    assert mixer.q_proj.weight.std() > 0


def test_extreme_decays_stay_finite() -> None:
    q, k, v, _, beta = problem(130, torch.float32, begin=False)
    log = torch.full((2, 130, H), -600.0, requires_grad=True)
    leaves = [q, k, v, beta]
    expected = gradients(delta_rule_reference(l2_normalize(q), l2_normalize(k), v, log, beta, None), leaves)
    found = gradients(delta_rule_chunked(l2_normalize(q), l2_normalize(k), v, log, beta, None), leaves)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def test_the_start_is_flas() -> None:
    torch.manual_seed(0)
    mixer = GatedDeltaNet(256, GDNConfig(head_dim=1, expand_v=1.0))
    a, dt = mixer.A_log.detach().exp(), F.softplus(mixer.dt_bias.detach())
    assert 0 < a.min() < 0.5
    assert 15.5 < a.max() <= 16
    assert dt.min() * 1.001 >= 1e-3
    assert dt.max() <= 0.1001
    for weight in (mixer.q_proj.weight, mixer.o_proj.weight, mixer.v_conv1d.weight):  # type: ignore[union-attr]
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.1)  # type: ignore[union-attr]
    plain = GatedDeltaNet(256, GDNConfig(head_dim=1, expand_v=1.0, init="linear"))
    assert float(plain.o_proj.weight.detach().abs().max()) == pytest.approx(1 / 16, rel=1e-3)
    assert float(plain.v_conv1d.weight.detach().abs().max()) == pytest.approx(0.5, rel=1e-2)


def test_the_guard_is_lifted_for_the_checked_width_alone() -> None:
    common = types.SimpleNamespace(TRITON_ABOVE_3_7_1=False)

    def refusing(*, k: torch.Tensor, g: int) -> int:
        if not common.TRITON_ABOVE_3_7_1:
            raise RuntimeError("refused")
        return g + k.shape[-1]

    call = op.lifted(refusing, common)
    assert call(k=torch.zeros(1, 128), g=1) == 129
    assert not common.TRITON_ABOVE_3_7_1
    for width in (64, 256):
        with pytest.raises(RuntimeError, match="refused"):
            call(k=torch.zeros(1, width), g=1)


def test_unchecked_gradients_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(op.library), "found", op.Kernels(None, None, None, guarded=True))
    on_gpu = types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    assert op.kernels(on_gpu, 128) is not None  # type: ignore[arg-type]
    with pytest.raises(KernelError, match=r"Hopper with Triton 3\.4 to 3\.7\.0.*head_dim is 64.*ELMAN_KERNELS=off"):
        op.kernels(on_gpu, 64)  # type: ignore[arg-type]
    with torch.no_grad():  # the forward is right everywhere
        assert op.kernels(on_gpu, 64) is not None  # type: ignore[arg-type]


def test_an_import_that_fails_without_a_word_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> op.Kernels:
        raise RuntimeError

    assert Library("it", "torch", "the library", "pip install it", silent).found == (
        "the library cannot be imported (RuntimeError: no message): pip install it"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_decoding_runs_one_convolution(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = GatedDeltaNet(24, GDNConfig(head_dim=8)).to(dtype).eval()
    x = torch.randn(4, 1, 24).to(dtype)  # BLAS sums three rows otherwise than four, and only the step adds one
    state = {name: torch.randn(4, *shape) for name, (shape, _) in layer.state_spec(24, layer.config).items()}
    masks = (None, torch.tensor([[True], [False], [True], [True]]))
    starts = (None, torch.tensor([[False], [False], [True], [False]]))
    for before, mask, start in itertools.product((None, state), masks, starts):
        with torch.enable_grad():
            y, after = layer(x, before, mask, start)  # three
        with torch.no_grad(), patch("elman_baselines.gdn.mixer.causal_conv", wraps=causal_conv) as one:
            y_step, after_step = layer(x, before, mask, start)
        assert one.call_count == 1
        assert torch.equal(y_step, y)
        assert all(torch.equal(after_step[name], after[name]) for name in after)
