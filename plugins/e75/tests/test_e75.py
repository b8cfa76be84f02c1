"""E75: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, maps_gradient, self_gate, self_gate_slope, sigmoid

SMALL = {"n_state": 4}


class TestE75(VariantContract):
    variant = "e75"
    options = (SMALL, {**SMALL, "n_heads": 3, "form": "linear", "use_conv": True, "mamba2_init": True})

    def initial_values(self, o):
        return (
            initial.wrapper(o)
            | {f"w_{n}.weight": initial.blocks(o["n_state"]) for n in ("q", "k", "v", "beta")}
            | {
                "b_beta": 2.0,
            }
        )

    def parts(self, o, p, s, x):
        q, k, v, beta = ((p[f"w_{n}.weight"] @ x).reshape(o["n_heads"], -1) for n in ("q", "k", "v", "beta"))
        rho = (np.sum(k * k, -1, keepdims=True) + 1e-12) ** -0.5
        g, delta = sigmoid(beta + p["b_beta"].reshape(beta.shape)), v - np.einsum("hkv,hk->hv", s["S"], k * rho)
        new = s["S"] * g[:, None] + (k * rho)[..., None] * delta[:, None]
        return q, k * rho, rho, g, delta, np.tanh(new) if o["form"] == "tanh" else new

    def step(self, o, p, s, x, z):
        q, *_, S = self.parts(o, p, s, x)
        return self_gate(np.einsum("hkv,hk->hv", S, q).ravel()), {"S": S}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        q, k, rho, g, delta, S = self.parts(o, p, s, x)
        do = gy.reshape(q.shape) * self_gate_slope(np.einsum("hkv,hk->hv", S, q))
        P = gs["S"] + q[..., None] * do[:, None]
        P = P * (1 - S * S) if o["form"] == "tanh" else P
        d_beta = np.sum(P * s["S"], 1) * g * (1 - g)
        dv = np.einsum("hkv,hk->hv", P, k)
        dk = np.einsum("hkv,hv->hk", P, delta) - np.einsum("hkv,hv->hk", s["S"], dv)
        dk = rho * (dk - k * np.sum(k * dk, -1, keepdims=True))
        deltas = {"w_q": np.einsum("hkv,hv->hk", S, do), "w_k": dk, "w_v": dv, "w_beta": d_beta}
        dp, dx = maps_gradient(p, x, {n: d.ravel() for n, d in deltas.items()})
        return {**dp, "b_beta": d_beta.ravel()}, {"S": P * g[:, None] - k[..., None] * dv[:, None]}, dx, None
