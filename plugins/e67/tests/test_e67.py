"""E67: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, maps_gradient, self_gate, self_gate_slope, sigmoid


class TestE67(VariantContract):
    variant = "e67"
    options = ({}, {"use_conv": True, "mamba2_init": True})

    def initial_values(self, o):
        return initial.wrapper(o) | {
            "w_alpha.weight": initial.xavier,
            "w_alpha.bias": 2.0,
            "w_x.weight": initial.xavier,
            "w_x.bias": 0.0,
            "delta": 0.1,
            "w_h.u": initial.orthogonal(0.1),
            "w_h.v": initial.orthogonal(0.1),
        }

    def seen(self, p, h):
        """What the gate sees of the state."""
        return p["delta"] * h

    def step(self, o, p, s, x, z):
        alpha = sigmoid(p["w_alpha.weight"] @ x + p["w_alpha.bias"] + self.seen(p, s["h"]))
        h = alpha * s["h"] + (1 - alpha) * np.tanh(p["w_x.weight"] @ x + p["w_x.bias"])
        return self_gate(h), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        h, v = s["h"], np.tanh(p["w_x.weight"] @ x + p["w_x.bias"])
        alpha = sigmoid(p["w_alpha.weight"] @ x + p["w_alpha.bias"] + self.seen(p, h))
        total = gy * self_gate_slope(alpha * h + (1 - alpha) * v) + gs["h"]
        lam = total * (h - v) * alpha * (1 - alpha)
        dp, dx = maps_gradient(p, x, {"w_alpha": lam, "w_x": total * (1 - alpha) * (1 - v * v)})
        of_seen, dh = self.seen_gradient(p, h, lam)
        return dp | of_seen, {"h": total * alpha + dh}, dx, None

    def seen_gradient(self, p, h, lam):
        return {"delta": lam * h}, p["delta"] * lam


class TestE67lr(TestE67):
    variant = "e67lr"
    options = ({}, {"rank": 3, "use_conv": True, "mamba2_init": True})

    def seen(self, p, h):
        return p["w_h"] @ h

    def seen_gradient(self, p, h, lam):
        return {"w_h": np.outer(lam, h)}, p["w_h"].T @ lam
