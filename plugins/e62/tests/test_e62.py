"""E62: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, maps_gradient, self_gate, self_gate_slope, sigmoid


class TestE62(VariantContract):
    variant = "e62"
    options = ({}, {"form": "b", "use_conv": True, "mamba2_init": True}, {"form": "c"})

    def initial_values(self, o):
        return (
            initial.wrapper(o)
            | {f"{n}.weight": initial.xavier for n in ("w_k", "w_alpha", "w_v", "w")}
            | {
                "w_k.bias": -2.0,
                "w_alpha.bias": 2.0,
                "w_v.bias": 0.0,
                "w.bias": 0.0,
            }
        )

    def gates(self, o, p, x):
        """k, the decay of what is not overwritten, the value."""
        if o["form"] == "c":
            logit = p["w.weight"] @ x + p["w.bias"]
            return sigmoid(-logit), 1.0, np.tanh(logit)
        decay = sigmoid(p["w_alpha.weight"] @ x + p["w_alpha.bias"]) if o["form"] == "b" else 1.0
        return sigmoid(p["w_k.weight"] @ x + p["w_k.bias"]), decay, np.tanh(p["w_v.weight"] @ x + p["w_v.bias"])

    def step(self, o, p, s, x, z):
        k, decay, v = self.gates(o, p, x)
        h = decay * (1 - k) * s["h"] + k * v
        return self_gate(h), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        k, decay, v = self.gates(o, p, x)
        gh = gy * self_gate_slope(decay * (1 - k) * s["h"] + k * v) + gs["h"]
        deltas = {"w_k": gh * (v - decay * s["h"]) * k * (1 - k), "w_v": gh * k * (1 - v * v)}
        if o["form"] == "b":
            deltas["w_alpha"] = gh * s["h"] * (1 - k) * decay * (1 - decay)
        elif o["form"] == "c":
            deltas = {"w": deltas["w_v"] - deltas["w_k"]}
        of_p, of_x = maps_gradient(p, x, deltas)
        return of_p, {"h": gh * decay * (1 - k)}, of_x, None
