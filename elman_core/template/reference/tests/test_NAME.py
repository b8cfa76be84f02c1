"""{{Name}}: everything a variant promises, and its equation in NumPy."""

import numpy as np

from elman_core.testing import VariantContract, initial, sigmoid


class Test{{Name}}(VariantContract):
    variant = "{{name}}"
    options = ({}, {"use_conv": True, "mamba2_init": True})

    def initial_values(self, o):
        return initial.wrapper(o) | {"lam": 2.0}

    def step(self, o, p, s, x, z):
        a = sigmoid(p["lam"])
        h = a * s["h"] + (1 - a) * x
        return np.tanh(h), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        a = sigmoid(p["lam"])
        y = np.tanh(a * s["h"] + (1 - a) * x)
        gh = gy * (1 - y * y) + gs["h"]
        return {"lam": gh * (s["h"] - x) * a * (1 - a)}, {"h": gh * a}, gh * (1 - a), None
