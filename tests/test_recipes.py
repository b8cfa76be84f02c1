"""The recipes of docs/how-to/variant.md work as they stand there."""

import re
from pathlib import Path

from test_template import run_contracts

from elman_core.cli._scaffold import render

PAGE = (Path(__file__).parents[1] / "docs/how-to/variant.md").read_text(encoding="utf-8")
MEAN_INIT = """
from elman_core import Mixer, Variant, hookimpl
from .mixer import MeanConfig, MeanMixer

@hookimpl
def elman_variants():
    yield Variant(name="mean", summary="mean", equation="y = W_o mean(W_i x)", config=MeanConfig, mixer=MeanMixer)
"""
MEAN_HEAD = """
from dataclasses import dataclass
import torch
from torch import nn
from elman_core import Mixer
from elman_core.nn import compute_dtype, each_step, hold, restart, xavier_uniform_

@dataclass(frozen=True)
class MeanConfig: ...

"""
MEAN_TEST = """
from elman_core.testing import VariantContract

class TestMean(VariantContract):
    variant = "mean"
"""
TWICE_TEST = """
import numpy as np

from elman_core.testing import VariantContract, maps_gradient, self_gate, self_gate_slope, sigmoid


class TestTwice(VariantContract):
    variant = "twice"
    options = ({"n_state": 4}, {"n_state": 8, "n_heads": 3, "use_conv": True})

    def once(self, o, p, S, x, n):
        k, v, beta = (p[f"w_{m}{n}.weight"] @ x for m in ("k", "v", "beta"))
        k, v, f = (a.reshape(o["n_heads"], -1) for a in (k, v, sigmoid(beta + p[f"w_beta{n}.bias"])))
        rho = (np.sum(k * k, -1, keepdims=True) + 1e-12) ** -0.5
        delta = v - np.einsum("hkv,hk->hv", S, k * rho)
        return k * rho, rho, f, delta, np.tanh(S * f[:, None] + (k * rho)[..., None] * delta[:, None])

    def twice(self, o, p, s, x):
        first = self.once(o, p, s["S"], x, "")
        return (p["w_q.weight"] @ x).reshape(o["n_heads"], -1), first, self.once(o, p, first[-1], x, "2")

    def step(self, o, p, s, x, z):
        q, _, (*_, S) = self.twice(o, p, s, x)
        return self_gate(np.einsum("hkv,hk->hv", S, q).ravel()), {"S": S}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        q, first, second = self.twice(o, p, s, x)
        do = gy.reshape(q.shape) * self_gate_slope(np.einsum("hkv,hk->hv", second[-1], q))
        deltas, G = {"w_q": np.einsum("hkv,hv->hk", second[-1], do)}, gs["S"] + q[..., None] * do[:, None]
        for n, (k, rho, f, delta, S), before in (("2", second, first[-1]), ("", first, s["S"])):
            P = G * (1 - S * S)
            dv = np.einsum("hkv,hk->hv", P, k)
            dk = np.einsum("hkv,hv->hk", P, delta) - np.einsum("hkv,hv->hk", before, dv)
            dk = rho * (dk - k * np.sum(k * dk, -1, keepdims=True))
            deltas |= {f"w_k{n}": dk, f"w_v{n}": dv, f"w_beta{n}": np.sum(P * before, 1) * f * (1 - f)}
            G = P * f[:, None] - k[..., None] * dv[:, None]
        dp, dx = maps_gradient(p, x, {n: d.ravel() for n, d in deltas.items()})
        return dp, {"S": G}, dx, None
"""


def code(start: str) -> str:
    """The block of Python of the page that begins so."""
    (found,) = re.findall(rf"```python\n({re.escape(start)}.*?)```", PAGE, flags=re.DOTALL)
    return found


def test_the_recipes_pass_their_contract(tmp_path: Path) -> None:
    twice, _ = render("twice", tmp_path, skeleton="matrix")
    mixer = twice / "elman_twice" / "mixer.py"
    kept = mixer.read_text().partition("class TwiceMixer")[0]
    mixer.write_text(f"import torch\n{kept}{code('class TwiceMixer')}")
    (twice / "tests/test_twice.py").write_text(TWICE_TEST)
    mean, _ = render("mean", tmp_path, skeleton="reference")
    (mean / "elman_mean/__init__.py").write_text(MEAN_INIT)
    (mean / "elman_mean/mixer.py").write_text(MEAN_HEAD + code("class MeanMixer"))
    (mean / "tests/test_mean.py").write_text(MEAN_TEST)
    run_contracts([twice, mean], "equation or pieces or packed or masked or declared or whole")
