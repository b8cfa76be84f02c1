"""E14: everything a variant promises, and its equation in NumPy."""

import numpy as np
import pytest
from elman_authors.testing import VariantContract, initial, maps_gradient, sigmoid, silu, silu_slope

from elman_core import ConfigError
from elman_core.registry import resolve


class TestE14(VariantContract):
    variant = "e14"
    options = ({}, {"d_state": 8, "use_conv": True, "mamba2_init": True}, {"d_state": 136})

    def initial_values(self, o):
        return (
            initial.wrapper(o)
            | {f"{n}.weight": initial.xavier for n in ("w_query", "w_key", "w_val")}
            | {
                "w_query.bias": 0.0,
                "w_key.bias": 0.0,
                "w_val.bias": 0.0,
                "w_decay.weight": 0.0,
                "w_decay.bias": 3.0,
            }
        )

    def parts(self, p, s, x):
        key, v, q, decay = (p[f"w_{n}.weight"] @ x + p[f"w_{n}.bias"] for n in ("key", "val", "query", "decay"))
        before = s["S"].reshape(-1, len(x)).T  # H, rows of the inner width
        return np.tanh(key), v, q, sigmoid(decay), before, sigmoid(decay)[:, None] * before + np.outer(np.tanh(key), v)

    def step(self, o, p, s, x, z):
        *_, q, _a, _before, H = self.parts(p, s, x)
        return (H @ q) * silu(z), {"S": H.T.reshape(s["S"].shape)}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        key, v, q, a, before, H = self.parts(p, s, x)
        dr = gy * silu(z)
        dH = gs["S"].reshape(-1, len(x)).T + np.outer(dr, q)
        deltas = {"w_query": H.T @ dr, "w_val": dH.T @ key, "w_key": (dH @ v) * (1 - key * key)}
        deltas["w_decay"] = np.sum(dH * before, 1) * a * (1 - a)
        dp, dx = maps_gradient(p, x, deltas)
        return dp, {"S": (a[:, None] * dH).T.reshape(s["S"].shape)}, dx, gy * (H @ q) * silu_slope(z)


def test_a_state_that_cannot_be_cut_is_refused():
    found = resolve("e14", {"d_state": 30})
    with pytest.raises(ConfigError, match="multiple of 4; nearest: 28"):
        found.variant.check(16, found.config)
