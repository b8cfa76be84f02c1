"""`x_gated`: everything a variant promises, and its equation in NumPy."""

import numpy as np
from elman_authors.testing import VariantContract, initial, silu, silu_slope


class TestXGated(VariantContract):
    variant = "x_gated"
    options = (
        {},
        {"gate": "projected", "use_conv": True, "mamba2_init": True},
        {"r_h_mode": "none", "mamba2_init": "s4d"},
    )

    def initial_values(self, o):
        return (
            initial.wrapper(o) | initial.dense(o, "w_h") | {"b_g": 0.0, "w_g.weight": initial.xavier, "w_g.bias": 0.0}
        )

    def parts(self, o, p, s, x):
        h = np.tanh(p["w_x.weight"] @ x + p["w_h"] @ s["h"] + p["w_x.bias"])
        return h, p["w_g.weight"] @ x + p["w_g.bias"] if o["gate"] == "projected" else x + p["b_g"]

    def step(self, o, p, s, x, z):
        h, m = self.parts(o, p, s, x)
        return h * silu(m), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        h, m = self.parts(o, p, s, x)
        da, dm = (gy * silu(m) + gs["h"]) * (1 - h * h), gy * h * silu_slope(m)
        dp, dx = {"w_x.weight": np.outer(da, x), "w_h": np.outer(da, s["h"]), "w_x.bias": da}, p["w_x.weight"].T @ da
        if o["gate"] == "projected":
            return (
                {**dp, "w_g.weight": np.outer(dm, x), "w_g.bias": dm},
                {"h": p["w_h"].T @ da},
                dx + p["w_g.weight"].T @ dm,
                None,
            )
        return {**dp, "b_g": dm}, {"h": p["w_h"].T @ da}, dx + dm, None
