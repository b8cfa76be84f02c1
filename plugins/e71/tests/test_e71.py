"""E71: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, maps_gradient, self_gate, self_gate_slope, sigmoid

SMALL = {"n_state": 4}


class TestE71(VariantContract):
    variant = "e71"
    options = (SMALL, {**SMALL, "unit_keys": True, "use_conv": True, "mamba2_init": True})

    def initial_values(self, o):
        return (
            initial.wrapper(o)
            | {f"w_{n}.weight": initial.xavier for n in ("q", "k", "v", "alpha")}
            | {"d_alpha": 0.1, "b_alpha": 2.0}
        )

    def parts(self, o, p, s, x):
        q, k, v, alpha = (p[f"w_{n}.weight"] @ x for n in ("q", "k", "v", "alpha"))
        rho = (k @ k + 1e-12) ** -0.5 if o["unit_keys"] else 1.0
        r = s["S"][0].T @ (k * rho)
        a = sigmoid(alpha + p["d_alpha"] * r + p["b_alpha"])
        return q, k * rho, rho, v, r, a, s["S"][0] * a + np.outer(k * rho, (1 - a) * v)

    def step(self, o, p, s, x, z):
        q, *_, S = self.parts(o, p, s, x)
        return self_gate(S.T @ q), {"S": S[None]}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        q, k, rho, v, r, a, S = self.parts(o, p, s, x)
        before, do = s["S"][0], gy * self_gate_slope(S.T @ q)
        dS = gs["S"][0] + np.outer(q, do)
        d_alpha = np.sum(dS * (before - np.outer(k, v)), 0) * a * (1 - a)
        dr = d_alpha * p["d_alpha"]
        dk = dS @ ((1 - a) * v) + before @ dr
        dk = rho * (dk - k * (k @ dk)) if o["unit_keys"] else dk
        deltas = {"w_q": S @ do, "w_k": dk, "w_v": (1 - a) * (dS.T @ k), "w_alpha": d_alpha}
        dp, dx = maps_gradient(p, x, deltas)
        return {**dp, "d_alpha": d_alpha * r, "b_alpha": d_alpha}, {"S": (dS * a + np.outer(k, dr))[None]}, dx, None
