"""E42: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, sigmoid


class TestE42(VariantContract):
    variant = "e42"
    options = ({}, {"use_conv": True, "mamba2_init": True}, {"r_h_mode": "none", "mamba2_init": "s4d"})

    def initial_values(self, o):
        return initial.wrapper(o) | initial.dense(o, "w")

    def step(self, o, p, s, x, z):
        h = p["w"] @ x + p["w"] @ s["h"] + p["b"]
        return h * h * sigmoid(h), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        h = p["w"] @ x + p["w"] @ s["h"] + p["b"]
        da = gy * h * sigmoid(h) * (2 + h * (1 - sigmoid(h))) + gs["h"]
        return {"w": np.outer(da, x) + np.outer(da, s["h"]), "b": da}, {"h": p["w"].T @ da}, p["w"].T @ da, None
