"""M²RNN: everything a variant promises, its layer in NumPy, and its published size."""

import numpy as np
import torch
from elman_authors.testing import VariantContract, initial, sigmoid, silu, silu_slope
from elman_authors.testing.oracle import Convolution

from elman_core.registry import resolve
from elman_core.size import count


class Row:
    """One row of the layer."""

    def __init__(self, o, p, x_TD, start, begins):
        self.o, self.p, self.x, self.begins = o, p, x_TD, begins
        T, (H, V, _), K = len(x_TD), p["w_h"].shape, o["n_state"]
        n = (1 if o["shared_keys"] else H) * K
        self.edges = [n, 2 * n, 2 * n + H * V, 2 * n + H * V + H]
        projected = x_TD @ p["in_proj.weight"].T
        u, self.f_raw, self.g = np.split(projected, self.edges[2:], 1)
        self.u = u
        if o["use_conv"]:
            self.conv = Convolution(u, p["conv.weight"], 0, start["conv"], begins)
            self.u, u = self.conv.out, silu(self.conv.out)
        q, k, v = np.split(u, self.edges[:2], 1)
        self.q, self.k, self.v = q.reshape(T, -1, K), k.reshape(T, -1, K), v.reshape(T, H, V)
        self.dt = self.f_raw + p["dt_bias"]
        self.f = np.exp(-np.exp(p["A_log"]) * np.log1p(np.exp(self.dt)))
        self.states, self.Z = [start["S"]], []
        for t in range(T):
            S, f = self.before(t), self.f[t, :, None, None]
            self.Z.append(np.tanh(S @ p["w_h"] + self.k[t][..., None] * self.v[t][:, None]))
            self.states.append(f * S + (1 - f) * self.Z[t])
        self.read = np.einsum("thkv,thk->thv", np.array(self.states[1:]), np.broadcast_to(self.q, (T, H, K)))
        self.y = (self.read + p["d"] * self.v).reshape(T, H * V)
        self.gated = self.y * (silu(self.g) if o["use_gate"] else 1)
        self.rho = (np.mean(self.gated**2, -1, keepdims=True) + 1e-5) ** -0.5
        self.mixed = self.gated * self.rho * p["o_norm.weight"] if o["use_output_norm"] else self.gated
        self.out, self.end = self.mixed @ p["out_proj.weight"].T, {"S": self.states[-1]}
        if o["use_conv"]:
            self.end["conv"] = self.conv.window

    def before(self, t):
        return self.states[t] * (not self.begins[t])

    def backward(self, grads, g_out_TD, g_end):
        o, p, T = self.o, self.p, len(self.x)
        grads["out_proj.weight"] += g_out_TD.T @ self.mixed
        d = g_out_TD @ p["out_proj.weight"]
        if o["use_output_norm"]:
            grads["o_norm.weight"] += np.sum(d * self.gated * self.rho, 0)
            d = d * p["o_norm.weight"]
            d = d * self.rho - self.gated * self.rho**3 * np.mean(d * self.gated, -1, keepdims=True)
        dg = d * self.y * silu_slope(self.g) if o["use_gate"] else np.zeros((T, 0))
        dy = (d * (silu(self.g) if o["use_gate"] else 1)).reshape(self.v.shape)
        grads["d"] += np.sum(dy * self.v, 0)
        dq, dk, dv, df, dS = (
            np.zeros_like(self.q),
            np.zeros_like(self.k),
            dy * p["d"],
            np.zeros_like(self.f),
            g_end["S"],
        )
        for t in reversed(range(T)):
            before, Z, f = self.before(t), self.Z[t], self.f[t, :, None, None]
            of_q = np.einsum("hkv,hv->hk", self.states[t + 1], dy[t])
            dS = dS + self.q[t][..., None] * dy[t][:, None]
            df[t] = np.sum(dS * (before - Z), (1, 2))
            P = (1 - f) * dS * (1 - Z * Z)
            of_k = np.einsum("hkv,hv->hk", P, self.v[t])
            dq[t], dk[t] = (x.sum(0, keepdims=True) if o["shared_keys"] else x for x in (of_q, of_k))
            dv[t] += np.sum(P * self.k[t][..., None], 1)
            grads["w_h"] += before.swapaxes(1, 2) @ P
            dS = (f * dS + P @ p["w_h"].swapaxes(1, 2)) * (not self.begins[t])
        rate = -df * self.f * np.exp(p["A_log"])
        grads["A_log"] += np.sum(rate * np.log1p(np.exp(self.dt)), 0)
        d_dt = rate * sigmoid(self.dt)
        grads["dt_bias"] += d_dt.sum(0)
        du, start = np.concatenate([a.reshape(T, -1) for a in (dq, dk, dv)], 1), {"S": dS}
        if o["use_conv"]:
            du, start["conv"], dw, _ = self.conv.backward(du * silu_slope(self.u), g_end["conv"])
            grads["conv.weight"] += dw
        whole = np.concatenate([du, d_dt, dg], 1)
        grads["in_proj.weight"] += whole.T @ self.x
        return whole @ p["in_proj.weight"], start


class TestM2RNN(VariantContract):
    variant = "m2rnn"
    options = (
        {"n_heads": 3, "n_state": 4},
        {"n_heads": 2, "n_state": 4, "expansion": 0.5, "shared_keys": True, "use_conv": True, "use_output_norm": True},
        {"n_heads": 2, "n_state": 4, "use_gate": False},
    )
    row = Row

    def initial_values(self, o):
        maps = {f"{n}_proj.weight": initial.xavier for n in ("in", "out")}
        return (
            maps
            | initial.decays(1e-4)
            | {
                "w_h": lambda w: torch.eye(w.shape[-1]),
                "d": 1.0,
                "conv.weight": initial.NORMAL,
                "o_norm.weight": 1.0,
            }
        )


def test_the_published_model_has_its_size_in_its_vocabulary():
    found = resolve("m2rnn:h370n16")
    assert count(found, 1920, 21, vocab_size=50_281) == 1_307_101_140
