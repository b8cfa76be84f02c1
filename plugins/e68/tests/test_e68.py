"""E68: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, maps_gradient, self_gate, self_gate_slope, sigmoid


class TestE68(VariantContract):
    variant = "e68"
    options = ({}, {"form": "i", "use_conv": True, "mamba2_init": True})

    def initial_values(self, o):
        return initial.wrapper(o) | {
            "w_alpha.weight": initial.xavier,
            "w_alpha.bias": 2.0,
            "w_x.weight": initial.xavier,
            "w_x.bias": 0.0,
            "delta": 0.5,
            "b_g": 0.5 if o["form"] == "i" else 0.0,
        }

    def parts(self, o, p, s, x):
        """alpha, tanh of the value's logit, q, and the slopes of q's logit by delta and by h."""
        seen, sign = (-abs(s["h"]), -np.sign(s["h"])) if o["form"] == "i" else (s["h"], 1)
        alpha = sigmoid(p["w_alpha.weight"] @ x + p["w_alpha.bias"])
        c = np.tanh(p["w_x.weight"] @ x + p["w_x.bias"])
        return alpha, c, sigmoid(p["delta"] * seen + p["b_g"]), seen, sign * p["delta"]

    def step(self, o, p, s, x, z):
        alpha, c, q, _, _ = self.parts(o, p, s, x)
        h = alpha * s["h"] + (1 - alpha) * c * q
        return self_gate(h), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        alpha, c, q, by_delta, by_h = self.parts(o, p, s, x)
        gh = gy * self_gate_slope(alpha * s["h"] + (1 - alpha) * c * q) + gs["h"]
        dv = gh * (1 - alpha)
        omega = dv * c * q * (1 - q)
        dp, dx = maps_gradient(p, x, {"w_alpha": dv * (s["h"] - c * q) * alpha, "w_x": dv * q * (1 - c * c)})
        return {**dp, "delta": omega * by_delta, "b_g": omega}, {"h": gh * alpha + omega * by_h}, dx, None
