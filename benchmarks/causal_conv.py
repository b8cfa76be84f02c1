"""Time the causal convolution on one GPU beside causal-conv1d's and flash-linear-attention's, in one run.

    python benchmarks/causal_conv.py [--out benchmarks/results/causal_conv_h100.json]

Microseconds, medians, bf16, four taps, no bias, with and without SiLU; backward: all gradients. x is (B, T, C), whole or the
first C columns of a wider tensor, as one product of several maps leaves it. bytes: how long a copy takes that moves as many
bytes as x and y have, or x and the gradients of both. Each is first compared with float64; `error` is the largest relative L2
error of its output and gradients. Peers run where they are installed; causal-conv1d needs its CUDA extension.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import commit, facts
from timing import milliseconds
from torch import Tensor

from elman_core.kernels.causal_conv.op import causal_conv
from elman_core.kernels.causal_conv.reference import reference

HERE = Path(__file__).parent
SHAPES = [(64, 512, 3072), (64, 512, 2560), (32, 512, 1024), (4, 4096, 2048), (1, 16384, 2048)]
"""(B, T, C): E88 with 32 heads of 32 and Gated DeltaNet at 26.6M parameters, E1, longer texts."""
BESIDE = 1280  # columns of what lies beside x

Run = Callable[[Tensor, Tensor, bool], Tensor]


def elman(x_BTC: Tensor, weight_CK: Tensor, silu: bool) -> Tensor:
    return causal_conv(x_BTC.transpose(0, 1), weight_CK, silu=silu)[0].transpose(0, 1)


def causal_conv1d(x_BTC: Tensor, weight_CK: Tensor, silu: bool) -> Tensor:
    run = importlib.import_module("causal_conv1d").causal_conv1d_fn
    y: Tensor = run(x_BTC.transpose(1, 2), weight_CK, activation="silu" if silu else None).transpose(1, 2)
    return y


def fla(x_BTC: Tensor, weight_CK: Tensor, silu: bool) -> Tensor:
    run = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    y: Tensor = run(x_BTC, weight_CK, activation="silu" if silu else None)[0]
    return y


KINDS: dict[str, Run] = {"elman": elman, "causal-conv1d": causal_conv1d, "fla": fla}


def inputs(B: int, T: int, C: int, sliced: bool, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, the weight (C, 4), and a gradient of y."""
    draw = torch.Generator(device).manual_seed(0)
    wide = torch.randn(B, T, C + BESIDE * sliced, generator=draw, device=device).bfloat16()
    x, dy = wide[..., :C].detach(), torch.randn(B, T, C, generator=draw, device=device).bfloat16()
    weight = (0.5 * torch.randn(C, 4, generator=draw, device=device)).bfloat16()
    return x.requires_grad_(), weight.requires_grad_(), dy


def results(run: Run, given: tuple[Tensor, Tensor, Tensor], silu: bool) -> list[Tensor]:
    """y and the gradients of x and the weight."""
    x, weight, dy = given
    y = run(x, weight, silu)
    return [y.detach(), *torch.autograd.grad(y, [x, weight], dy)]


def error(found: list[Tensor], given: tuple[Tensor, Tensor, Tensor], silu: bool) -> float:
    """The largest relative L2 error against the reference in float64."""
    x, weight, dy = (g.detach().double() for g in given)

    def exact(x_BTC: Tensor, weight_CK: Tensor, silu: bool) -> Tensor:
        return reference(x_BTC.transpose(0, 1), weight_CK, None, None, None, None, silu)[0].transpose(0, 1)

    wanted = results(exact, (x.requires_grad_(), weight.requires_grad_(), dy), silu)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def copy_us(numbers: int, time_us: Callable[[Callable[[], object]], float]) -> float:
    """What copying takes that reads and writes this many bf16 numbers in all."""
    to, of = (torch.empty(numbers // 2, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return time_us(lambda: to.copy_(of))


def median_us(call: Callable[[], object]) -> float:
    return round(1e3 * statistics.median(milliseconds(call, 30)), 1)


def row(kind: str, shape: tuple[int, int, int], sliced: bool, silu: bool) -> dict[str, Any]:
    about = {"what": kind, **dict(zip("BTC", shape, strict=True)), "sliced": sliced, "silu": silu}
    given, run = inputs(*shape, sliced, "cuda"), KINDS[kind]
    x, weight, dy = given
    try:
        about["error"] = float(f"{error(results(run, given, silu), given, silu):.1e}")
    except (ImportError, RuntimeError) as reason:  # of a peer: not installed, or it refuses the call
        if kind == "elman":
            raise
        return about | {"reason": f"{type(reason).__name__}: {str(reason).splitlines()[0]}"}
    y = run(x, weight, silu)
    about["forward"] = median_us(lambda: run(x, weight, silu))
    about["backward"] = median_us(lambda: torch.autograd.grad(y, [x, weight], dy, retain_graph=True))
    return about


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "causal_conv_h100.json")
    parser.add_argument("--commit", default=commit())
    given = parser.parse_args(argv)
    made: dict[str, Any] = {"what": "see the docstring of benchmarks/causal_conv.py", **facts(given.commit), "rows": []}
    for shape in SHAPES:
        numbers = shape[0] * shape[1] * shape[2]
        bytes_us = {"forward": copy_us(2 * numbers, median_us), "backward": copy_us(3 * numbers, median_us)}
        made["rows"].append({"what": "bytes", **dict(zip("BTC", shape, strict=True)), **bytes_us})
        print(json.dumps(made["rows"][-1]), flush=True)
        for sliced, silu in ((True, True), (False, True), (False, False)):
            for kind in KINDS:
                made["rows"].append(row(kind, shape, sliced, silu))
                print(json.dumps(made["rows"][-1]), flush=True)
                given.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
