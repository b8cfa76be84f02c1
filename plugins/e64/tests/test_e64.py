"""E64: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, maps_gradient, self_gate, self_gate_slope, sigmoid


class TestE64(VariantContract):
    variant = "e64"
    options = ({}, {"use_conv": True, "mamba2_init": True})

    def initial_values(self, o):
        return initial.wrapper(o) | {
            "w_alpha.weight": initial.xavier,
            "w_alpha.bias": 2.0,
            "w_x.weight": initial.xavier,
            "w_x.bias": 0.0,
        }

    def parts(self, p, s, x):
        alpha = sigmoid(p["w_alpha.weight"] @ x + p["w_alpha.bias"])
        v = np.tanh(p["w_x.weight"] @ x + p["w_x.bias"] + s["h"])
        return alpha, v, alpha * s["h"] + (1 - alpha) * v

    def step(self, o, p, s, x, z):
        *_, h = self.parts(p, s, x)
        return self_gate(h), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        alpha, v, h = self.parts(p, s, x)
        gh = gy * self_gate_slope(h) + gs["h"]
        lam, kappa = gh * (s["h"] - v) * alpha * (1 - alpha), gh * (1 - alpha) * (1 - v * v)
        dp, dx = maps_gradient(p, x, {"w_alpha": lam, "w_x": kappa})
        return dp, {"h": gh * alpha + kappa}, dx, None
