"""E56: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, silu, silu_slope


class TestE56(VariantContract):
    variant = "e56"
    options = ({}, {"use_conv": True, "mamba2_init": True}, {"mamba2_init": "s4d"})

    def initial_values(self, o):
        halves = initial.dense({**o, "r_h_init_gain": 1.0}, "w")
        left, right = lambda w: w[..., : w.shape[-2]], lambda w: w[..., w.shape[-2] :]
        drawn = [(left, halves["w_x.weight"]), (right, halves["w"])] if o["mamba2_init"] else initial.xavier
        return initial.wrapper(o) | {"w": drawn, "b": 0.0}

    def step(self, o, p, s, x, z):
        h = np.tanh(p["w"] @ np.concatenate([x, s["h"]]) + p["b"])
        return h * silu(z), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        both = np.concatenate([x, s["h"]])
        h = np.tanh(p["w"] @ both + p["b"])
        da = (gy * silu(z) + gs["h"]) * (1 - h * h)
        dx, dh = np.split(p["w"].T @ da, 2)
        return {"w": np.outer(da, both), "b": da}, {"h": dh}, dx, gy * h * silu_slope(z)
