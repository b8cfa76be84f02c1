"""{{Name}}: everything a variant promises, and its equation in NumPy."""

import numpy as np

from elman_core.testing import VariantContract, initial, maps_gradient, sigmoid


class Test{{Name}}(VariantContract):
    variant = "{{name}}"
    options = ({}, {"use_conv": True, "mamba2_init": True})

    def initial_values(self, o):
        maps = {f"{n}.weight": initial.xavier for n in ("w_f", "w_c")}
        return initial.wrapper(o) | maps | {"w_f.bias": 1.0, "w_c.bias": 0.0, "r": 0.5}

    def step(self, o, p, s, x, z):
        f, c = (p[f"{n}.weight"] @ x + p[f"{n}.bias"] for n in ("w_f", "w_c"))
        h = sigmoid(f) * s["h"] + sigmoid(-f) * np.tanh(c + p["r"] * s["h"])
        return h, {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        f, c = (p[f"{n}.weight"] @ x + p[f"{n}.bias"] for n in ("w_f", "w_c"))
        f, c, gh = sigmoid(f), np.tanh(c + p["r"] * s["h"]), gy + gs["h"]
        dc = gh * (1 - f) * (1 - c * c)
        dp, dx = maps_gradient(p, x, {"w_f": gh * (s["h"] - c) * f * (1 - f), "w_c": dc})
        return {**dp, "r": dc * s["h"]}, {"h": gh * f + dc * p["r"]}, dx, None
