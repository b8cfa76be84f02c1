"""Time the causal convolution on one GPU beside causal-conv1d's and flash-linear-attention's, in one run.

    python benchmarks/causal_conv.py [--out benchmarks/results/causal_conv_h100.json]

Microseconds, medians; x in bf16, weights in float32, as in a trainer; four taps, no bias, with and without SiLU; backward: all
gradients. x is (B, T, C), whole or the first C columns of a wider tensor, as one product of several maps leaves it. bytes: how
long a copy takes that moves as many bytes as x and y have, or x and the gradients of both. `padded`: this half of every row is
padding. Each is first compared with float64; `error` is the largest relative L2 error of its output and gradients. What is not
installed or fails has its reason in its row; causal-conv1d needs its extension.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from baseline_parity import errors
from dense import attempt
from elementwise import both, measure
from machine import commit, facts
from tables import RESULTS
from torch import Tensor

from elman_core.kernels.causal_conv.op import causal_conv
from elman_core.kernels.causal_conv.portable import reference

SHAPES = [(64, 512, 3072), (64, 512, 2560), (32, 512, 1024), (4, 4096, 2048), (1, 16384, 2048)]
"""(B, T, C): E88 with 32 heads of 32 and Gated DeltaNet at 26.6M parameters, E1, longer texts."""
BESIDE = 1280  # columns of what lies beside x
REPEATS = 30

Run = Callable[..., Tensor]


def elman(x_BTC: Tensor, weight_CK: Tensor, silu: bool, mask_TB: Tensor | None = None) -> Tensor:
    return causal_conv(x_BTC.transpose(0, 1), weight_CK, mask_TB=mask_TB, silu=silu)[0].transpose(0, 1)


def causal_conv1d(x_BTC: Tensor, weight_CK: Tensor, silu: bool) -> Tensor:
    run = importlib.import_module("causal_conv1d").causal_conv1d_fn
    y: Tensor = run(x_BTC.transpose(1, 2), weight_CK, activation="silu" if silu else None).transpose(1, 2)
    return y


def fla(x_BTC: Tensor, weight_CK: Tensor, silu: bool) -> Tensor:
    run = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    y: Tensor = run(x_BTC, weight_CK, activation="silu" if silu else None)[0]
    return y


def exact(x_BTC: Tensor, weight_CK: Tensor, silu: bool, mask_TB: Tensor | None = None) -> Tensor:
    return reference(x_BTC.transpose(0, 1), weight_CK, None, None, mask_TB, None, silu)[0].transpose(0, 1)


KINDS: dict[str, Run] = {"elman": elman, "causal-conv1d": causal_conv1d, "fla": fla}


class Problem:
    """Random inputs, and what the reference makes of them in float64."""

    def __init__(self, shape: tuple[int, int, int], sliced: bool, silu: bool, padded: str = "") -> None:
        (B, T, C), draw = shape, torch.Generator("cuda").manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=draw, device="cuda")

        self.dy = normal(B, T, C).bfloat16()
        self.given: dict[str, Any] = {"silu": silu}
        if padded:
            there_T = (torch.arange(T, device="cuda") >= T // 2) == (padded == "left")
            self.given["mask_TB"] = there_T[:, None].repeat(1, B)
            self.dy *= there_T[:, None]
        self.leaves = [normal(B, T, C + BESIDE * sliced).bfloat16()[..., :C], 0.5 * normal(C, 4)]
        self.truth = self.results(exact, torch.float64)

    def results(self, run: Run, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """y and the gradients of x and the weight, in float64; inputs in another dtype where one is given."""
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in self.leaves]
        y = run(*leaves, **self.given)
        # In padding, where dy is 0, y may be anything.
        found = y * (self.dy != 0), *torch.autograd.grad(y, leaves, self.dy.to(y.dtype))
        return {n: x.detach().double() for n, x in zip(("y", "dx", "dweight"), found, strict=True)}

    def error(self, run: Run) -> float:
        return float(f"{max(errors(self.results(run), self.truth).values()):.1e}")

    def times(self, run: Run) -> dict[str, float]:
        leaves = [x.detach().requires_grad_() for x in self.leaves]
        return {"error": self.error(run), **both(lambda: run(*leaves, **self.given), leaves, REPEATS)}


def copy_us(numbers: int) -> float:
    """What a copy takes that reads and writes this many bf16 numbers in all."""
    to, of = (torch.empty(numbers // 2, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return measure(lambda: to.copy_(of), REPEATS)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "causal_conv_h100.json")
    parser.add_argument("--commit", default=commit())
    given = parser.parse_args(argv)
    os.environ.setdefault("ELMAN_KERNELS", "require")
    made: dict[str, Any] = {"what": "see the docstring of benchmarks/causal_conv.py", **facts(given.commit), "rows": []}

    def add(**row: Any) -> None:
        made["rows"].append(row)
        print(json.dumps(row), flush=True)
        given.out.write_text(json.dumps(made, indent=1) + "\n")

    for shape in SHAPES:
        numbers = math.prod(shape)
        add(what="bytes", shape=shape, forward=copy_us(2 * numbers), backward=copy_us(3 * numbers))
        for sliced, silu in itertools.product((True, False), repeat=2):
            problem = Problem(shape, sliced, silu)
            for kind, run in KINDS.items():
                found = attempt(problem.times, run)
                found = found if isinstance(found, dict) else {"reason": found}
                add(what=kind, shape=shape, sliced=sliced, silu=silu, **found)
        for padded in ("left", "right"):
            found = Problem(shape, sliced=False, silu=True, padded=padded).times(elman)
            add(what="elman", shape=shape, sliced=False, silu=True, padded=padded, **found)


if __name__ == "__main__":
    main()
