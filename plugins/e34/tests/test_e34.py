"""E34: everything a variant promises, and its equation in NumPy."""

import numpy as np
import torch
from elman_authors.testing import VariantContract, initial, maps_gradient, self_gate, self_gate_slope


class TestE34(VariantContract):
    variant = "e34"
    options = ({}, {"use_conv": True, "mamba2_init": True}, {"bound": "tanh"})

    def initial_values(self, o):
        start = 0.99 if o["mamba2_init"] else initial.Uniform(0.9, 0.99)
        return initial.wrapper(o) | {
            "delta": (torch.tanh, start) if o["bound"] == "tanh" else start,
            "w_x.weight": initial.NORMAL if o["mamba2_init"] else initial.xavier,
            "w_x.bias": 0.0,
        }

    def bounded(self, o, p):
        """delta as it is used, and the slope of that."""
        delta = p["delta"]
        if o["bound"] == "tanh":
            return np.tanh(delta), 1 - np.tanh(delta) ** 2
        return np.clip(delta, -0.99, 0.99), abs(delta) <= 0.99

    def step(self, o, p, s, x, z):
        h = np.tanh(p["w_x.weight"] @ x + self.bounded(o, p)[0] * s["h"] + p["w_x.bias"])
        return self_gate(h), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        (delta, slope), (_, new) = self.bounded(o, p), self.step(o, p, s, x, z)
        da = (gy * self_gate_slope(new["h"]) + gs["h"]) * (1 - new["h"] ** 2)
        dp, dx = maps_gradient(p, x, {"w_x": da})
        return {**dp, "delta": slope * da * s["h"]}, {"h": delta * da}, dx, None


def test_both_bounds_start_at_the_published_factors():
    for opts, low in (({}, 0.9), ({"mamba2_init": True}, 0.99)):
        for bound in ("clamp", "tanh"):
            (delta,) = TestE34().make({**opts, "bound": bound}, stir=False).vectors()
            assert torch.all((delta >= low - 1e-6) & (delta <= 0.99 + 1e-6))
