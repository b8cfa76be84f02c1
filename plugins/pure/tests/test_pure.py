"""`pure`: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial


class TestPure(VariantContract):
    variant = "pure"
    options = ({}, {"use_conv": True, "mamba2_init": True})

    def initial_values(self, o):
        return initial.wrapper(o) | {
            "w_h": lambda w: initial.xavier(w, o["r_h_init_gain"]),
            "w_x.weight": initial.xavier,
            "w_x.bias": 0.0,
        }

    def step(self, o, p, s, x, z):
        h = np.tanh(p["w_x.weight"] @ x + p["w_h"] @ s["h"] + p["w_x.bias"])
        return h, {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        h = np.tanh(p["w_x.weight"] @ x + p["w_h"] @ s["h"] + p["w_x.bias"])
        da = (gy + gs["h"]) * (1 - h * h)
        dp = {"w_x.weight": np.outer(da, x), "w_h": np.outer(da, s["h"]), "w_x.bias": da}
        return dp, {"h": p["w_h"].T @ da}, p["w_x.weight"].T @ da, None
