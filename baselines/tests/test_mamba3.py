"""Mamba-3 against its equations in NumPy, and how mamba_ssm is called."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from elman_authors.testing import initial, sigmoid, silu
from elman_baselines.gdn.mixer import GONE
from elman_baselines.mamba3 import op

from elman_core.registry import ConfigError

from .library_contract import LibraryContract


def siso_as_documented(
    Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, Input_States, chunk_size, return_final_states
):  # type: ignore[no-untyped-def]  # fmt: skip
    """mamba_ssm's function as it documents it: the sum over pairs of steps that its chunks are, from the initial state."""
    assert (Input_States, chunk_size, return_final_states) == (None, 64, True)
    share = Trap.sigmoid()
    angle = (Angles.tanh() * math.pi * DT.mT[..., None]).cumsum(1)
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (
        torch.cat([torch.view_as_real(torch.view_as_complex(x[..., : 2 * n].unflatten(-1, (n, 2)).contiguous()) * turn)
                   .flatten(-2), x[..., 2 * n :]], -1)
        for n in (angle.shape[-1],) for x in (Q + Q_bias, K + K_bias)
    )  # fmt: skip
    later = F.pad((DT * (1 - share))[..., 1:], (0, 1))
    log = ADT.cumsum(-1)
    decay = (log[..., :, None] - log[..., None, :]).exp().tril()
    weight = (DT * share + later)[..., None, :] * decay - torch.diag_embed(later)
    y = torch.einsum("bthn,bshn,bhts,bshp->bthp", q, k, weight, V) + D[:, None] * V
    ssm = torch.einsum("bhs,bshn,bshp->bhpn", (DT * share + later) * decay[..., -1, :], k, V)
    return y * F.silu(Z), angle[:, -1] % (2 * math.pi), ssm, k[:, -1], V[:, -1]


def by_hand(
    config: Any, p: dict[str, np.ndarray], u: np.ndarray, angle: np.ndarray, s: np.ndarray, shift: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One row of real positions, head by head: outputs, last angles, last state, last key and value."""
    (heads, n, wide), turns, out = s.shape, angle.shape[1], np.zeros_like(u)
    angle, s, inner = angle.copy(), s.copy(), heads * wide
    keys, values = shift[0, : heads * n].reshape(heads, n).copy(), shift[0, heads * n :].reshape(heads, wide).copy()

    def norm(x: np.ndarray, weight: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2) + 1e-5) * p[weight]

    for t in range(len(u)):
        widths = np.cumsum([inner, inner, n, n, heads, heads, heads])
        z, x, b, c, dt, a, share, theta = np.split(p["in_proj.weight"] @ u[t], widths)
        y = np.zeros(inner)
        for h in range(heads):
            part = slice(h * wide, (h + 1) * wide)
            step = np.log1p(np.exp(dt[h] + p["dt_bias"][h]))
            decay, new = np.exp(-max(np.log1p(np.exp(a[h])), 1e-4) * step), sigmoid(share[h])
            angle[h] += math.pi * np.tanh(theta) * step
            turn = np.eye(n)
            for i in range(turns):
                cos, sin = np.cos(angle[h, i]), np.sin(angle[h, i])
                turn[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[cos, -sin], [sin, cos]]
            k = turn @ (norm(b, "B_norm.weight") + p["B_bias"][h, 0])
            q = turn @ (norm(c, "C_norm.weight") + p["C_bias"][h, 0])
            s[h] = decay * (s[h] + (1 - new) * step * np.outer(keys[h], values[h])) + new * step * np.outer(k, x[part])
            keys[h], values[h] = k, x[part]
            y[part] = s[h].T @ q + p["D"][h] * x[part]
        out[t] = p["out_proj.weight"] @ (y * silu(z))
    angle -= 2 * math.pi * np.round(angle / (2 * math.pi))
    return out, angle, s, np.concatenate([keys.ravel(), values.ravel()])[None]


class TestMamba3(LibraryContract):
    variant = "mamba3"
    options = (
        {"headdim": 8, "d_state": 8},
        {"headdim": 4, "d_state": 12, "expand": 1.5, "rope_fraction": 1.0, "init_depth": 3},
    )
    op, library, extra = op, "mamba_ssm", "mamba"
    by_hand, states, ways = staticmethod(by_hand), ("angle", "S", "shift"), (siso_as_documented,)

    def initial_values(self, o: Any) -> dict[str, Any]:
        out = (lambda w: w * math.sqrt(o["init_depth"] or 1), initial.linear)
        ones = dict.fromkeys(("D", "B_bias", "C_bias", "B_norm.weight", "C_norm.weight"), 1.0)
        step = initial.decays()["dt_bias"]
        return {"in_proj.weight": initial.linear, "out_proj.weight": out, "dt_bias": step} | ones

    def test_a_width_without_whole_heads_is_refused(self) -> None:
        variant = self.declared()
        with pytest.raises(ConfigError, match=r"= 200, which must be a multiple of headdim 64; nearest: 192"):
            variant.check(100, variant.make_config())


def test_documents_begin_where_alpha_is_zero() -> None:
    """What mamba_ssm's kernel is given for packed rows, with the states that it then ends in."""
    torch.manual_seed(0)
    B, T, H, N, P, R = 3, 23, 2, 8, 6, 3

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    keys, biases, x_BTHP = (drawn(B, T, N), drawn(B, T, N)), (drawn(H, N), drawn(H, N)), drawn(B, T, H, P)
    dt, log, share, turn = drawn(B, T, H).exp(), -drawn(B, T, H).exp() / 9, drawn(B, T, H).sigmoid(), drawn(B, T, H, R)
    starts_BT = torch.zeros(B, T, dtype=torch.bool)
    starts_BT[0, [0, 5, 6, 22]] = starts_BT[1, 13] = True
    turn.requires_grad_()
    wanted = op.scan(keys, biases, x_BTHP, (dt, log, share), turn, None, None, starts_BT)
    y, end = op.scan(keys, biases, x_BTHP, (dt, log.masked_fill(starts_BT[..., None], GONE), share), turn, None)
    for a, b in zip((y, *op.from_last_start(end, turn, starts_BT)), (wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        gradients = (torch.autograd.grad(x.square().sum(), turn, retain_graph=True)[0] for x in (a, b))
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)
