"""diagonal: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, sigmoid, silu, silu_slope


class TestDiagonal(VariantContract):
    variant = "diagonal"
    options = ({}, {"form": "tanh", "use_conv": True, "mamba2_init": True}, {"alpha_init": 4.6})

    def initial_values(self, o):
        return initial.wrapper(o) | {
            "w_x.weight": initial.NORMAL if o["mamba2_init"] else initial.xavier,
            "w_x.bias": 0.0,
            "b_g": 0.0,
            "alpha_hat": o["alpha_init"],
        }

    def after(self, o, p, s, x):
        h = sigmoid(p["alpha_hat"]) * s["h"] + p["w_x.weight"] @ x + p["w_x.bias"]
        return np.tanh(h) if o["form"] == "tanh" else h

    def step(self, o, p, s, x, z):
        h = self.after(o, p, s, x)
        return h * silu(x + p["b_g"]), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        h, alpha = self.after(o, p, s, x), sigmoid(p["alpha_hat"])
        delta = (gy * silu(x + p["b_g"]) + gs["h"]) * (1 - h * h if o["form"] == "tanh" else 1)
        gamma = gy * h * silu_slope(x + p["b_g"])
        dp = {"w_x.weight": np.outer(delta, x), "w_x.bias": delta, "b_g": gamma}
        dp["alpha_hat"] = delta * s["h"] * alpha * (1 - alpha)
        return dp, {"h": alpha * delta}, p["w_x.weight"].T @ delta + gamma, None
