"""E65: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, maps_gradient, self_gate, self_gate_slope, sigmoid


class TestE65(VariantContract):
    variant = "e65"
    options = ({}, {"use_conv": True, "mamba2_init": True})

    def initial_values(self, o):
        return initial.wrapper(o) | {
            "w_alpha.weight": initial.xavier,
            "w_alpha.bias": 2.0,
            "w_x.weight": initial.xavier,
            "w_x.bias": 0.0,
            "delta": 0.5,
        }

    def step(self, o, p, s, x, z):
        alpha = sigmoid(p["w_alpha.weight"] @ x + p["w_alpha.bias"])
        h = alpha * s["h"] + (1 - alpha) * np.tanh(p["w_x.weight"] @ x + p["w_x.bias"] + p["delta"] * s["h"])
        return self_gate(h), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        h, alpha = s["h"], sigmoid(p["w_alpha.weight"] @ x + p["w_alpha.bias"])
        v = np.tanh(p["w_x.weight"] @ x + p["w_x.bias"] + p["delta"] * h)
        gh = gy * self_gate_slope(alpha * h + (1 - alpha) * v) + gs["h"]
        kappa = gh * (1 - alpha) * (1 - v * v)
        dp, dx = maps_gradient(p, x, {"w_alpha": gh * (h - v) * alpha * (1 - alpha), "w_x": kappa})
        return {**dp, "delta": kappa * h}, {"h": gh * alpha + p["delta"] * kappa}, dx, None
