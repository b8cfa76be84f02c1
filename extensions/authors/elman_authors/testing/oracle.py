"""The parts of oracles: NumPy, forward and backward derived by hand, nothing shared with the implementation.

`Row` is the whole oracle of a vector-state variant but one step of its cell, which the plugin's test writes from the equation.
Everything is for one row, without its masked positions: T steps, D model width, I inner width, K width of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
EPS = 1e-8


def sigmoid(a: Array) -> Array:
    """1 / (1 + exp(-a))."""
    return 1 / (1 + np.exp(-a))


def silu(a: Array) -> Array:
    """a sigmoid(a)."""
    return a * sigmoid(a)


def silu_slope(a: Array) -> Array:
    """The derivative of `silu`."""
    return sigmoid(a) * (1 + a * (1 - sigmoid(a)))


def self_gate(h: Array) -> Array:
    """h silu(h)."""
    return h * h * sigmoid(h)


def self_gate_slope(h: Array) -> Array:
    """The derivative of `self_gate`."""
    return h * sigmoid(h) * (2 + h * (1 - sigmoid(h)))


def maps_gradient(p: Arrays, x: Array, deltas: Arrays) -> tuple[Arrays, Array]:
    """Gradients of every W and b and of x, for maps W x or W x + b; `deltas`: the gradient of each output by name."""
    of_p = {f"{n}.weight": np.outer(d, x) for n, d in deltas.items()}
    of_p |= {f"{n}.bias": d for n, d in deltas.items() if f"{n}.bias" in p}
    return of_p, sum((p[f"{n}.weight"].T @ d for n, d in deltas.items()), np.zeros_like(x))


class Cell(Protocol):
    """The interface of a plugin's oracle: one time step of one row.

    o: the options by name. p: the parameters by name, a recurrent matrix with its spectral norm applied. s: the state before
    the step. x: the cell's input (I,). z: the gate input (I,), or None.
    """

    initial: Mapping[str, str]
    """{state: parameter} for every state that starts with a learned value; the others start with zeros."""

    def step(self, o: Mapping[str, Any], p: Arrays, s: Arrays, x: Array, z: Array | None) -> tuple[Array, Arrays]:
        """(y, the state after the step)."""

    def step_gradient(
        self, o: Mapping[str, Any], p: Arrays, s: Arrays, x: Array, z: Array | None, gy: Array, gs: Arrays
    ) -> tuple[Arrays, Arrays, Array, Array | None]:
        """For the gradients of y and of the state after the step: those of p (zero ones may be left out), s, x and z."""


def scaled(w: Array, radius: float, u: Array, v: Array) -> Array:
    """The spectral norm: W radius / (|sigma| + eps), sigma = uᵀ W v."""
    return w * radius / (abs(u @ w @ v) + EPS)


def scaled_gradient(gradient: Array, w: Array, radius: float, u: Array, v: Array) -> Array:
    """The gradient with respect to W; u and v are constants, sigma is not."""
    sigma = u @ w @ v
    size = abs(sigma) + EPS
    return radius / size * (gradient - np.sign(sigma) * np.sum(gradient * w) / size * np.outer(u, v))


class Convolution:
    """A causal depthwise convolution of u (T, I) whose window is empty again where a document begins.

    w: (I, 1, K). bias: (I,), or 0. window: (K - 1, I), the inputs before the first.
    """

    def __init__(self, u: Array, w: Array, bias: Array | float, window: Array, begins: Array) -> None:
        self.w, self.begins, self.seen = w[:, 0].T, begins, []  # seen: the K inputs of every step
        for t in range(len(u)):
            window = np.zeros_like(window) if begins[t] else window
            self.seen.append(np.vstack([window, u[t]]))
            window = self.seen[-1][1:]
        self.window = window.copy()
        self.out = np.array([(self.w * seen).sum(0) for seen in self.seen]).reshape(u.shape) + bias

    def backward(self, d: Array, g_window: Array) -> tuple[Array, Array, Array, Array]:
        """Gradients of u, of the window before the first step, of w and of the bias."""
        du, dw, g_window = np.zeros_like(d), np.zeros_like(self.w), g_window.copy()
        for t in reversed(range(len(d))):
            dw += d[t] * self.seen[t]
            g_seen = self.w * d[t] + np.vstack([np.zeros_like(d[:1]), g_window])
            du[t], g_window = g_seen[-1], g_seen[:-1] * (not self.begins[t])
        return du, g_window, dw.T[:, None], d.sum(0)


@dataclass
class Form:
    """The form of the wrapper around the cell: attributes of the mixer, and the treatment of its recurrent matrix."""

    gated: bool
    pre_silu: bool
    matrix: str = ""  # its name; the cell is given it as it is used
    low_rank: bool = False  # it is a product of the parameters NAME.u and NAME.v
    spectral: bool = False  # it is spectrally normalised

    @classmethod
    def of(cls, mixer: Any) -> Form:
        """Return the form of a `WrapperMixer`."""
        matrix = getattr(mixer, "matrix", "")
        names = {name for name, _ in (*mixer.named_parameters(), *mixer.named_buffers())}
        return cls(mixer.gated, mixer.pre_silu, matrix, f"{matrix}.u" in names, "spectral.u" in names)


def _returned(function: str, given: Any, *parts: str) -> Any:
    made = len(given) if isinstance(given, tuple) else 0
    got = f"{made} parts" if made else f"a {type(given).__name__}"
    assert made == len(parts), f"{function} must return ({', '.join(parts)}), not {got}"
    return given


def _checked(what: str, given: Arrays, wanted: Arrays, every: bool = True) -> Arrays:
    """The same. Raises `AssertionError` for a name that is unknown or, if `every`, missing, and for a wrong shape."""
    names = f"{what} of {', '.join(given) or 'nothing'}, where there are {', '.join(wanted)}"
    assert given.keys() == wanted.keys() if every else given.keys() <= wanted.keys(), names
    for name, x in given.items():
        assert np.shape(x) == wanted[name].shape, f"{what} of {name} has shape {np.shape(x)}, not {wanted[name].shape}"
    return given


class Row:
    """One row: forward on construction, then `backward`.

    Args:
        p: parameters and buffers by name. x_TD: inputs. start: the state before them. begins: T flags, True where a document
            starts. keep_TI: what dropout multiplied the cell's outputs by.
    """

    def __init__(
        self,
        cell: Cell,
        form: Form,
        o: Mapping[str, Any],
        p: Arrays,
        x_TD: Array,
        start: Arrays,
        begins: Array,
        keep_TI: Array,
    ) -> None:
        self.cell, self.form, self.o, self.p, self.x, self.begins, self.keep = cell, form, o, p, x_TD, begins, keep_TI
        self.cell_p = dict(p)
        if form.low_rank:
            self.cell_p[form.matrix] = p[f"{form.matrix}.u"] @ p[f"{form.matrix}.v"]
        if form.spectral:
            self.bare = self.cell_p[form.matrix]
            self.cell_p[form.matrix] = scaled(self.bare, o["spectral_radius"], p["spectral.u"], p["spectral.v"])
        projected = x_TD @ p["in_proj.weight"].T
        inner = len(p["in_proj.weight"]) // (2 if form.gated else 1)
        self.u, self.z = projected[:, :inner], projected[:, inner:] if form.gated else None
        self.c = self.u
        if o["use_conv"]:
            self.conv = Convolution(self.u, p["conv.weight"], p["conv.bias"], start["conv"], begins)
            self.c = self.conv.out
        self.a = silu(self.c) if form.pre_silu else self.c
        self.states, self.y = [{n: s for n, s in start.items() if n != "conv"}], np.zeros_like(keep_TI)
        for t in range(len(x_TD)):
            made = cell.step(o, self.cell_p, self._before(t), self.a[t], self._z(t))
            self.y[t], after = _returned("step", made, "y", "states")
            self.states.append(_checked("step returns states", after, self.states[0]))
        self.out = (self.y * keep_TI) @ p["out_proj.weight"].T
        self.end = dict(self.states[-1])
        if o["use_conv"]:
            self.end["conv"] = self.conv.window

    def _z(self, t: int) -> Array | None:
        return None if self.z is None else self.z[t]

    def _before(self, t: int) -> Arrays:
        """The state from which step t begins."""
        if not self.begins[t]:
            return self.states[t]
        learned = self.cell.initial
        return {n: self.p[learned[n]] if n in learned else np.zeros_like(s) for n, s in self.states[t].items()}

    def backward(self, grads: Arrays, g_out_TD: Array, g_end: Arrays) -> tuple[Array, Arrays]:
        """Adds every parameter's gradient to `grads`; returns those of x and of the initial state."""
        p, o, steps = self.p, self.o, len(self.x)
        grads["out_proj.weight"] += g_out_TD.T @ (self.y * self.keep)
        gy = (g_out_TD @ p["out_proj.weight"]) * self.keep
        gs = {n: g for n, g in g_end.items() if n != "conv"}
        da, dz = np.zeros_like(self.a), None if self.z is None else np.zeros_like(self.z)
        matrix = self.form.matrix
        of_cell: Arrays = {n: np.zeros_like(g) for n, g in grads.items()}
        if self.form.low_rank:
            of_cell[matrix] = np.zeros_like(self.cell_p[matrix])
        for t in reversed(range(steps)):
            made = self.cell.step_gradient(o, self.cell_p, self._before(t), self.a[t], self._z(t), gy[t], gs)
            found, gs, da[t], dz_t = _returned("step_gradient", made, "those of p", "of s", "of x", "of z or None")
            _checked("step_gradient returns gradients", gs, self.states[0])
            for name, g in _checked("step_gradient returns gradients", found, of_cell, every=False).items():
                of_cell[name] += g
            if dz is not None:
                dz[t] = dz_t
            if self.begins[t]:
                for state, parameter in self.cell.initial.items():
                    of_cell[parameter] += gs[state]
                gs = {n: np.zeros_like(g) for n, g in gs.items()}
        if self.form.spectral:
            norm = o["spectral_radius"], p["spectral.u"], p["spectral.v"]
            of_cell[matrix] = scaled_gradient(of_cell[matrix], self.bare, *norm)
        if self.form.low_rank:
            product = of_cell.pop(matrix)
            of_cell[f"{matrix}.u"], of_cell[f"{matrix}.v"] = product @ p[f"{matrix}.v"].T, p[f"{matrix}.u"].T @ product
        for name, g in of_cell.items():
            grads[name] += g
        dc = da * silu_slope(self.c) if self.form.pre_silu else da
        start = dict(gs)
        du = dc
        if o["use_conv"]:
            du, start["conv"], dw, db = self.conv.backward(dc, g_end["conv"])
            grads["conv.weight"] += dw
            grads["conv.bias"] += db
        both = du if dz is None else np.concatenate([du, dz], 1)
        grads["in_proj.weight"] += both.T @ self.x
        return both @ p["in_proj.weight"], start
