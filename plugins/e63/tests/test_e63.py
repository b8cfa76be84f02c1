"""E63: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, self_gate, self_gate_slope, sigmoid


class TestE63(VariantContract):
    variant = "e63"
    options = ({}, {"form": "b", "use_conv": True, "mamba2_init": True}, {"form": "c"}, {"form": "d"})

    def initial_values(self, o):
        return (
            initial.wrapper(o)
            | {f"{n}.weight": initial.xavier for n in ("w_x", "w_alpha", "w_beta")}
            | {
                "w_h": initial.orthogonal(0.3 if o["form"] == "d" else 0.5),
                "w_x.bias": 0.0,
                "w_beta.bias": 0.0,
                "w_alpha.bias": 0.0 if o["form"] == "d" else 2.0,
                "u_alpha": initial.orthogonal(0.1),
                "u_beta": initial.orthogonal(0.1),
            }
        )

    def parts(self, o, p, s, x):
        """(keep, write, the candidate)."""
        seen = {n: p[f"u_{n}"] @ s["h"] if o["form"] == "c" else 0 for n in ("alpha", "beta")}
        alpha = sigmoid(p["w_alpha.weight"] @ x + p["w_alpha.bias"] + seen["alpha"])
        v = np.tanh(p["w_h"] @ s["h"] + p["w_x.weight"] @ x + p["w_x.bias"])
        if o["form"] in "bc":
            return alpha, sigmoid(p["w_beta.weight"] @ x + p["w_beta.bias"] + seen["beta"]), v
        return (alpha, 1 - alpha, v) if o["form"] == "a" else (1.0, alpha, v)

    def step(self, o, p, s, x, z):
        keep, write, v = self.parts(o, p, s, x)
        h = keep * s["h"] + write * v
        return self_gate(h), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        keep, write, v = self.parts(o, p, s, x)
        gh = gy * self_gate_slope(keep * s["h"] + write * v) + gs["h"]
        deltas = {"w_x": gh * write * (1 - v * v)}
        if o["form"] == "a":
            deltas["w_alpha"] = gh * (s["h"] - v) * keep * write
        elif o["form"] in "bc":
            deltas |= {"w_alpha": gh * s["h"] * keep * (1 - keep), "w_beta": gh * v * write * (1 - write)}
        else:
            deltas["w_alpha"] = gh * v * write * (1 - write)
        dp = {"w_h": np.outer(deltas["w_x"], s["h"])}
        for name, delta in deltas.items():
            dp |= {f"{name}.weight": np.outer(delta, x), f"{name}.bias": delta}
        dh = gh * keep + p["w_h"].T @ deltas["w_x"]
        for name in ("alpha", "beta") if o["form"] == "c" else ():
            dp[f"u_{name}"] = np.outer(deltas[f"w_{name}"], s["h"])
            dh = dh + p[f"u_{name}"].T @ deltas[f"w_{name}"]
        dx = sum(p[f"{name}.weight"].T @ delta for name, delta in deltas.items())
        return dp, {"h": dh}, dx, None
