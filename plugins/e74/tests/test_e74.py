"""E74: everything a variant promises, and its equations in NumPy."""

import numpy as np
import pytest
import torch
from elman_authors.testing import (
    VariantContract,
    initial,
    maps_gradient,
    self_gate,
    self_gate_slope,
    sigmoid,
    silu,
    silu_slope,
)

from elman_core import ConfigError
from elman_core.registry import resolve

SMALL = {"n_state": 4}
DIAGONAL = {**SMALL, "state": "diagonal"}


def slope(g):
    return g * (1 - g)


class TestE74(VariantContract):
    variant = "e74"
    options = (
        {**SMALL, "use_conv": True},
        {**SMALL, "proj": "full", "nonlinearity": "linear", "mamba2_init": True},
        {**SMALL, "update": "ema", "gate": "input", "proj": "tied_kvq"},
        {**SMALL, "gate": "retain", "nonlinearity": "rmsnorm"},
        {**DIAGONAL, "update": "simple"},
    )
    equations = (
        *({**SMALL, "update": update} for update in ("residual", "ntm", "retrieved_gate", "surprise_gate")),
        *({**SMALL, "gate": gate} for gate in ("state", "input")),
        {**SMALL, "nonlinearity": "frobnorm"},
        {**SMALL, "update": "simple", "proj": "tied_kq"},
        DIAGONAL,
        {**DIAGONAL, "update": "ema"},
        {**DIAGONAL, "gate": "state"},
        {**DIAGONAL, "gate": "retain", "nonlinearity": "linear"},
    )

    def initial_values(self, o):
        maps = {f"w_{n}.weight": initial.xavier for n in ("q", "k", "v", "z", "alpha", "e", "w", "g", "zg")}
        gates = {
            "b_alpha": 2.0,
            "d_g": 0.5,
            "b_g": 0.0,
            "b_e": 0.0,
            "b_w": 0.0,
            "rho": 0.1,
            "w_z.bias": 1.0,
            "w_zg.bias": 0.0,
        }
        return initial.wrapper(o) | maps | gates | {"log_alpha": -0.1 if o["state"] == "diagonal" else 0.0}

    def parts(self, o, p, s, x):
        """By name what a step needs; R is the new state before phi. Of a full state keys are rows."""
        out = {n[2:-7]: w @ x + p.get(f"{n[:-7]}.bias", 0) for n, w in p.items() if n.startswith("w_") and w.ndim == 2}
        k = out["k"]
        rho = (k @ k + 1e-12) ** -0.5
        c = {"k": k * rho, "rho": rho, "v": out.get("v", k), "q": out.get("q", k), "z": out.get("z", 1.0), "of": out}
        k, v, full, c["g"] = c["k"], c["v"], o["state"] == "full", 1.0
        S = c["before"] = s["S"][0] if full else s["S"].ravel()
        outer = np.outer if full else np.multiply
        c["delta"] = v - S.T @ (c["z"] * k) if full else v - S * k
        match o["gate"] if o["gate"] in ("retain", "state") else o["update"]:
            case "retain" | "state" as kind:
                c["size"] = np.mean(S * S, 0) if full else S
                c["g"] = sigmoid((p["d_g"] * c["size"] + p["b_g"]) * (-1 if kind == "retain" else 1))
                c["R"] = S + outer(k, c["g"] * c["delta"])
            case "simple":
                c["keep"] = sigmoid(p["log_alpha"])
                c["R"] = c["keep"] * S + outer(k, v)
            case "ema":
                c["keep"] = sigmoid(out["alpha"] + p["b_alpha"])
                c["R"] = c["keep"] * S + outer(k, (1 - c["keep"]) * v)
            case "residual":
                c["tau"] = np.tanh(outer(k, c["delta"]))
                c["R"] = S + p["rho"] * c["tau"]
            case "ntm":
                c["e"], c["w"] = sigmoid(out["e"] + p["b_e"]), sigmoid(out["w"] + p["b_w"])
                c["R"] = S * (1 - np.outer(k, c["e"])) + np.outer(k, c["w"] * v)
            case kind:
                if kind != "delta":
                    more = np.mean(c["delta"] ** 2) if kind == "surprise_gate" else 0
                    c["g"] = sigmoid(out["g"] + p["b_g"] + more)
                c["R"] = S + outer(k, c["g"] * c["delta"])
        c["m"] = {"rmsnorm": np.sqrt(np.mean(c["R"] ** 2)), "frobnorm": np.linalg.norm(c["R"])}.get(o["nonlinearity"])
        c["S"] = np.tanh(c["R"]) if o["nonlinearity"] == "tanh" else c["R"] / (1.0 if c["m"] is None else c["m"] + 1e-6)
        c["o"] = c["S"].T @ c["q"] if full else c["S"] * c["q"]
        return c

    def step(self, o, p, s, x, z):
        c = self.parts(o, p, s, x)
        y = c["o"] * silu(c["of"]["zg"]) if o["gate"] == "input" else self_gate(c["o"])
        return y, {"S": c["S"].reshape(s["S"].shape)}

    def through_phi(self, o, c, dS):
        if o["nonlinearity"] in ("tanh", "linear"):
            return dS * (1 - c["S"] ** 2) if o["nonlinearity"] == "tanh" else dS
        m, count = c["m"], c["R"].size if o["nonlinearity"] == "rmsnorm" else 1
        return dS / (m + 1e-6) - c["R"] * np.sum(dS * c["R"]) / ((m + 1e-6) ** 2 * m * count)

    def step_gradient(self, o, p, s, x, z, gy, gs):
        c, full = self.parts(o, p, s, x), o["state"] == "full"
        k, v, S, g, delta = (c[n] for n in ("k", "v", "before", "g", "delta"))
        outer = np.outer if full else np.multiply
        by_value, by_key = (lambda A: A.T @ k, lambda A, b: A @ b) if full else (lambda A: A * k, lambda A, b: A * b)
        d, dp = {}, {}
        do = gy * self_gate_slope(c["o"])
        if o["gate"] == "input":
            do, d["zg"] = gy * silu(c["of"]["zg"]), gy * c["o"] * silu_slope(c["of"]["zg"])
        d["q"] = c["S"] @ do if full else c["S"] * do
        P = self.through_phi(o, c, (gs["S"][0] if full else gs["S"].ravel()) + outer(c["q"], do))
        match o["update"]:
            case "simple":
                keep = np.sum(P * S, keepdims=True).ravel() if full else P * S
                dp["log_alpha"], before = keep * slope(c["keep"]), c["keep"] * P
                d["v"], dk = by_value(P), by_key(P, v)
            case "ema":
                moved = P * (S - outer(k, v))
                d["alpha"] = dp["b_alpha"] = (moved.sum(0) if full else moved) * slope(c["keep"])
                d["v"], dk, before = (1 - c["keep"]) * by_value(P), by_key(P, (1 - c["keep"]) * v), c["keep"] * P
            case "ntm":
                d["e"] = dp["b_e"] = -((P * S).T @ k) * slope(c["e"])
                written = P.T @ k
                d["w"] = dp["b_w"] = written * v * slope(c["w"])
                d["v"], dk = written * c["w"], P @ (c["w"] * v) - (P * S) @ c["e"]
                before = P * (1 - np.outer(k, c["e"]))
            case kind:
                Q = P * p["rho"] * (1 - c["tau"] ** 2) if kind == "residual" else P
                dc = by_value(Q) * delta
                e = g * by_value(Q)
                extra = 0
                if kind == "residual":
                    dp["rho"] = np.sum(P * c["tau"], 0)
                elif o["gate"] in ("retain", "state"):
                    ell = dc * slope(g) * (-1 if o["gate"] == "retain" else 1)
                    dp["d_g"], dp["b_g"] = ell * c["size"], ell
                    extra = ell * p["d_g"] * (2 / len(k) * S if full else 1)
                elif kind in ("retrieved_gate", "surprise_gate"):
                    d["g"] = dp["b_g"] = dc * slope(g)
                    e = e + (2 / len(k) * d["g"].sum() * delta if kind == "surprise_gate" else 0)
                back = by_key(S, e)
                d["v"], dk, before = e, by_key(Q, g * delta) - c["z"] * back, P - outer(c["z"] * k, e) + extra
                d["z"] = -k * back
        d["k"] = c["rho"] * (dk - k * (k @ dk))
        for tied in {"q", "v"} - c["of"].keys():
            d["k"] = d["k"] + d[tied]
        of_maps, dx = maps_gradient(p, x, {f"w_{n}": d[n] for n in c["of"]})
        return {**of_maps, **dp}, {"S": before.reshape(s["S"].shape)}, dx, None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"gate": "retain", "update": "ema"}, "gate retain is of what update delta writes"),
        ({"proj": "full", "update": "ntm"}, "z would be projected for nothing"),
        ({"state": "diagonal", "proj": "full"}, "never used z"),
        ({"state": "diagonal", "update": "residual"}, "update residual of a diagonal state was delta"),
        ({"state": "diagonal", "nonlinearity": "frobnorm"}, "were never run"),
    ],
)
def test_a_combination_without_a_meaning_is_refused(options, why):
    found = resolve("e74", options)
    with pytest.raises(ConfigError, match=why):
        found.variant.check(16, found.config)


@pytest.mark.parametrize("norm", ["rmsnorm", "frobnorm"])
def test_inputs_of_zero_give_gradients_under_a_norm(norm):
    found = resolve("e74", {**SMALL, "nonlinearity": norm})
    mixer = found.variant.branch(0)(16, found.config)
    x_BTD = torch.randn(1, 4, 16)
    x_BTD[:, 0] = 0  # so that the first state is 0
    mixer(x_BTD)[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())
