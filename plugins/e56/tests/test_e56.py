"""E56: everything a variant promises, and its equation in NumPy."""

import numpy as np

from elman_core.testing import VariantContract, silu, silu_slope


class TestE56(VariantContract):
    variant = "e56"
    options = ({}, {"use_conv": True, "mamba2_init": True}, {"mamba2_init": "s4d"})

    def step(self, o, p, s, x, z):
        h = np.tanh(p["w"] @ np.concatenate([x, s["h"]]) + p["b"])
        return h * silu(z), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        both = np.concatenate([x, s["h"]])
        h = np.tanh(p["w"] @ both + p["b"])
        da = (gy * silu(z) + gs["h"]) * (1 - h * h)
        dx, dh = np.split(p["w"].T @ da, 2)
        return {"w": np.outer(da, both), "b": da}, {"h": dh}, dx, gy * h * silu_slope(z)
