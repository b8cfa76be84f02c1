"""E88 written from its equations in NumPy, forward and backward derived by hand: shares nothing with the implementation.

One row at a time, without its masked positions, and one head at a time. T steps, D model width, H heads, N key width, V value
width, C channels of q, k, v together. o = {option: value}, p = {parameter: array}.
"""

import numpy as np
from elman_authors.testing import sigmoid, silu, silu_slope
from elman_authors.testing.oracle import Convolution


def softmax(a):
    e = np.exp(a - a.max())
    return e / e.sum()


class Row:
    """Forward on construction; `backward` adds to a dict of gradients."""

    def __init__(self, o, p, x_TD, start, begins):
        self.p, self.o, self.x, self.start, self.begins = p, o, x_TD, start, begins
        T, H, N = len(x_TD), o["n_heads"], o["n_state"]
        V = int(N * o["expansion"])
        self.sizes = T, H, N, V
        self._project()
        self.decay, self.dt = self._decays()
        self.write = np.ones((T, H))
        if o["use_write_gate"]:
            self.gate, self.most = sigmoid(x_TD @ p["write_gate_proj.weight"].T), o["write_scale"]
            if o["linear_state"]:
                self.most = np.minimum(self.most, 1 + self.decay)
            self.write = self.most * self.gate
        self.states = np.zeros((T + 1, H, N, V))  # S_0 … S_T
        self.states[0] = start["S"]
        self.read = np.zeros((T, H, V))
        for t in range(T):
            for h in range(H):
                before, k = self.before(t)[h], self.kn[t, h]
                delta = self.v[t, h] - before.T @ k
                a = self.decay[t, h] * before + self.write[t, h] * np.outer(k, delta)
                self.states[t + 1, h] = a if o["linear_state"] else np.tanh(a)
                self.read[t, h] = self.states[t + 1, h].T @ self.qn[t, h]
        self._finish()
        self.end = {"S": self.states[T]}
        if o["use_conv"]:
            self.end["conv"] = self.conv.window

    def before(self, t):
        """The states from which step t begins."""
        return self.states[t] * (not self.begins[t])

    def _project(self):
        p, o, (T, H, N, V) = self.p, self.o, self.sizes
        self.u = self.x @ p["qkv_proj.weight"].T
        if o["use_conv"]:
            self.conv = Convolution(self.u, p["conv.weight"], 0, self.start["conv"], self.begins)
            self.u = self.conv.out
        s = silu(self.u) if o["use_silu"] else self.u
        self.q, self.k = s[:, : H * N].reshape(T, H, N), s[:, H * N : 2 * H * N].reshape(T, H, N)
        self.v = self.k if o["tie_kv"] else s[:, 2 * H * N :].reshape(T, H, V)
        self.qn, self.q_rho = self._normal(self.q)
        self.kn, self.k_rho = self._normal(self.k)

    def _normal(self, a):
        rho = (np.sum(a * a, -1, keepdims=True) + 1e-12) ** -0.5 if self.o["l2_norm"] else None
        return (a if rho is None else a * rho), rho

    def _decays(self):
        p, (T, H, _, _) = self.p, self.sizes
        match self.o["decay"]:
            case "mamba":
                a = self.x @ p["a_proj.weight"].T + p["dt_bias"]
                return np.exp(-np.exp(p["A_log"]) * np.log1p(np.exp(a))), a
            case "simple":
                return sigmoid(self.x @ p["beta_proj.weight"].T), None
            case "constant":
                return np.tile(sigmoid(p["decay_logit"]), (T, 1)), None
        return np.ones((T, H)), None

    def _finish(self):
        p, o, (T, H, _, V) = self.p, self.o, self.sizes
        self.residual = self.read + (p["value_residual"] * self.v if o["value_residual"] else 0)
        self.normed = self.residual
        if o["use_output_norm"]:
            self.rms = (np.mean(self.residual**2, -1, keepdims=True) + o["output_norm_eps"]) ** -0.5
            self.normed = self.residual * self.rms * p["o_norm.weight"]
        self.gated = self.normed
        if o["use_gate"]:
            self.g = (self.x @ p["g_proj.weight"].T).reshape(T, H, V)
            self.gated = self.normed * (silu(self.g) if o["gate_activation"] == "silu" else sigmoid(self.g))
        mix = o["head_mix"]
        if mix in ("concat", "per_head"):
            self.mixed = self.gated.reshape(T, H * V)
        else:
            logits = np.zeros((T, H))
            if mix == "weighted_sum":
                logits = np.tile(p["head_weights"], (T, 1))
            elif mix == "input_weighted":
                logits = self.x @ p["head_attn.weight"].T
            self.weights = np.ones((T, H)) if mix == "sum" else np.array([softmax(a) for a in logits]).reshape(T, H)
            self.mixed = np.einsum("th,thv->tv", self.weights, self.gated)
        self.out = self.mixed @ p["o_proj.weight"].T

    def backward(self, grads, g_out_TD, g_end):
        """Adds every parameter's gradient to `grads`; returns those of x and of the initial state."""
        T, H, N, V = self.sizes
        self.dx = np.zeros_like(self.x)
        dv = np.zeros((T, H, V))
        d_read = self._unfinish(grads, g_out_TD, dv)
        dq, dk = np.zeros((T, H, N)), np.zeros((T, H, N))
        d_decay, d_write = np.zeros((T, H)), np.zeros((T, H))
        dS = g_end["S"].copy()
        for t in reversed(range(T)):
            for h in range(H):
                before, after, k = self.before(t)[h], self.states[t + 1, h], self.kn[t, h]
                lam, beta = self.decay[t, h], self.write[t, h]
                dy = d_read[t, h]
                delta = self.v[t, h] - before.T @ k
                dq[t, h] = after @ dy
                G = dS[h] + np.outer(self.qn[t, h], dy)
                P = G if self.o["linear_state"] else G * (1 - after**2)
                w = P.T @ k
                d_delta = beta * w
                d_decay[t, h], d_write[t, h] = np.sum(P * before), w @ delta
                dv[t, h] += d_delta
                dk[t, h] = beta * (P @ delta) - before @ d_delta
                dS[h] = (lam * P - np.outer(k, d_delta)) * (not self.begins[t])
        self._undecay(grads, d_decay, d_write)
        start = {"S": dS}
        self._unproject(grads, dq, dk, dv, g_end.get("conv"), start)
        return self.dx, start

    def _linear(self, grads, name, d_TC):
        """Backward of a projection of x."""
        grads[f"{name}.weight"] += d_TC.T @ self.x
        self.dx += d_TC @ self.p[f"{name}.weight"]

    def _unfinish(self, grads, g_out, dv):
        p, o, (T, H, _, V) = self.p, self.o, self.sizes
        grads["o_proj.weight"] += g_out.T @ self.mixed
        d = g_out @ p["o_proj.weight"]
        if o["head_mix"] in ("concat", "per_head"):
            d = d.reshape(T, H, V)
        else:
            dw = np.einsum("tv,thv->th", d, self.gated)
            dl = self.weights * (dw - np.sum(self.weights * dw, -1, keepdims=True))
            if o["head_mix"] == "weighted_sum":
                grads["head_weights"] += dl.sum(0)
            elif o["head_mix"] == "input_weighted":
                self._linear(grads, "head_attn", dl)
            d = self.weights[:, :, None] * d[:, None, :]
        if o["use_gate"]:
            silu_gate = o["gate_activation"] == "silu"
            slope = silu_slope(self.g) if silu_gate else sigmoid(self.g) * (1 - sigmoid(self.g))
            self._linear(grads, "g_proj", (d * self.normed * slope).reshape(T, H * V))
            d = d * (silu(self.g) if silu_gate else sigmoid(self.g))
        if o["use_output_norm"]:
            u, r = self.residual, self.rms
            grads["o_norm.weight"] += np.sum(d * u * r, (0, 1))
            d = d * p["o_norm.weight"]
            d = d * r - u * r**3 * np.mean(d * u, -1, keepdims=True)
        if o["value_residual"]:
            grads["value_residual"] += np.sum(d * self.v, 0)
            dv += d * p["value_residual"]
        return d

    def _undecay(self, grads, d_decay, d_write):
        p = self.p
        if self.o["use_write_gate"]:
            self._linear(grads, "write_gate_proj", d_write * self.write * (1 - self.gate))
            if self.o["linear_state"] and self.o["write_scale"] > 1:
                d_decay = d_decay + d_write * self.gate * (1 + self.decay < self.o["write_scale"])
        match self.o["decay"]:
            case "mamba":
                g, A = d_decay * self.decay, np.exp(p["A_log"])
                grads["A_log"] += np.sum(-g * A * np.log1p(np.exp(self.dt)), 0)
                da = -g * A * sigmoid(self.dt)
                grads["dt_bias"] += da.sum(0)
                self._linear(grads, "a_proj", da)
            case "simple":
                self._linear(grads, "beta_proj", d_decay * self.decay * (1 - self.decay))
            case "constant":
                grads["decay_logit"] += np.sum(d_decay * self.decay * (1 - self.decay), 0)

    def _unproject(self, grads, dq, dk, dv, g_window, start):
        o, T = self.o, self.sizes[0]
        if o["l2_norm"]:
            dq = self.q_rho * (dq - self.qn * np.sum(self.qn * dq, -1, keepdims=True))
            dk = self.k_rho * (dk - self.kn * np.sum(self.kn * dk, -1, keepdims=True))
        if o["tie_kv"]:
            parts = [dq, dk + dv]
        else:
            parts = [dq, dk, dv]
        d = np.concatenate([a.reshape(T, -1) for a in parts], 1)
        d = d * silu_slope(self.u) if o["use_silu"] else d
        if o["use_conv"]:
            d, start["conv"], dw, _ = self.conv.backward(d, g_window)
            grads["conv.weight"] += dw
        self._linear(grads, "qkv_proj", d)
