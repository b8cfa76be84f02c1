"""E37v2: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, self_gate, self_gate_slope


class TestE37v2(VariantContract):
    variant = "e37v2"
    options = ({}, {"use_conv": True, "mamba2_init": True}, {"r_h_mode": "none", "mamba2_init": "s4d"})

    def initial_values(self, o):
        return initial.wrapper(o) | initial.dense(o, "w")

    def step(self, o, p, s, x, z):
        h = np.tanh(p["w"] @ (x + s["h"]) + p["b"])
        return self_gate(h), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        h = np.tanh(p["w"] @ (x + s["h"]) + p["b"])
        da = (gy * self_gate_slope(h) + gs["h"]) * (1 - h * h)
        return {"w": np.outer(da, x + s["h"]), "b": da}, {"h": p["w"].T @ da}, p["w"].T @ da, None
