"""E2: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, silu, silu_slope
from elman_authors.testing.oracle import EPS


class TestE2(VariantContract):
    variant = "e2"
    options = (
        {"slots": 3},
        {"slots": 2, "share_wx": True, "mamba2_init": True},
        {"slots": 2, "r_h_mode": "none", "use_conv": True},
    )
    equations = ({"slots": 3, "spectral_radius": 0.2},)  # the factor is constant: finite differences would not agree

    def initial_values(self, o):
        return initial.wrapper(o) | {
            "w_x.weight": initial.NORMAL if o["mamba2_init"] else initial.blocks(self.dim),
            "w_x.bias": 0.0,
            "b": 0.0,
            "w_h": initial.orthogonal(0.495),
            "c": 1 / o["slots"],
        }

    def parts(self, o, p, s, x):
        """The slots' W_x, W_h as they are used, the clip's factors, and the slots after the step."""
        n = o["slots"]
        w_x = p["w_x.weight"].reshape(-1, len(x), len(x)).repeat(n if o["share_wx"] else 1, axis=0)
        factor = np.ones(n)
        if o["r_h_mode"] == "clip":
            sigma = np.einsum("si,sij,sj->s", p["clip.u"], p["w_h"], p["clip.v"])
            factor = np.minimum(1, o["spectral_radius"] / (np.abs(sigma) + EPS))
        w_h = p["w_h"] * factor[:, None, None]
        b = p["b" if o["share_wx"] else "w_x.bias"].reshape(n, -1)
        return w_x, w_h, factor, np.tanh(w_x @ x + np.einsum("sij,sj->si", w_h, s["h"]) + b)

    def step(self, o, p, s, x, z):
        h = self.parts(o, p, s, x)[-1]
        return p["c"] @ h * silu(z), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        w_x, w_h, factor, h = self.parts(o, p, s, x)
        g_mix = gy * silu(z)
        da = (np.outer(p["c"], g_mix) + gs["h"]) * (1 - h * h)
        dw_x = np.einsum("si,j->sij", da, x)
        dp = {"w_h": np.einsum("si,sj->sij", da, s["h"]) * factor[:, None, None], "c": h @ g_mix}
        dp["w_x.weight"] = dw_x.sum(0) if o["share_wx"] else dw_x.reshape(-1, len(x))
        dp["b" if o["share_wx"] else "w_x.bias"] = da.reshape(-1)
        dh = np.einsum("sij,si->sj", w_h, da)
        return dp, {"h": dh}, np.einsum("sij,si->j", w_x, da), gy * (p["c"] @ h) * silu_slope(z)
