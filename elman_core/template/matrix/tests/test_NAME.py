"""{{Name}}: everything a variant promises, and its equation in NumPy."""

import numpy as np

from elman_core.testing import VariantContract, initial, maps_gradient, self_gate, self_gate_slope, sigmoid


class Test{{Name}}(VariantContract):
    variant = "{{name}}"
    options = ({"n_state": 4}, {"n_state": 8, "n_heads": 3, "use_conv": True, "mamba2_init": True})

    def initial_values(self, o):
        maps = {f"w_{n}.weight": initial.blocks(o["n_state"]) for n in ("q", "k", "v", "beta")}
        return initial.wrapper(o) | maps | {"w_beta.bias": 2.0}

    def parts(self, o, p, s, x):
        q, k, v, beta = (p[f"w_{n}.weight"] @ x for n in ("q", "k", "v", "beta"))
        q, k, v, f = (a.reshape(o["n_heads"], -1) for a in (q, k, v, sigmoid(beta + p["w_beta.bias"])))
        rho = (np.sum(k * k, -1, keepdims=True) + 1e-12) ** -0.5
        delta = v - np.einsum("hkv,hk->hv", s["S"], k * rho)
        return q, k * rho, rho, f, delta, np.tanh(s["S"] * f[:, None] + (k * rho)[..., None] * delta[:, None])

    def step(self, o, p, s, x, z):
        q, *_, S = self.parts(o, p, s, x)
        return self_gate(np.einsum("hkv,hk->hv", S, q).ravel()), {"S": S}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        q, k, rho, f, delta, S = self.parts(o, p, s, x)
        do = gy.reshape(q.shape) * self_gate_slope(np.einsum("hkv,hk->hv", S, q))
        P = (gs["S"] + q[..., None] * do[:, None]) * (1 - S * S)
        d_beta, dv = np.sum(P * s["S"], 1) * f * (1 - f), np.einsum("hkv,hk->hv", P, k)
        dk = np.einsum("hkv,hv->hk", P, delta) - np.einsum("hkv,hv->hk", s["S"], dv)
        dk = rho * (dk - k * np.sum(k * dk, -1, keepdims=True))
        deltas = {"w_q": np.einsum("hkv,hv->hk", S, do), "w_k": dk, "w_v": dv, "w_beta": d_beta}
        dp, dx = maps_gradient(p, x, {n: d.ravel() for n, d in deltas.items()})
        return dp, {"S": P * f[:, None] - k[..., None] * dv[:, None]}, dx, None
