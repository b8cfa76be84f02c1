"""E1: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, silu, silu_slope


class TestE1(VariantContract):
    variant = "e1"
    options = ({}, {"use_conv": True, "mamba2_init": True}, {"r_h_mode": "none", "mamba2_init": "s4d"})

    def initial_values(self, o):
        return initial.wrapper(o) | initial.dense(o, "w_h")

    def step(self, o, p, s, x, z):
        h = np.tanh(p["w_x.weight"] @ x + p["w_h"] @ s["h"] + p["w_x.bias"])
        return h * silu(z), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        h = np.tanh(p["w_x.weight"] @ x + p["w_h"] @ s["h"] + p["w_x.bias"])
        da = (gy * silu(z) + gs["h"]) * (1 - h * h)
        dp = {"w_x.weight": np.outer(da, x), "w_h": np.outer(da, s["h"]), "w_x.bias": da}
        return dp, {"h": p["w_h"].T @ da}, p["w_x.weight"].T @ da, gy * h * silu_slope(z)
