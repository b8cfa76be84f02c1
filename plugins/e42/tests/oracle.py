"""E42 written from its equations in NumPy, forward and backward derived by hand: shares nothing with the implementation.

One row at a time, without its masked positions: T steps, D model width, I inner width, K width of the convolution.
"""

import numpy as np

EPS = 1e-8


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def silu(a):
    return a * sigmoid(a)


def silu_slope(a):
    return sigmoid(a) * (1 + a * (1 - sigmoid(a)))


def scaled(w, radius, u, v):
    """W times radius / (|sigma| + eps), sigma = uᵀ W v."""
    return w * radius / (abs(u @ w @ v) + EPS)


def scaled_adjoint(gradient, w, radius, u, v):
    """The gradient with respect to W, u and v constant."""
    sigma = u @ w @ v
    size = abs(sigma) + EPS
    return radius / size * (gradient - np.sign(sigma) * np.sum(gradient * w) / size * np.outer(u, v))


def power_iteration(w, u, iterations):
    for _ in range(iterations):
        v = w.T @ u
        v = v / (np.linalg.norm(v) + EPS)
        u = w @ v
        u = u / (np.linalg.norm(u) + EPS)
    return u, v


class Row:
    """Forward on construction; `backward` adds to a dict of gradients."""

    def __init__(self, p, radius, x_TD, h0_I, window_KI, keep_TI):
        """p: parameters by name. radius: None without spectral norm. window_KI: None without convolution. keep_TI: dropout."""
        self.p, self.radius, self.x, self.keep = p, radius, x_TD, keep_TI
        w = p["w"]
        self.w = w if radius is None else scaled(w, radius, p["spectral.u"], p["spectral.v"])
        u = [p["in_proj.weight"] @ x for x in x_TD]
        self.window = window_KI
        self.c = u
        if window_KI is not None:
            self.padded = [*window_KI, *u]
            self.taps = p["conv.weight"][:, 0].T
            self.c = [
                p["conv.bias"] + sum(self.taps[j] * self.padded[t + j] for j in range(len(self.taps)))
                for t in range(len(u))
            ]
        self.s = [silu(c) for c in self.c]
        self.h = [h0_I]
        for s in self.s:
            self.h.append(self.w @ s + self.w @ self.h[-1] + p["b"])
        self.y = [k * h * silu(h) for k, h in zip(keep_TI, self.h[1:], strict=True)]
        self.out = [p["out_proj.weight"] @ y for y in self.y]
        self.end = {"h": self.h[-1]}
        if window_KI is not None:
            self.end["conv"] = np.array(self.padded[len(u) :])

    def backward(self, grads, g_out_TD, g_end):
        """Adds every parameter's gradient to `grads`; returns those of x and of the initial state."""
        p, steps = self.p, len(self.s)
        r = g_end["h"]
        du, dw = [None] * steps, np.zeros_like(self.w)
        d_padded = None
        if self.window is not None:
            d_padded = [np.zeros_like(a) for a in self.padded]
            for i, g in enumerate(g_end["conv"]):
                d_padded[steps + i] = d_padded[steps + i] + g
        for t in reversed(range(steps)):
            grads["out_proj.weight"] += np.outer(g_out_TD[t], self.y[t])
            gy = p["out_proj.weight"].T @ g_out_TD[t] * self.keep[t]
            h = self.h[t + 1]
            delta = gy * h * sigmoid(h) * (2 + h * (1 - sigmoid(h))) + r
            r = self.w.T @ delta
            dw += np.outer(delta, self.s[t] + self.h[t])
            grads["b"] += delta
            dc = self.w.T @ delta * silu_slope(self.c[t])
            if self.window is None:
                du[t] = dc
                continue
            grads["conv.bias"] += dc
            for j, tap in enumerate(self.taps):
                grads["conv.weight"][:, 0, j] += dc * self.padded[t + j]
                d_padded[t + j] = d_padded[t + j] + dc * tap
        if self.radius is not None:
            dw = scaled_adjoint(dw, p["w"], self.radius, p["spectral.u"], p["spectral.v"])
        grads["w"] += dw
        start = {"h": r}
        if self.window is not None:
            start["conv"] = np.array(d_padded[: len(self.window)])
            du = d_padded[len(self.window) :]
        dx = np.zeros_like(self.x)
        for t in range(steps):
            grads["in_proj.weight"] += np.outer(du[t], self.x[t])
            dx[t] = p["in_proj.weight"].T @ du[t]
        return dx, start
