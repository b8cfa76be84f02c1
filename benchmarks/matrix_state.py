"""Time the recurrence of E88 on one GPU: forward and backward, beside the layers it competes with.

    python benchmarks/matrix_state.py [--out benchmarks/results/matrix_state_h200.json] [--large]

Microseconds, the median over repetitions of the time between two CUDA events; the GPU is kept busy before the first one, so
that no launch latency of the host is in it. Inputs are random, bf16.

forward, backward: q, k, v, decay given. fused: from projections, with SiLU, L2 norm and decay inside. pieces: the same
function with SiLU, L2 norm and decay in PyTorch around the recurrence; fused replaces it. step: T = 1, as in decoding.
large: from projections, with write gate, V of its own, with and without tanh; --large: these alone.
saved: megabytes (1e6) that the recurrence keeps for its backward, its output not counted.
rates: clocks between two issues of the instructions that the loops are made of (instruction_rates.py).
Layers (whole: projections too), weights in bfloat16: E88's of h32n16, fla's GatedDeltaNet and mamba_ssm's Mamba2 where they are
installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

os.environ["ELMAN_KERNELS"] = "require"

from baseline_parity import library
from elman_e88.op import e88 as matrix
from instruction_rates import instruction_rates
from machine import commit, facts
from timing import milliseconds

from elman_core.kernels import Maps

HERE = Path(__file__).parent
PLAIN = Maps()
# (B, T, H, N): (forward, backward) to reach, in microseconds
TARGETS = {(32, 512, 32, 16): (60, 140), (32, 512, 8, 32): (60, 140), (8, 512, 83, 32): (170, 450)}
# (B, T, H, N, V, linear_state)
LARGE = [
    (64, 512, 5, 64, 256, True), (64, 512, 5, 128, 256, True), (64, 512, 16, 64, 64, True), (64, 512, 16, 64, 64, False)
]  # fmt: skip
OTHERS = [(32, 512, 24, 24), (32, 512, 8, 64), (32, 512, 4, 128), (8, 2048, 32, 16), (1, 16384, 32, 16)]


def time_us(run: Callable[[], object], repetitions: int = 30, ahead_ms: float = 2) -> float:
    return round(1e3 * statistics.median(milliseconds(run, repetitions, ahead_ms)), 1)


def both_us(
    run: Callable[[], Tensor], leaves: list[Tensor], repetitions: int = 30, ahead_ms: float = 2
) -> tuple[float, float]:
    """(forward as training runs it, backward)."""
    forward = time_us(run, repetitions, ahead_ms)
    made = run()
    gradient = torch.randn_like(made)
    backward = time_us(lambda: torch.autograd.grad(made, leaves, gradient, retain_graph=True), repetitions, ahead_ms)
    return forward, backward


def recurrence(B: int, T: int, H: int, N: int) -> dict[str, Any]:
    def leaf(x: Tensor) -> Tensor:
        return x.requires_grad_()

    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = (leaf(F.normalize(torch.randn(B, T, H, N, device="cuda"), dim=-1).bfloat16()) for _ in range(2))
    v, qkv = leaf(torch.randn(B, T, H, N, **bf16)), leaf(torch.randn(B, T, 3 * H * N, **bf16))
    decay, a = leaf(1 - 0.1 * torch.rand(B, T, H, device="cuda")), leaf(torch.randn(B, T, H, **bf16))
    a_log, dt_bias = leaf(torch.randn(H, device="cuda")), leaf(torch.randn(H, device="cuda") - 4)
    row: dict[str, Any] = {"B": B, "T": T, "H": H, "N": N}
    row["forward"], row["backward"] = both_us(
        lambda: matrix(q, k, v, decay, maps=PLAIN, backend="cuda")[0], [q, k, v, decay]
    )
    with torch.no_grad():
        row["forward_no_grad"] = time_us(lambda: matrix(q, k, v, decay, maps=PLAIN, backend="cuda"))
    named: dict[str, Any] = {"n_state": N, "a_log_H": a_log, "dt_bias_H": dt_bias, "backend": "cuda"}
    fused = both_us(lambda: matrix.fused(qkv, a, **named)[0], [qkv, a, a_log, dt_bias])
    row["fused_forward"], row["fused_backward"] = fused

    def pieces() -> Tensor:
        x, y, z = (p.unflatten(-1, (H, -1)) for p in F.silu(qkv).split([H * N] * 3, -1))
        x, y = (p * torch.rsqrt(p.float().square().sum(-1, keepdim=True) + 1e-12).to(p.dtype) for p in (x, y))
        return matrix(x, y, z, torch.exp(-a_log.exp() * F.softplus(a.float() + dt_bias)), maps=PLAIN, backend="cuda")[0]

    row["pieces_forward"], row["pieces_backward"] = both_us(pieces, [qkv, a, a_log, dt_bias])
    saved: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        matrix(q, k, v, decay, maps=PLAIN, backend="cuda")
    row["saved_mb"] = round(sum(saved.values()) / 1e6, 1)
    with torch.no_grad():
        state = torch.zeros(B, H, N, N, device="cuda")
        one = [x[:, :1].contiguous() for x in (q, k, v, decay)]
        row["step"] = time_us(lambda: matrix(*one, state_BHNV=state, maps=PLAIN, backend="cuda"))
    if (B, T, H, N) in TARGETS:
        row["target_forward"], row["target_backward"] = TARGETS[B, T, H, N]
    return row


def large(B: int, T: int, H: int, N: int, V: int, linear: bool) -> dict[str, Any]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(B, T, *shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    q, k, v, a, write = normal(H, N), normal(H, N), normal(H, V), normal(H), normal(H)
    a_log, dt_bias = (torch.randn(H, device="cuda").sub(shift).requires_grad_() for shift in (0, 4))
    more: dict[str, Any] = {"a_log_H": a_log, "dt_bias_H": dt_bias, "maps": matrix.cell.maps[0], "backend": "cuda"}
    times = both_us(
        lambda: matrix(q, k, v, a, write, linear_state=linear, **more)[0], [q, k, v, a, write, a_log, dt_bias]
    )
    names = ("linear_state", "B", "T", "H", "N", "V", "forward", "backward")
    return dict(zip(names, (linear, B, T, H, N, V, *times), strict=True))


LAYERS = {"e88": 1536, "gdn": 768, "mamba2": 896}  # to widths


def layer(name: str) -> tuple[str, torch.nn.Module, Callable[[Any], Tensor]]:
    """Its name, the module, how its result is read: ours of E88, of the others the libraries' own."""
    if name != "e88":
        found = library(name, LAYERS[name], "cuda")
        assert found is not None
        return found
    from elman_e88.mixer import E88Mixer

    from elman_core.nn import MatrixConfig

    return "elman", E88Mixer(LAYERS[name], MatrixConfig(n_heads=32, n_state=16)), lambda y: y[0]


def layer_row(name: str) -> dict[str, Any]:
    """A whole layer with weights in bfloat16, or why there is none here."""
    B, T = 32, 512
    try:
        of, module, read = layer(name)
        module.cuda().bfloat16()
        x = torch.randn(B, T, LAYERS[name], device="cuda", dtype=torch.bfloat16, requires_grad=True)
        parameters = [p for p in module.parameters() if p.requires_grad]
        forward, backward = both_us(lambda: read(module(x)), [x, *parameters], 15, ahead_ms=15)  # many launches
    except Exception as error:  # any way in which a library may be missing or unfit is a result
        return {"layer": name, "skipped": f"{type(error).__name__}: {error}"[:200]}
    counted = sum(p.numel() for p in parameters)
    what = f"{of} {type(module).__name__} {LAYERS[name]}"
    return {"layer": what, "B": B, "T": T, "parameters": counted, "forward": forward, "backward": backward}


def write(report: dict[str, Any], to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=commit(), help="recorded instead of git's answer")
    parser.add_argument("--large", action="store_true", help="the rows of `large` alone")
    options = parser.parse_args()
    options.out = options.out or HERE / "results" / "matrix_state_h200.json"
    report = {"what": "E88 recurrence, bf16, microseconds (medians)", **facts(options.commit)}
    report |= {"rates": instruction_rates(), "recurrence": [], "layers": []}
    report["large"] = [large(*shape) for shape in LARGE]
    print(*report["large"], sep="\n", flush=True)
    write(report, options.out)
    if options.large:
        return
    for shape in [*TARGETS, *OTHERS]:
        report["recurrence"].append(recurrence(*shape))
        print(report["recurrence"][-1], flush=True)
        write(report, options.out)
    for name in LAYERS:
        report["layers"].append(layer_row(name))
        print(report["layers"][-1], flush=True)
        write(report, options.out)


if __name__ == "__main__":
    main()
