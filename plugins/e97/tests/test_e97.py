"""E97: everything a variant promises, and its layer in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, sigmoid, silu, silu_slope
from elman_authors.testing.oracle import Convolution

SMALL = {"n_heads": 3, "n_state": 4}


class Row:
    """One row of the layer, with every option at its default but those of `TestE97.options`."""

    def __init__(self, o, p, x_TD, start, begins):
        self.o, self.p, self.x, self.begins = o, p, x_TD, begins
        T, H, N = len(x_TD), o["n_heads"], o["n_state"]
        of_x = {
            n.removesuffix(".weight"): x_TD @ w.T
            for n, w in p.items()
            if n.endswith("_proj.weight") and n != "o_proj.weight"
        }
        self.u = of_x["qkv_proj"]
        if o["use_conv"]:
            self.conv = Convolution(self.u, p["conv.weight"], 0, start["conv"], begins)
            self.u = self.conv.out
        self.u = self.u.reshape(T, 3, H, N)
        q, k, self.v = silu(self.u).swapaxes(0, 1)
        (self.q, self.q_rho), (self.k, self.k_rho) = self.unit(q), self.unit(k)
        self.w = sigmoid(of_x["value_write_gate_proj"]).reshape(T, H, N)
        self.b = np.zeros((T, H, N)) if o["raw_write"] else sigmoid(of_x["erase_gate_proj"]).reshape(T, H, N)
        self.write = o["write_scale"] * (sigmoid(of_x["write_gate_proj"]) if o["use_write_gate"] else np.ones((T, H)))
        self.a = of_x["a_proj"] + p["dt_bias"]
        self.decay = np.exp(-np.exp(p["A_log"]) * np.log1p(np.exp(self.a)))
        self.g = of_x["g_proj"].reshape(T, H, N)
        self.states, self.delta = [start["S"]], np.zeros((T, H, N))
        for t in range(T):
            S = self.before(t)
            self.delta[t] = self.w[t] * self.v[t] - np.einsum("hkv,hk->hv", S, self.b[t] * self.k[t])
            new = self.decay[t, :, None, None] * S + self.outer(self.write[t, :, None] * self.k[t], self.delta[t])
            self.states.append(new if o["linear_state"] else np.tanh(new))
        self.read = np.einsum("thkv,thk->thv", np.array(self.states[1:]), self.q)
        self.weight, self.scale, self.unit_read = 1.0, 1.0, self.read
        if o["use_output_norm"]:
            self.weight = p["o_norm.weight"]
            self.scale = (np.mean(self.read**2, -1, keepdims=True) + o["output_norm_eps"]) ** -0.5
            self.unit_read = self.read * self.scale
        self.mixed = (self.unit_read * self.weight * silu(self.g)).reshape(T, H * N)
        self.out, self.end = self.mixed @ p["o_proj.weight"].T, {"S": self.states[-1]}
        if o["use_conv"]:
            self.end["conv"] = self.conv.window

    def before(self, t):
        return self.states[t] * (not self.begins[t])

    @staticmethod
    def unit(a):
        rho = (np.sum(a * a, -1, keepdims=True) + 1e-12) ** -0.5
        return a * rho, rho

    @staticmethod
    def outer(a, b):
        return a[..., :, None] * b[..., None, :]

    def backward(self, grads, g_out_TD, g_end):
        T, dS = len(self.x), g_end["S"]
        grads["o_proj.weight"] += g_out_TD.T @ self.mixed
        dy = (g_out_TD @ self.p["o_proj.weight"]).reshape(self.g.shape)
        d = {"g_proj": dy * self.unit_read * self.weight * silu_slope(self.g)}
        dy = dy * silu(self.g)
        if self.o["use_output_norm"]:
            grads["o_norm.weight"] += np.sum(dy * self.unit_read, (0, 1))
            dy = dy * self.weight
            dy = self.scale * (dy - self.unit_read * np.mean(dy * self.unit_read, -1, keepdims=True))
        dq, dk, dv, dw, db = (np.zeros_like(self.v) for _ in range(5))
        d_decay, d_write = np.zeros_like(self.decay), np.zeros_like(self.decay)
        for t in reversed(range(T)):
            S, before, k, write = self.states[t + 1], self.before(t), self.k[t], self.write[t, :, None]
            dq[t] = np.einsum("hkv,hv->hk", S, dy[t])
            P = (dS + self.outer(self.q[t], dy[t])) * (1 if self.o["linear_state"] else 1 - S * S)
            written = np.einsum("hkv,hk->hv", P, k)
            e, d_write[t] = write * written, np.sum(written * self.delta[t], -1)
            d_decay[t] = np.sum(P * before, (1, 2))
            dv[t], dw[t] = self.w[t] * e, self.v[t] * e
            dc = -np.einsum("hkv,hv->hk", before, e)
            dk[t], db[t] = write * np.einsum("hkv,hv->hk", P, self.delta[t]) + self.b[t] * dc, k * dc
            dS = (self.decay[t, :, None, None] * P - self.outer(self.b[t] * k, e)) * (not self.begins[t])
        dq = self.q_rho * (dq - self.q * np.sum(self.q * dq, -1, keepdims=True))
        dk = self.k_rho * (dk - self.k * np.sum(self.k * dk, -1, keepdims=True))
        d["qkv_proj"] = (np.stack([dq, dk, dv], 1) * silu_slope(self.u)).reshape(T, -1)
        start = {"S": dS}
        if self.o["use_conv"]:
            d["qkv_proj"], start["conv"], of_taps, _ = self.conv.backward(d["qkv_proj"], g_end["conv"])
            grads["conv.weight"] += of_taps
        d["value_write_gate_proj"], d["erase_gate_proj"] = dw * self.w * (1 - self.w), db * self.b * (1 - self.b)
        d["write_gate_proj"] = d_write * self.write * (1 - self.write / self.o["write_scale"])
        rate = -d_decay * self.decay * np.exp(self.p["A_log"])
        grads["A_log"] += np.sum(rate * np.log1p(np.exp(self.a)), 0)
        d["a_proj"] = rate * sigmoid(self.a)
        grads["dt_bias"] += d["a_proj"].sum(0)
        dx = np.zeros_like(self.x)
        for name in d.keys() & {n.removesuffix(".weight") for n in self.p}:
            of_map = d[name].reshape(T, -1)
            grads[f"{name}.weight"] += of_map.T @ self.x
            dx += of_map @ self.p[f"{name}.weight"]
        return dx, start


class TestE97(VariantContract):
    variant = "e97"
    options = (
        SMALL,
        {**SMALL, "linear_state": True, "use_write_gate": True},
        {**SMALL, "raw_write": True, "use_write_gate": True, "write_scale": 2.0},
        {**SMALL, "use_conv": True},
        {**SMALL, "use_output_norm": True, "output_norm_eps": 0.01},
    )
    row = Row

    def initial_values(self, o):
        plain = {f"{n}_proj.weight": initial.xavier for n in ("qkv", "a", "g", "o")}
        gates = {f"{n}_gate_proj.weight": initial.linear for n in ("write", "erase", "value_write")}
        return plain | gates | initial.decays() | {"conv.weight": initial.linear, "o_norm.weight": 1.0}
