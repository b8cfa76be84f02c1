"""E73: everything a variant promises, and its equations in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, maps_gradient, self_gate, self_gate_slope

SMALL = {"n_state": 4}


class TestE73(VariantContract):
    variant = "e73"
    options = (
        SMALL,
        {**SMALL, "form": "row", "use_conv": True},
        {**SMALL, "form": "full", "mamba2_init": True},
        {**SMALL, "form": "delta"},
    )

    def initial_values(self, o):
        return initial.wrapper(o) | {f"w_{n}.weight": initial.xavier for n in "qkvz"} | {"w_z.bias": 1.0}

    def parts(self, o, p, s, x):
        q, k, v, z = (p[f"w_{n}.weight"] @ x for n in ("q", "k", "v", "z"))
        z, before = z + p["w_z.bias"], s["S"][0]
        if o["form"] == "delta":
            rho = (k @ k + 1e-12) ** -0.5
            e = v - before.T @ (z * k * rho)
            return q, k * rho, rho, e, z, None, np.tanh(before + np.outer(k * rho, e))
        z = np.tanh(z)
        M = {"column": np.outer(z, np.ones_like(z)), "row": np.outer(np.ones_like(z), z), "full": np.outer(z, z)}[
            o["form"]
        ]
        return q, k, 1.0, v, z, M, np.tanh(M * before + np.outer(k, v))

    def step(self, o, p, s, x, z):
        q, *_, S = self.parts(o, p, s, x)
        return self_gate(S.T @ q), {"S": S[None]}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        q, k, rho, e, z, M, S = self.parts(o, p, s, x)
        before, do = s["S"][0], gy * self_gate_slope(S.T @ q)
        P = (gs["S"][0] + np.outer(q, do)) * (1 - S * S)
        deltas = {"w_q": S @ do, "w_v": P.T @ k, "w_k": P @ e}
        if o["form"] == "delta":
            read = before @ deltas["w_v"]
            dk = deltas["w_k"] - z * read
            deltas |= {"w_k": rho * (dk - k * (k @ dk)), "w_z": -k * read}
            dS = P - np.outer(z * k, deltas["w_v"])
        else:
            dM, dS = P * before, P * M
            of_z = {"column": dM.sum(1), "row": dM.sum(0), "full": dM @ z + dM.T @ z}[o["form"]]
            deltas["w_z"] = of_z * (1 - z * z)
        dp, dx = maps_gradient(p, x, deltas)
        return dp, {"S": dS[None]}, dx, None
