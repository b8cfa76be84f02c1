"""RWKV-7 against its equations in NumPy, and how fla is called."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from elman_authors.testing import initial, sigmoid
from elman_baselines.rwkv7 import op
from elman_baselines.rwkv7.op import rule

from elman_core.registry import ConfigError

from .library_contract import LibraryContract

# fla's functions as it documents them.


def rule_as_documented(
    r, w, k, v, a, b, scale, initial_state, output_final_state, safe_gate, lower_bound, chunk_size
):  # type: ignore[no-untyped-def]  # fmt: skip
    assert (scale, output_final_state, safe_gate, chunk_size) == (1.0, True, True, 64)
    assert bool((w >= lower_bound).all())
    return op.dplr(r, k, w.exp(), a, b, v, state_BHNV=initial_state)


def step_as_documented(r, w, k, v, kk, a, scale, initial_state, output_final_state):  # type: ignore[no-untyped-def]
    assert (scale, output_final_state) == (1.0, True)
    return op.dplr(r, k, w.exp(), -kk, kk * a, v, state_BHNV=initial_state)


def by_hand(
    _config: Any, p: dict[str, np.ndarray], x: np.ndarray, window: np.ndarray, s: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row of real positions, head by head: outputs, last input, last state."""
    (heads, wide, _), s, out, last = s.shape, s.copy(), np.zeros_like(x), window[0]

    def low_rank(name: str, activation: Any, x: np.ndarray) -> np.ndarray:
        return p[f"{name}_lora.lora.2.weight"] @ activation(p[f"{name}_lora.lora.0.weight"] @ x)

    for t in range(len(x)):
        xr, xw, xk, xv, xa, xg = (x[t] + (last - x[t]) * p[f"x_{n}"][0, 0] for n in "rwkvag")
        r, k, v = (p[f"{n}_proj.weight"] @ z for n, z in (("r", xr), ("k", xk), ("v", xv)))
        w = np.exp(-math.exp(-0.5) * sigmoid(low_rank("w", np.tanh, xw) + p["w_lora.lora.2.bias"]))
        a = sigmoid(low_rank("a", lambda z: z, xa) + p["a_lora.lora.2.bias"])
        g, y = low_rank("g", sigmoid, xg), np.zeros_like(x[t])
        unit, k = k * p["k_k"], k * (1 + (a - 1) * p["k_a"])
        for h in range(heads):
            at = slice(h * wide, (h + 1) * wide)
            kappa = unit[at] / np.linalg.norm(unit[at])
            s[h] = w[at][:, None] * s[h] - np.outer(a[at] * kappa, s[h].T @ kappa) + np.outer(k[at], v[at])
            o = s[h].T @ r[at]
            normed = (o - o.mean()) / np.sqrt(o.var() + wide * 1e-5) * p["g_norm.weight"][at] + p["g_norm.bias"][at]
            y[at] = (normed + (r[at] @ (k[at] * p["r_k"][h])) * v[at]) * g[at]
        out[t], last = p["o_proj.weight"] @ y, x[t]
    return out, last[None], s


class TestRWKV7(LibraryContract):
    variant = "rwkv7"
    options = ({"head_dim": 8}, {"head_dim": 4, "init_depth": 3})
    op, library, extra = op, "fla", "fla"
    by_hand, states, error = staticmethod(by_hand), ("shift", "S"), 1e-11
    ways = (op.Kernels(rule_as_documented, step_as_documented),)

    def initial_values(self, o: Any) -> dict[str, Any]:
        """Of the first layer, or of the middle."""
        before, after, n = (0.0, 1.0, o["head_dim"]) if o["init_depth"] else (0.5, 0.5, o["head_dim"])
        share, across = torch.arange(self.dim) / self.dim, torch.arange(self.dim) / (self.dim - 1)
        around = torch.linspace(-1, 1, n).repeat(self.dim // n)
        around = around * around.abs()
        powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
        laws: dict[str, Any] = {f"x_{n}": (1 - share ** (power * after))[None, None] for n, power in powers.items()}
        laws |= {f"{n}_lora.lora.0.weight": 0.0 for n in "wag"}
        rank = 32
        laws |= {f"{n}_lora.lora.2.weight": initial.orthogonal(0.1 * math.sqrt(max(1, rank / self.dim))) for n in "wag"}
        laws["w_lora.lora.2.bias"] = -6 + 6 * across ** (1 + before**0.3) + 0.5 + 2.5 * around
        laws["a_lora.lora.2.bias"] = -0.19 + 0.3 * around + 0.4 * (across - 0.5)
        laws |= {f"{n}_proj.weight": initial.orthogonal(gain) for n, gain in (("r", 1.0), ("k", 0.1), ("v", 1.0))}
        laws |= {"o_proj.weight": 0.0, "k_k": 0.71 - 0.1 * (across - 0.5), "k_a": 1.02, "r_k": -0.04}
        return laws | {"g_norm.weight": (1 / 3 if o["init_depth"] else 0.5) ** 0.7, "g_norm.bias": 0.0}

    def test_a_width_without_whole_heads_is_refused(self) -> None:
        variant = self.declared()
        with pytest.raises(ConfigError, match="width 100 is not a multiple of head_dim 64; nearest width: 64 or 128"):
            variant.check(100, variant.make_config())


def test_the_rule_is_flas() -> None:
    """Its plain function computes in float32."""
    naive = pytest.importorskip("fla.ops.generalized_delta_rule.dplr.naive").dplr_recurrence
    draw = torch.Generator().manual_seed(1)
    r, log, k, v, unit, a = (torch.randn(2, 9, 3, 8, generator=draw) for _ in range(6))
    s = torch.randn(2, 3, 8, 8, generator=draw)
    unit = torch.nn.functional.normalize(unit, dim=-1)
    leaves = [x.requires_grad_() for x in (r, -log.exp(), k, v, unit, a.sigmoid(), s)]
    r, log, k, v, unit, a, s = leaves
    by_head = (x.transpose(1, 2) for x in (8**0.5 * r, k, v, -unit, unit * a, log))
    o, end = naive(*by_head, initial_state=s)
    wanted, found = (
        [*each, *torch.autograd.grad(sum(x.sin().sum() for x in each), leaves)]
        for each in ((o.transpose(1, 2), end), rule(r, log, k, v, unit, a, s))
    )
    for actual, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-5)
