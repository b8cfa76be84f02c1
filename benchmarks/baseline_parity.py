"""How far the baselines are from float64, outputs and gradients, beside the libraries' own layers with the same weights.

    python benchmarks/baseline_parity.py [--out benchmarks/results/baseline_parity_h200.json]

One layer of each: float32 weights under bfloat16 autocast. The truth is the same layer in float64, without kernels. Figures
are relative errors in L2, of the output and of the worst gradient (parameters and input). `limit` is what is accepted: 3
times the error of plain PyTorch in the same precision, and 4 eps. Peers are the libraries' own modules, given our weights by
name. Triton's autotuner takes the first candidate of each kernel that fits (triton_candidates.py): all must be right, and
choosing takes minutes.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from machine import commit, facts
from torch import Tensor, nn
from triton_candidates import first_that_fits

HERE = Path(__file__).parent
BF16 = torch.bfloat16
EPS = torch.finfo(BF16).eps
FULL: dict[str, tuple[int, dict[str, Any]]] = {
    "gru": (512, {}), "lstm": (512, {}), "transformer": (640, {}), "mamba2": (896, {}), "gdn": (768, {}),
}  # fmt: skip
TINY: dict[str, tuple[int, dict[str, Any]]] = {
    "gru": (16, {}), "lstm": (16, {}), "transformer": (16, {"head_dim": 8, "mlp_multiple": 8}),
    "mamba2": (16, {"headdim": 8, "d_state": 8}), "gdn": (16, {"head_dim": 8}),
}  # fmt: skip

Run = Callable[[Tensor], Tensor]


@contextmanager
def kernels(mode: str) -> Iterator[None]:
    before = os.environ.get("ELMAN_KERNELS")
    os.environ["ELMAN_KERNELS"] = mode
    try:
        yield
    finally:
        if before is None:
            del os.environ["ELMAN_KERNELS"]
        else:
            os.environ["ELMAN_KERNELS"] = before


@contextmanager
def plain_code() -> Iterator[None]:
    """No kernels: recurrences step by step, attention as products of matrices, and what ELMAN_KERNELS=off switches off."""
    from elman_baselines.rnn import mixer, reference
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fused = mixer.gru, mixer.lstm
    mixer.gru, mixer.lstm = reference.gru_reference, reference.lstm_reference
    try:
        with kernels("off"), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        mixer.gru, mixer.lstm = fused


def results(module: nn.Module, run: Run, x_BTD: Tensor, weight_BTD: Tensor, autocast: bool) -> dict[str, Tensor]:
    """Output, gradient of the input and of every parameter, by name, in float64."""
    x_BTD = x_BTD.clone().requires_grad_()
    with torch.autocast(x_BTD.device.type, BF16, enabled=autocast):
        y_BTD = run(x_BTD)
    (y_BTD.to(weight_BTD.dtype) * weight_BTD).sum().backward()
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert x_BTD.grad is not None
    return {n: t.detach().double() for n, t in {"y": y_BTD, "x": x_BTD.grad, **grads}.items()}


def errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Relative error in L2 of every tensor."""
    assert found.keys() == truth.keys(), f"{sorted(found.keys() ^ truth.keys())} on one side only"
    return {n: float((found[n] - t).norm() / t.norm().clamp(min=1e-30)) for n, t in truth.items()}


def library(name: str, dim: int, device: str) -> tuple[str, nn.Module, Callable[[Any], Tensor]] | None:
    """The library's own layer: its name, the module, and how its result is read. None where there is none for this machine."""
    if not device.startswith("cuda"):
        return None
    if name == "mamba2":
        from elman_baselines.mamba2 import op

        found = op.load_library()
        from mamba_ssm.modules.mamba2 import Mamba2

        module = Mamba2(dim, d_state=128, headdim=64, expand=2, use_mem_eff_path=found.whole is not None)
        return "mamba_ssm", module, lambda y: y
    if name == "gdn":
        from elman_baselines.gdn import op as gdn

        gdn.load_library()
        from fla.layers import GatedDeltaNet

        module = GatedDeltaNet(hidden_size=dim, expand_v=2, head_dim=128, num_heads=dim // 128)
        return "fla", module, lambda y: y[0]
    return None


def rows(
    name: str, dim: int, options: dict[str, Any], batch: int, length: int, device: str
) -> Iterator[dict[str, Any]]:
    """For every branch of a layer: ours, and the library's own where there is one."""
    from elman_core.registry import get_variant

    variant = get_variant(name)
    for index in range(variant.branches):
        torch.manual_seed(0)
        mixer = variant.branch(index)(dim, variant.make_config(options), index).to(device)
        x_BTD = torch.randn(batch, length, dim, device=device).to(BF16)
        weight_BTD = torch.randn(batch, length, dim, device=device).to(BF16)

        def run(module: nn.Module, given_BTD: Tensor, seen_BTD: Tensor, autocast: bool) -> dict[str, Tensor]:
            return results(module, lambda x: module(x)[0], given_BTD, seen_BTD, autocast)

        with plain_code():
            truth = run(copy.deepcopy(mixer).double(), x_BTD.double(), weight_BTD.double(), False)
            plain = errors(run(copy.deepcopy(mixer), x_BTD, weight_BTD, True), truth)
        found = {"ours": errors(run(copy.deepcopy(mixer), x_BTD, weight_BTD, True), truth)}
        if (theirs := library(name, dim, device)) is not None:
            label, module, read = theirs
            module.load_state_dict(mixer.state_dict())
            module.to(device)
            read_out = results(module, lambda x, m=module, r=read: r(m(x)), x_BTD, weight_BTD, True)  # type: ignore[misc]
            found[label] = errors(read_out, truth)
        limits = {n: 3 * e + 4 * EPS for n, e in plain.items()}
        for what, measured in found.items():
            worst = max((n for n in measured if n != "y"), key=lambda n: measured[n] / limits[n])
            yield {
                "variant": name, "branch": type(mixer).__name__, "what": what,
                "backend": mixer.backend() if what == "ours" else what, "width": dim, "B": batch, "T": length,
                "output": measured["y"], "output_plain": plain["y"], "output_limit": limits["y"],
                "worst": worst, "gradient": measured[worst], "gradient_plain": plain[worst],
                "gradient_limit": limits[worst], "passed": all(measured[n] <= limits[n] for n in measured),
            }  # fmt: skip


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| branch | code | output: error, plain, limit | worst gradient: error, plain, limit | |",
        "|" + "---|" * 5,
    ]
    for r in found:
        out = ", ".join(f"{r[k]:.1e}" for k in ("output", "output_plain", "output_limit"))
        grad = ", ".join(f"{r[k]:.1e}" for k in ("gradient", "gradient_plain", "gradient_limit"))
        verdict = "passed" if r["passed"] else "FAILED"
        lines.append(f"| {r['variant']} {r['branch']} | {r['backend']} | {out} | {r['worst']}: {grad} | {verdict} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "baseline_parity_h200.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="", help="names, with commas between")
    parser.add_argument("--commit", default=commit())
    given = parser.parse_args(argv)
    shapes, batch, length = (TINY, 2, 9) if given.tiny else (FULL, 4, 512)
    names = [n for n in shapes if not given.only or n in given.only.split(",")]
    found: list[dict[str, Any]] = []
    on_gpu = given.device.startswith("cuda")
    with kernels("require" if on_gpu else "auto"), first_that_fits() if on_gpu else nullcontext():
        for name in names:
            for row in rows(name, *shapes[name], batch, length, given.device):
                found.append(row)
                print(json.dumps(row), flush=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(
        json.dumps({"what": __doc__.splitlines()[0], **facts(given.commit), "rows": found}, indent=1) + "\n"
    )
    print(table(found))
    return found


if __name__ == "__main__":
    raise SystemExit(0 if all(r["passed"] for r in main()) else 1)
