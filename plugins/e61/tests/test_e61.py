"""E61: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, maps_gradient, self_gate, self_gate_slope, sigmoid


class TestE61(VariantContract):
    variant = "e61"
    options = ({}, {"form": "b", "use_conv": True, "mamba2_init": True}, {"form": "c"})
    equations = ({"form": "tanh"},)

    def initial_values(self, o):
        return initial.wrapper(o) | {
            "w_v.weight": lambda w: initial.xavier(w, 0.1 if o["form"] == "b" else 1.0),
            "w_v.bias": 0.0,
            "w_alpha.weight": initial.xavier,
            "w_alpha.bias": 2.0,
            "w.weight": initial.xavier,
            "w.bias": 0.0,
        }

    def parts(self, o, p, x):
        """alpha, what v is multiplied by, v, and its slope."""
        a = p["w.weight"] @ x + p["w.bias"] if o["form"] == "c" else p["w_alpha.weight"] @ x + p["w_alpha.bias"]
        k = a if o["form"] == "c" else p["w_v.weight"] @ x + p["w_v.bias"]
        v, slope = (k, 1) if o["form"] in "ab" else (np.tanh(k), 1 - np.tanh(k) ** 2)
        return sigmoid(a), 1 if o["form"] == "b" else sigmoid(-a), v, slope

    def step(self, o, p, s, x, z):
        alpha, beta, v, _ = self.parts(o, p, x)
        h = alpha * s["h"] + beta * v
        return self_gate(h), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        alpha, beta, v, slope = self.parts(o, p, x)
        gh = gy * self_gate_slope(alpha * s["h"] + beta * v) + gs["h"]
        lam, kappa = gh * (s["h"] - (0 if o["form"] == "b" else v)) * alpha * (1 - alpha), gh * beta * slope
        deltas = {"w": lam + kappa} if o["form"] == "c" else {"w_alpha": lam, "w_v": kappa}
        dp, dx = maps_gradient(p, x, deltas)
        return dp, {"h": gh * alpha}, dx, None
