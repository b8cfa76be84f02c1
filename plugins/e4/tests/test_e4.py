"""E4: everything a variant promises, its equation in NumPy, and the spectral norm of its factors."""

import numpy as np
import pytest
import torch
from elman_authors.testing import VariantContract, initial, silu, silu_slope


class TestE4(VariantContract):
    variant = "e4"
    options = ({"rank": 3}, {"use_conv": True, "mamba2_init": True}, {"r_h_mode": "none", "rank": 5})

    def initial_values(self, o):
        return initial.wrapper(o) | {
            "w_h.u": initial.orthogonal(0.3),
            "w_h.v": initial.orthogonal(0.3),
            "w_x.weight": initial.NORMAL if o["mamba2_init"] else initial.xavier,
            "w_x.bias": 0.0,
        }

    def step(self, o, p, s, x, z):
        h = np.tanh(p["w_x.weight"] @ x + p["w_h"] @ s["h"] + p["w_x.bias"])
        return h * silu(z), {"h": h}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        h = np.tanh(p["w_x.weight"] @ x + p["w_h"] @ s["h"] + p["w_x.bias"])
        da = (gy * silu(z) + gs["h"]) * (1 - h * h)
        dp = {"w_x.weight": np.outer(da, x), "w_h": np.outer(da, s["h"]), "w_x.bias": da}
        return dp, {"h": p["w_h"].T @ da}, p["w_x.weight"].T @ da, gy * h * silu_slope(z)

    @pytest.mark.parametrize(
        ("dim", "expansion", "rank"), [(512, 1.0, 256), (512, 2.0, 128), (512, 4.0, 64), (64, 4.0, 16)]
    )
    def test_the_rank_keeps_the_recurrent_parameters_of_e1(self, dim, expansion, rank):
        variant = self.declared()
        assert variant.mixer.rank(dim, variant.make_config({"expansion": expansion})) == rank

    def test_gradients_are_those_of_factors_scaled_by_the_root(self):
        mixer = self.make({"rank": 3}).train()
        factors, norm = mixer.w_h, mixer.spectral
        w = mixer.effective()
        g = torch.randn_like(w)
        found = torch.autograd.grad((w * g).sum(), [factors.u, factors.v])
        (u, v), (a, b) = (x.detach() for x in (factors.u, factors.v)), (norm.u.double(), norm.v.double())
        sigma = a @ u @ v @ b
        c, size = 0.95 / (sigma.abs() + 1e-8), sigma.abs() + 1e-8
        gu, gv = c.sqrt() * g @ v.T, c.sqrt() * u.T @ g
        k = -0.5 * c.sqrt() * sigma.sign() / size * ((gu * u).sum() + (gv * v).sum())
        for made, expected in zip(
            found, (c.sqrt() * gu + k * a.outer(v @ b), c.sqrt() * gv + k * (u.T @ a).outer(b)), strict=True
        ):
            torch.testing.assert_close(made, expected)
