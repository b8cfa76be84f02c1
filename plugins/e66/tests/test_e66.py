"""E66: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, self_gate, self_gate_slope, sigmoid


class TestE66(VariantContract):
    variant = "e66"
    options = ({"rank": 3}, {"use_conv": True, "mamba2_init": True})

    def initial_values(self, o):
        return initial.wrapper(o) | {
            "w_x.weight": initial.xavier,
            "w_x.bias": 0.0,
            "w_alpha.weight": initial.xavier,
            "w_alpha.bias": 2.0,
            "w_h.u": initial.orthogonal(0.5),
            "w_h.v": initial.orthogonal(0.5),
        }

    def parts(self, p, s, x):
        v = np.tanh(p["w_h"] @ s["h"] + p["w_x.weight"] @ x + p["w_x.bias"])
        keep = sigmoid(p["w_alpha.weight"] @ x + p["w_alpha.bias"])
        return keep, v, keep * s["h"] + (1 - keep) * v

    def step(self, o, p, s, x, z):
        _, _, h = self.parts(p, s, x)
        return self_gate(h), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        keep, v, h = self.parts(p, s, x)
        gh = gy * self_gate_slope(h) + gs["h"]
        da, dalpha = gh * (1 - keep) * (1 - v * v), gh * (s["h"] - v) * keep * (1 - keep)
        dp = {"w_x.weight": np.outer(da, x), "w_h": np.outer(da, s["h"]), "w_x.bias": da}
        dp |= {"w_alpha.weight": np.outer(dalpha, x), "w_alpha.bias": dalpha}
        dx = p["w_x.weight"].T @ da + p["w_alpha.weight"].T @ dalpha
        return dp, {"h": gh * keep + p["w_h"].T @ da}, dx, None
