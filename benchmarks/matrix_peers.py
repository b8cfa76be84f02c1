"""Time E97 beside Emender's Triton kernels, the same function of the same inputs, in one run on one GPU.

    python benchmarks/matrix_peers.py --emender TREE [--out benchmarks/results/matrix_peers_h200.json]

TREE is a checkout of the peer's repository, of which ndm/triton/e88_triton_forward.py and e88_triton_backward.py are read.
Microseconds, medians, bf16, as in matrix_state.py: q, k, v and gates in; SiLU, L2 norm, split edit and tanh inside.
The peer tunes its forward itself; of its backward the faster of its own setting and one warp counts. times: peer / ours.
differs: |ours - peer| / |peer| over all numbers of the output and of each gradient; the peer keeps its states in bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from machine import commit, facts
from matrix_state import both_us
from torch import Tensor

from elman_core.kernels import Maps

SHAPES = [(32, 512, 32, 16), (32, 512, 32, 32), (4, 2048, 216, 32)]  # (B, T, H, N), V = N
MAPS = Maps(("q", "k", "v"), ("q", "k"))
NAMES = ("q", "k", "erase", "v", "w", "decay")


def emender(tree: Path) -> Any:
    """The peer's module; its packages themselves are not run, for they load every model."""
    for name in ("ndm", "ndm/triton"):
        package: Any = types.ModuleType(name.replace("/", "."))
        package.__path__ = [str(tree / name)]
        sys.modules[package.__name__] = package
    return import_module("ndm.triton.e88_triton_backward")


def inputs(B: int, T: int, H: int, N: int) -> dict[str, Tensor]:
    """By the names of `NAMES`, random leaves; w before its sigmoid."""
    made = {n: torch.randn(B, T, H, N, device="cuda", dtype=torch.bfloat16) for n in ("q", "k", "v", "w", "erase")}
    made["erase"].sigmoid_()
    made["decay"] = torch.rand(B, T, H, device="cuda").mul(0.5).add(0.5).bfloat16().float()
    return {n: x.requires_grad_() for n, x in made.items()}


def ours(x: dict[str, Tensor]) -> tuple[Callable[[], Tensor], list[Tensor]]:
    from elman_e97.op import e97

    return lambda: e97(*(x[n] for n in NAMES), maps=MAPS, backend="cuda")[0], [x[n] for n in NAMES]


def theirs(module: Any, x: dict[str, Tensor]) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """What the peer is called with lies as its model has it: w after the sigmoid, the decay in bf16, T first as a view."""
    given = {**x, "w": torch.sigmoid(x["w"].detach()).requires_grad_()}
    given["decay"] = x["decay"].detach().bfloat16().requires_grad_()
    B, _, H, N = x["q"].shape
    start = torch.zeros(B, H, N, N, device="cuda", dtype=torch.bfloat16)
    q, k, erase, v, w, decay = (given[n].transpose(0, 1) for n in NAMES)
    call = partial(module.e88_triton, start, k, v, q, decay, normalize_kq=True, apply_silu_qkv=True)
    return lambda: call(erase_gate=erase, value_write_gate=w)[0].transpose(0, 1), [given[n] for n in NAMES]


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float(f"{((ours.float() - theirs.float()).norm() / theirs.float().norm()).item():.1e}")


def compare(module: Any, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    x = inputs(*shape)
    mine, leaves = ours(x)
    other, their_leaves = theirs(module, x)
    a, b = mine(), other()
    gradient = torch.randn_like(a)
    da, db = (torch.autograd.grad(o, of, gradient) for o, of in ((a, leaves), (b, their_leaves)))
    w = torch.sigmoid(x["w"].detach().float())
    slope = {"w": w * (1 - w)}
    differs = {"o": apart(a, b)}
    differs |= {f"d{n}": apart(p, r * slope.get(n, 1.0)) for n, p, r in zip(NAMES, da, db, strict=True)}
    del a, b, da, db
    us = both_us(mine, leaves)
    forward, backward = both_us(other, their_leaves, ahead_ms=5)
    own, module.e88_triton_backward = module.e88_triton_backward, partial(module.e88_triton_backward, num_warps=1)
    backward = min(backward, both_us(other, their_leaves, ahead_ms=5)[1])
    module.e88_triton_backward = own
    times = [round(forward / us[0], 2), round(backward / us[1], 2)]
    return {**dict(zip("BTHN", shape, strict=True)), "e97": us, "emender": (forward, backward), "times": times} | {
        "differs": differs
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emender", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "matrix_peers_h200.json")
    parser.add_argument("--commit", default=commit(), help="recorded instead of git's answer")
    options = parser.parse_args()
    module = emender(options.emender)
    report: dict[str, Any] = {"what": "E97 beside its peer, bf16, microseconds (medians)", **facts(options.commit)}
    report["rows"] = []
    for shape in SHAPES:
        report["rows"].append(compare(module, shape))
        print(report["rows"][-1], flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
