"""E70: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, self_gate, self_gate_slope
from elman_authors.testing.oracle import scaled, scaled_gradient

SMALL = {"n_state": 4}


class TestE70(VariantContract):
    variant = "e70"
    options = (SMALL, {**SMALL, "train_decay": True, "use_conv": True, "mamba2_init": True})

    def initial_values(self, o):
        return initial.wrapper(o) | {"w_q": initial.xavier, "w_k": initial.xavier, "w_v": initial.xavier, "decay": 0.9}

    def norm(self, p, name):
        return p[f"w_{name}"], 0.5, p[f"spectral_{name}.u"], p[f"spectral_{name}.v"]

    def parts(self, p, s, x):
        q, k, v = p["w_q"] @ x, *(scaled(*self.norm(p, n)) @ x for n in "kv")
        decay = np.clip(p.get("decay", [0.9])[0], 0, 0.999)
        return q, k, v, decay, decay * s["S"][0] + np.outer(k, v)

    def step(self, o, p, s, x, z):
        q, *_, S = self.parts(p, s, x)
        return self_gate(S.T @ q), {"S": S[None]}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        q, k, v, decay, S = self.parts(p, s, x)
        do = gy * self_gate_slope(S.T @ q)
        dS = gs["S"][0] + np.outer(q, do)
        deltas = {"q": S @ do, "k": dS @ v, "v": dS.T @ k}
        dp = {f"w_{n}": np.outer(d, x) for n, d in deltas.items()}
        dp |= {f"w_{n}": scaled_gradient(dp[f"w_{n}"], *self.norm(p, n)) for n in "kv"}
        if o["train_decay"]:
            dp["decay"] = np.array([np.sum(dS * s["S"][0]) * (0 < p["decay"][0] < 0.999)])
        dx = p["w_q"].T @ deltas["q"] + sum(scaled(*self.norm(p, n)).T @ deltas[n] for n in "kv")
        return dp, {"S": decay * dS[None]}, dx, None
