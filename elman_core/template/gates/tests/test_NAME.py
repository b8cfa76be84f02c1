"""{{Name}}: everything a variant promises, and its equation in NumPy."""

import numpy as np
import torch

from elman_core.testing import VariantContract, initial, sigmoid


class Test{{Name}}(VariantContract):
    variant = "{{name}}"
    options = ({}, {"use_conv": True, "mamba2_init": True})

    def initial_values(self, o):
        def halves(w):
            return w.unflatten(1, (2, -1))

        return initial.wrapper(o) | {
            "w_x.weight": (halves, initial.xavier),
            "w_h": (halves, initial.orthogonal(1.0)),
            "w_x.bias": (halves, torch.tensor([[1.0], [0.0]])),
        }

    def step(self, o, p, s, x, z):
        f, c = np.split(p["w_x.weight"] @ x + p["w_x.bias"] + p["w_h"] @ s["h"], 2)
        h = sigmoid(f) * s["h"] + sigmoid(-f) * np.tanh(c)
        return h, {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        f, c = np.split(p["w_x.weight"] @ x + p["w_x.bias"] + p["w_h"] @ s["h"], 2)
        f, c, gh = sigmoid(f), np.tanh(c), gy + gs["h"]
        da = np.concatenate([gh * (s["h"] - c) * f * (1 - f), gh * (1 - f) * (1 - c * c)])
        dp = {"w_x.weight": np.outer(da, x), "w_x.bias": da, "w_h": np.outer(da, s["h"])}
        return dp, {"h": p["w_h"].T @ da + gh * f}, p["w_x.weight"].T @ da, None
