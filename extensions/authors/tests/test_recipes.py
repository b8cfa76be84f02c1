"""The recipes of docs/how-to/variant.md work as they stand there."""

import re
from pathlib import Path

from broken_plugins import run_contracts
from elman_authors.scaffold import render

PAGE = (Path(__file__).parents[3] / "docs/how-to/variant.md").read_text(encoding="utf-8")
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
from elman_authors.testing import VariantContract

class TestMean(VariantContract):
    variant = "mean"
"""
TWICE_TEST = """
import numpy as np
from elman_authors.testing import VariantContract, maps_gradient, self_gate, self_gate_slope, sigmoid


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

MEMORY_CELLS = """
#pragma once
#include <elman/elementwise_cell.h>
#include <elman/matrix_state_cell.h>

namespace elman::memory {
struct Cell : MatrixCell {
  static constexpr int scalars = 2;
  static constexpr bool squashes = false, scalar_keep = true, delta = true;

  template <class Math, class T>
  static ELMAN_HD MatrixLine<T> line(MatrixIn<T> x) {
    return {x.c[0], x.c[1] * x.in[0]};
  }
  template <class Math, class T>
  static ELMAN_HD MatrixGrad<Cell, T> line_backward(MatrixLine<T> d, MatrixIn<T> x) {
    return {T(0), {x.c[1] * d.write}, {d.keep, d.write * x.in[0]}};
  }
};

struct Stabiliser {
  static constexpr int streams = 2, vectors = 0, states = 1;

  template <class Math, class T>
  static ELMAN_HD ElementwiseOut<Stabiliser, T> forward(const T* prev, const T* x, const T*) {
    const T kept = x[0] + prev[0];
    return {{kept > x[1] ? kept : x[1]}, kept - x[1]};
  }
  template <class Math, class T>
  static ELMAN_HD ElementwiseGrad<Stabiliser, T> backward(T gy, const T* gh, const T*, const T* prev, const T* x, const T*) {
    const bool keeps = x[0] + prev[0] > x[1];
    const T kept = gy + (keeps ? gh[0] : T(0));
    return {{kept}, {kept, (keeps ? T(0) : gh[0]) - gy}, {}};
  }
};
}  // namespace elman::memory
"""
MEMORY_HEAD = """
from dataclasses import dataclass
from pathlib import Path
import torch
from torch import nn
from elman_core import option
from torch.nn import functional as F
from elman_core.kernels import ElementwiseKernel, MatrixKernel
from elman_core.nn import (
    MatrixForm, MatrixWrapperConfig, MatrixWrapperMixer, compute_dtype, matrix_reference, xavier_uniform_,
)

@dataclass(frozen=True)
class MemoryConfig(MatrixWrapperConfig):
    n_heads: int = option(2, "number H of heads", ge=1, le=8)

@matrix_reference
def memory_reference(s, k, v, f, i):
    return f * s + i * k * v

HEADER = Path(__file__).parent / "csrc" / "memory_cell.h"
mlstm = MatrixKernel("memory", header=HEADER, reference=memory_reference, scalars=("f", "i"), delta=True)

"""
MEMORY_TAIL = """
    def build_cell(self, inner):
        super().build_cell(inner)
        self.w_f, self.w_i = (nn.Linear(inner, self.config.n_heads, bias=False) for _ in range(2))

    def reset_cell(self):
        super().reset_cell()
        for module in (self.w_f, self.w_i):
            xavier_uniform_(module.weight)

stabiliser = ElementwiseKernel(
    "memory_m", header=HEADER, cell="elman::memory::Stabiliser", step=stabiliser_step, streams=("log_f", "log_i"), states=("m",)
)
MemoryMixer = MlstmMixer
"""
MEMORY_TEST = """
import numpy as np
from elman_authors.testing import VariantContract, maps_gradient, sigmoid


class TestMemory(VariantContract):
    variant = "memory"
    options = ({"n_state": 4}, {"n_state": 8, "n_heads": 3, "use_conv": True})

    def parts(self, o, p, s, x):
        q, k, v = ((p[f"w_{n}.weight"] @ x).reshape(o["n_heads"], -1) for n in "qkv")
        v = np.concatenate((v, np.ones((len(v), 1))), 1)
        z, log_i = p["w_f.weight"] @ x, p["w_i.weight"] @ x
        kept = s["m"] - np.logaddexp(0, -z)
        m = np.maximum(kept, log_i)
        f, i = np.exp(kept - m), np.exp(log_i - m)
        S = f[:, None, None] * s["S"] + i[:, None, None] * k[..., None] * v[:, None]
        return q, k, v, z, kept > log_i, m, f, i, S, np.einsum("hkv,hk->hv", S, q)

    def step(self, o, p, s, x, z):
        *_, m, _, _, S, o = self.parts(o, p, s, x)
        return (o[:, :-1] / np.maximum(np.abs(o[:, -1]), np.exp(-m))[:, None]).ravel(), {"S": S, "m": m}

    def step_gradient(self, o, p, s, x, z, gy, gs):
        q, k, v, z, keeps, m, f, i, S, o = self.parts(o, p, s, x)
        gy, least, n = gy.reshape(len(q), -1), np.exp(-m), o[:, -1]
        divisor = np.maximum(np.abs(n), least)
        d_divisor = -np.sum(gy * o[:, :-1], 1) / divisor**2
        above = np.abs(n) > least
        do = np.concatenate((gy / divisor[:, None], (d_divisor * np.sign(n) * above)[:, None]), 1)
        P = gs["S"] + q[..., None] * do[:, None]
        d_f, d_i = np.sum(P * s["S"], (1, 2)) * f, np.einsum("hkv,hk,hv->h", P, k, v) * i
        d_m = gs["m"] - d_divisor * least * ~above - d_f - d_i
        d_kept = d_f + d_m * keeps
        deltas = {
            "w_q": np.einsum("hkv,hv->hk", S, do), "w_k": i[:, None] * np.einsum("hkv,hv->hk", P, v),
            "w_v": i[:, None] * np.einsum("hkv,hk->hv", P, k)[:, :-1], "w_f": d_kept * sigmoid(-z), "w_i": d_i + d_m * ~keeps,
        }
        dp, dx = maps_gradient(p, x, {n: d.ravel() for n, d in deltas.items()})
        return dp, {"S": f[:, None, None] * P, "m": d_kept}, dx, None
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
    memory, _ = render("memory", tmp_path, skeleton="matrix")
    (memory / "elman_memory/op.py").write_text("from .mixer import mlstm as memory, stabiliser\n")
    init = memory / "elman_memory/__init__.py"
    both = init.read_text().replace("import memory\n", "import memory, stabiliser\n")
    init.write_text(both.replace("=memory.specs()", "=(*memory.specs(), *stabiliser.specs())"))
    (memory / "elman_memory/mixer.py").write_text(MEMORY_HEAD + code("def stabiliser_step") + MEMORY_TAIL)
    (memory / "elman_memory/csrc/memory_cell.h").write_text(MEMORY_CELLS)
    (memory / "tests/test_memory.py").write_text(MEMORY_TEST)
    run_contracts([twice, mean, memory], "equation or pieces or packed or masked or declared or whole")
