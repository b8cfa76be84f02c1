"""Kimi delta attention and Gated DeltaNet 2 against their equations in NumPy, and how fla is called."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from elman_authors.testing import initial, sigmoid, silu
from elman_baselines.kda import op
from elman_baselines.kda.op import rule

from elman_core.model import LadderLM

from .library_contract import LibraryContract

# fla's functions as it documents them.


def kda_as_documented(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel):  # type: ignore[no-untyped-def]
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    return rule(q, k, v, g, (beta[..., None],) * 2, initial_state)


def gdn2_as_documented(q, k, v, g, b, w, initial_state, output_final_state, use_qk_l2norm_in_kernel):  # type: ignore[no-untyped-def]
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    assert b.shape == k.shape
    assert w.shape == v.shape
    assert w.dtype == v.dtype
    return rule(q, k, v, g, (b, w), initial_state)


def norm_as_documented(x, g, weight, bias, activation, eps):  # type: ignore[no-untyped-def]
    assert bias is None
    assert activation == "sigmoid"
    return F.rms_norm(x, weight.shape, weight, eps) * F.sigmoid(g)


def by_hand(
    config: Any, p: dict[str, np.ndarray], x: np.ndarray, conv: np.ndarray, s: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row of real positions, head by head: outputs, last window, last state."""
    (heads, wide, values), keep, most = s.shape, len(conv), 2.0 if config.allow_neg_eigval else 1.0
    window, s, out = [*conv], s.copy(), np.zeros_like(x)
    taps = np.concatenate([p[f"{n}_conv1d.weight"][:, 0] for n in "qkv"])
    for t in range(len(x)):
        window.append(np.concatenate([p[f"{n}_proj.weight"] @ x[t] for n in "qkv"]))
        mixed = silu(sum(taps[:, j] * window[j - keep - 1] for j in range(keep + 1)))
        q, k, v = np.split(mixed, [heads * wide, 2 * heads * wide])
        a = np.log1p(np.exp(p["f_proj.1.weight"] @ (p["f_proj.0.weight"] @ x[t]) + p["dt_bias"]))
        gate = sigmoid(p["g_proj.1.weight"] @ (p["g_proj.0.weight"] @ x[t]) + p["g_proj.1.bias"])
        erase, y = most * sigmoid(p["b_proj.weight"] @ x[t]), np.zeros(heads * values)
        write = sigmoid(p["w_proj.weight"] @ x[t]) if "w_proj.weight" in p else np.repeat(erase, values)
        erase = erase if "w_proj.weight" in p else np.repeat(erase, wide)
        for h in range(heads):
            key, part = slice(h * wide, (h + 1) * wide), slice(h * values, (h + 1) * values)
            qh, kh = (z[key] / np.sqrt(z[key] @ z[key] + 1e-6) for z in (q, k))
            s[h] = np.exp(-np.exp(p["A_log"][h]) * a[key])[:, None] * s[h]
            s[h] = s[h] + np.outer(kh, write[part] * v[part] - s[h].T @ (erase[key] * kh))
            o = s[h].T @ qh / np.sqrt(wide)
            y[part] = o / np.sqrt(np.mean(o**2) + 1e-5) * p["o_norm.weight"] * gate[part]
        out[t] = p["o_proj.weight"] @ y
    return out, np.array(window[-keep:]), s


class TestKimiDelta(LibraryContract):
    variant = "kda"
    options = (
        {"head_dim": 8},
        {"head_dim": 4, "n_heads": 3, "expand_v": 1.5, "d_conv": 2, "init": "linear", "allow_neg_eigval": True},
    )
    equations = ({"head_dim": 8, "init": "zero"},)
    op, library, extra = op, "fla", "fla"
    by_hand, states = staticmethod(by_hand), ("conv", "S")
    ways = (op.Kernels(*[kda_as_documented] * 2, *[gdn2_as_documented] * 2, norm_as_documented),)
    maps = "qkvbo"

    def initial_values(self, o: Any) -> dict[str, Any]:
        drawn = initial.linear if o["init"] == "linear" else initial.NORMAL
        maps = [f"{n}_proj" for n in self.maps] + [f"{n}_proj.{i}" for n in "fg" for i in (0, 1)]
        laws = {f"{n}.weight": drawn for n in maps} | {f"{n}_conv1d.weight": drawn for n in "qkv"}
        laws |= {"o_proj.weight": 0.0} if o["init"] == "zero" else {}
        return laws | initial.decays(1.0) | {"g_proj.1.bias": 0.0, "o_norm.weight": 1.0}


class TestGatedDelta2(TestKimiDelta):
    variant = "gdn2"
    maps = "qkvbwo"
    kernels = ()  # the one of kda


@pytest.mark.parametrize("one_gate", [True, False])
def test_the_rule_is_flas(one_gate: bool) -> None:
    """Its plain functions compute in float32."""
    name = "kda" if one_gate else "gdn2"
    naive = getattr(pytest.importorskip(f"fla.ops.{name}.naive"), f"naive_recurrent_{name}")
    draw = torch.Generator().manual_seed(1)
    q, k, v, log, b, w, s = (
        torch.randn(2, 9, 3, n, generator=draw) if n else torch.randn(2, 3, 8, 6, generator=draw)
        for n in (8, 8, 6, 8, *((1, 1) if one_gate else (8, 6)), 0)
    )
    leaves = [x.requires_grad_() for x in (q, k, v, -log.exp(), b.sigmoid(), w.sigmoid(), s)]
    q, k, v, log, b, w, s = leaves
    unit = [F.normalize(x, dim=-1) for x in (q, k)]
    more = {"beta": b[..., 0]} if one_gate else {"b": b, "w": w}
    theirs = naive(*unit, v, log, **more, initial_state=s, output_final_state=True)
    ours = rule(q, k, v, log, (b, b if one_gate else w), s)
    wanted, found = (
        [
            *each,
            *torch.autograd.grad(sum(x.sin().sum() for x in each), [x for x in leaves if x is not w or not one_gate]),
        ]
        for each in (theirs, ours)
    )
    for actual, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-5)


def test_the_gate_of_writing_has_the_dtype_of_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "kernels", lambda *_: TestGatedDelta2.ways[0])
    model = LadderLM("gdn2", dim=16, depth=1, options={"head_dim": 8})
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randint(256, (2, 5))).logits.float().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in model.parameters())
