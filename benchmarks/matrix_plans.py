"""Compare the launch plans of E88's recurrence: `python benchmarks/matrix_state.py --plans` (all, or names with commas).

Every plan is compiled first (all at once), then checked and timed in the same process: by `elman verify`'s comparison with
float64 on a shorter problem (worst error / limit over all outputs and gradients, at most 1; two calls equal in every bit), and
by medians of forward and backward at the target shapes, plain and fused. Before them come the issue rates of the instructions
that the loops are made of, by which plans are predicted. About three minutes on one GPU and 16 cores.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from elman_e88.op import matrix

from elman_core.kernels import build, toolchain
from elman_core.kernels.matrix_build import Maps, Size
from elman_core.kernels.matrix_plan import PLANS
from elman_core.kernels.matrix_spec import case
from elman_core.kernels.verify import failures, verify

HERE = Path(__file__).parent
FUSED = Maps(True, True, "mamba", "given")
CHECKED_STEPS, CHECKED_BATCH, CHECKED_HEADS = 131, 3, 7  # neither a multiple of what a block takes
RATES = ("mufu.tanh", "mma tf32 k8", "mma bf16 k16", "mma bf16 k8", "movmatrix", "shfl", "lds.32", "lds.64", "lds.128")
Both = Callable[..., tuple[float, float]]


def modules(plans: Sequence[str], rows: Sequence[int]) -> list[Any]:
    """What is compiled: each plan for each N, plain and fused."""
    return [
        matrix.extension_for("cuda", Size(n, n, torch.bfloat16, False, False, str(maps), plan))
        for plan in plans
        for n in rows
        for maps in (Maps(), FUSED)
    ]


def check(plan: str, rows: int) -> dict[str, Any]:
    """The plan against float64: the worst error / limit, plain and fused, and what failed."""
    sizes = (CHECKED_BATCH, CHECKED_STEPS, CHECKED_HEADS, rows, rows)
    cases = [case(sizes, torch.bfloat16, plan=plan), case(sizes, torch.bfloat16, maps=str(FUSED), plan=plan)]
    report = verify(matrix.spec(), "cuda", cases=cases, opcheck=False)
    worst = max(report.rows, key=lambda r: r.ratio)
    gradients = [r.error for r in report.rows if r.tensor.startswith("d ")]
    outputs = [r.error for r in report.rows if not r.tensor.startswith("d ")]
    return {
        "passed": report.passed,
        "worst": round(worst.ratio, 4),
        "worst_tensor": worst.tensor,
        "output_error": float(f"{max(outputs):.2e}"),
        "gradient_error": float(f"{max(gradients):.2e}"),
        "failures": list(failures(report)),
    }


def measure(plan: str, shape: tuple[int, int, int, int], both_us: Both) -> dict[str, float]:
    """Microseconds at one shape (B, T, H, N)."""
    B, T, H, N = shape
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = (F.normalize(torch.randn(B, T, H, N, device="cuda"), dim=-1).bfloat16().requires_grad_() for _ in range(2))
    v, qkv = torch.randn(B, T, H, N, **made).requires_grad_(), torch.randn(B, T, 3 * H * N, **made).requires_grad_()
    decay = (1 - 0.1 * torch.rand(B, T, H, device="cuda")).requires_grad_()
    a = torch.randn(B, T, H, **made).requires_grad_()
    a_log, dt_bias = (
        torch.randn(H, device="cuda").requires_grad_(),
        (torch.randn(H, device="cuda") - 4).requires_grad_(),
    )
    forward, backward = both_us(lambda: matrix(q, k, v, decay, backend="cuda", plan=plan)[0], [q, k, v, decay])
    named: dict[str, Any] = {"n_state": N, "a_log_H": a_log, "dt_bias_H": dt_bias, "backend": "cuda", "plan": plan}
    fused = both_us(lambda: matrix.fused(qkv, a, **named)[0], [qkv, a, a_log, dt_bias])
    return {"forward": forward, "backward": backward, "fused_forward": fused[0], "fused_backward": fused[1]}


def instruction_rates() -> dict[str, dict[str, float]]:
    """Clocks between two issues of an instruction on a scheduler, with 1, 2 and 4 warps on each of the four."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "rates.so"
        arch = f"-gencode=arch=compute_{_capability()},code=sm_{_capability()}"
        command = [str(toolchain.find_nvcc()), "-O3", "-std=c++17", "-shared", "-Xcompiler=-fPIC", arch]
        subprocess.run([*command, str(HERE / "instruction_rates.cu"), "-o", str(made)], check=True)
        library = ctypes.CDLL(str(made))
    library.elman_rate.restype = ctypes.c_double
    return {
        name: {str(warps): round(library.elman_rate(i, warps), 2) for warps in (1, 2, 4)}
        for i, name in enumerate(RATES)
    }


def compare(
    plans: Sequence[str], shapes: dict[tuple[int, int, int, int], tuple[int, int]], both_us: Both
) -> dict[str, Any]:
    """Everything about these plans at these shapes; prints as it goes, the table last."""
    rows = sorted({shape[3] for shape in shapes})
    arch = build.local_arch(matrix.extension("cuda"))
    build.build_all([(extension, arch) for extension in modules(plans, rows)])
    rates = instruction_rates()
    for name, clocks in rates.items():
        print(f"clocks per {name:14s}", "  ".join(f"{w} warps {c:6.2f}" for w, c in clocks.items()), flush=True)
    checks = {(plan, n): check(plan, n) for plan in plans for n in rows}
    found = []
    for shape, target in shapes.items():
        for plan in plans:
            row = {"shape": shape, "plan": plan, "target": target} | checks[plan, shape[3]]
            if row["passed"]:  # the time of a wrong kernel means nothing
                row |= measure(plan, shape, both_us)
            found.append(row)
    for line in table(found):
        print(line)
    for key, result in checks.items():
        for failure in result["failures"]:
            print("WRONG", *key, failure)
    return {"rates": rates, "rows": found, "best": best(found)}


def best(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """For each shape, the plan that is fastest forward and the one that is fastest backward."""
    found: dict[str, dict[str, str]] = {}
    for shape in dict.fromkeys(tuple(r["shape"]) for r in rows):
        timed = [r for r in rows if tuple(r["shape"]) == shape and "forward" in r]
        if timed:
            fastest = {key: min(timed, key=lambda r: r[key])["plan"] for key in ("forward", "backward")}
            found["B={} T={} H={} n={}".format(*shape)] = fastest
    return found


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each row; a plan that is wrong has no times."""
    names = ("forward", "backward", "fused f", "fused b", "err/lim")
    head = f"{'B T H n':>14}  {'plan':10} " + " ".join(f"{name:>8}" for name in names) + "   out err  grad err"
    lines, before = [head], None
    for row in rows:
        if row["shape"] != before:
            before = row["shape"]
            lines.append(f"{' '.join(map(str, before)):>14}  {'target':10} {row['target'][0]:8d} {row['target'][1]:8d}")
        keys = ("forward", "backward", "fused_forward", "fused_backward")
        times = " ".join(f"{row[key]:8.1f}" if key in row else f"{'-':>8}" for key in keys)
        errors = f"{row['worst']:8.3f} {row['output_error']:9.1e} {row['gradient_error']:9.1e}"
        lines.append(f"{'':14}  {row['plan']:10} {times} {errors}{'' if row['passed'] else '  WRONG'}")
    return lines


def chosen(text: str) -> list[str]:
    """Plans by name, "all" for every one.

    Raises:
        SystemExit: there is no plan of that name.
    """
    names = list(PLANS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in PLANS]:
        raise SystemExit(f"no launch plan {unknown[0]!r}: choose among {', '.join(PLANS)}, or all")
    return names


def _capability() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}{'a' if major >= 9 else ''}"
