"""Time E97 and M²RNN beside the Triton kernels of their authors, the same function of the same inputs, in one run on one GPU.

    python benchmarks/matrix_peers.py [--emender TREE] [--xma TREE] [--out benchmarks/results/matrix_peers_h200.json]

TREE is a checkout of the peer's repository. Of Emender, ndm/triton/e88_triton_forward.py and e88_triton_backward.py are read;
of xma (accelerated-model-architectures), the package xma. Microseconds, medians, bf16, as in matrix_state.py.
times: peer / ours.
differs: |ours - peer| / |peer| over all numbers of the output and of each gradient; the peers keep their states in bf16.

e97: q, k, v and gates in; SiLU, L2 norm, split edit and tanh inside. Emender tunes its forward itself; of its backward, the
faster of its own setting and one warp counts. m2rnn: q, k, v, forget gates and W in, at the searched shape and at the published
one, whose heads share q and k. xma tunes its kernels over warps and stages: here up to 8 and 2 of them, a third of its list.
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
import torch.nn.functional as F
from machine import commit, facts
from matrix_state import both_us
from torch import Tensor

from elman_core.kernels import Maps

E97_SHAPES = [(32, 512, 32, 16), (32, 512, 32, 32), (4, 2048, 216, 32)]  # (B, T, H, N), V = N
M2RNN_SHAPES = [(4, 2048, 370, 370, 16, 16), (2, 2048, 759, 1, 64, 16)]  # (B, T, H, heads of q and k, K, V)
Run = tuple[Callable[[], Tensor], list[Tensor]]  # a forward, and what its gradients are of


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def compare(ours: Run, peer: Run, slopes: dict[str, Tensor], names: tuple[str, ...]) -> dict[str, Any]:
    """slopes: d (what the peer is given) / d (what we are given), where they differ."""

    def gap(x: Tensor, y: Tensor) -> float:
        return float(f"{((x.float() - y.float()).norm() / y.float().norm()).item():.1e}")

    outputs = [run() for run, _ in (ours, peer)]
    dy = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad(o, of, dy) for o, (_, of) in zip(outputs, (ours, peer), strict=True)]
    differs = {"o": gap(*outputs)}
    differs |= {f"d{n}": gap(x, y * slopes.get(n, 1)) for n, x, y in zip(names, *gradients, strict=True)}
    del outputs, gradients
    mine, other = both_us(*ours), both_us(*peer, ahead_ms=5)
    return {"ours": mine, "peer": other, "differs": differs}


def emender(tree: Path) -> Any:
    """The peer's module; its packages themselves are not run, for they load every model."""
    for name in ("ndm", "ndm/triton"):
        package: Any = types.ModuleType(name.replace("/", "."))
        package.__path__ = [str(tree / name)]
        sys.modules[package.__name__] = package
    return import_module("ndm.triton.e88_triton_backward")


def e97_row(module: Any, B: int, T: int, H: int, N: int) -> dict[str, Any]:
    from elman_e97.op import e97

    names = ("q", "k", "erase", "v", "w", "decay")
    x = {n: leaf(normal(B, T, H, N)) for n in ("q", "k", "v", "w")}
    x |= {"erase": leaf(torch.sigmoid(normal(B, T, H, N)))}
    x |= {"decay": leaf(torch.rand(B, T, H, device="cuda").mul(0.5).add(0.5).bfloat16().float())}
    maps = Maps(("q", "k", "v"), ("q", "k"))
    ours = lambda: e97(*(x[n] for n in names), maps=maps, backend="cuda")[0]  # noqa: E731
    # The peer's inputs lie as its model has them: w after the sigmoid, the decay in bf16, T first as a view.
    y = {**x, "w": leaf(torch.sigmoid(x["w"])), "decay": leaf(x["decay"].bfloat16())}
    start = torch.zeros(B, H, N, N, device="cuda", dtype=torch.bfloat16)
    q, k, erase, v, w, decay = (y[n].transpose(0, 1) for n in names)
    call = partial(module.e88_triton, start, k, v, q, decay, normalize_kq=True, apply_silu_qkv=True)
    peer: Run = (lambda: call(erase_gate=erase, value_write_gate=w)[0].transpose(0, 1), [y[n] for n in names])
    w_float = y["w"].detach().float()
    row = compare((ours, [x[n] for n in names]), peer, {"w": w_float * (1 - w_float)}, names)
    own, module.e88_triton_backward = module.e88_triton_backward, partial(module.e88_triton_backward, num_warps=1)
    row["peer"] = (row["peer"][0], min(row["peer"][1], both_us(*peer, ahead_ms=5)[1]))
    module.e88_triton_backward = own
    return {"kernel": "e97", "beside": "emender", "B": B, "T": T, "H": H, "N": N, **row}


def xma(tree: Path) -> Callable[..., tuple[Tensor, Tensor]]:
    """The peer's op, with fewer settings to choose from."""
    sys.path.insert(0, str(tree))
    within = "xma.layers.m2rnn.triton_implementation"
    forward, backward = (import_module(f"{within}.{name}") for name in ("forward", "backward"))
    for kernel in (
        forward._m2rnn_forward_triton_kernel,
        forward._m2rnn_forward_no_output_triton_kernel,
        backward._m2rnn_backward_triton_kernel,
    ):
        kernel.configs = [c for c in kernel.configs if c.num_warps <= 8 and c.num_stages <= 2]
    found: Callable[..., tuple[Tensor, Tensor]] = import_module("xma.layers.m2rnn").m2rnn
    return found


def m2rnn_row(
    op: Callable[..., tuple[Tensor, Tensor]], B: int, T: int, H: int, G: int, K: int, V: int
) -> dict[str, Any]:
    from elman_m2rnn.op import m2rnn

    names = ("q", "k", "v", "f", "w")
    x = {n: leaf(F.normalize(normal(B, T, G, K), dim=-1)) for n in ("q", "k")} | {"v": leaf(normal(B, T, H, V))}
    x["f"] = leaf(1 - 0.5 * torch.rand(B, T, H, device="cuda").square().bfloat16().float())
    x["w"] = leaf(0.9 * torch.linalg.qr(normal(H, V, V).float())[0].bfloat16())  # larger ones make a chaos of rounding
    y = {**x, "f": leaf(x["f"].bfloat16())}
    ours: Run = (lambda: m2rnn(*(x[n] for n in names), backend="cuda")[0], [x[n] for n in names])
    peer: Run = (lambda: op(y["q"], y["k"], y["v"], y["w"], y["f"])[0], [y[n] for n in names])
    return {
        "kernel": "m2rnn",
        "beside": "xma",
        "B": B,
        "T": T,
        "H": H,
        "G": G,
        "K": K,
        "V": V,
        **compare(ours, peer, {}, names),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emender", type=Path)
    parser.add_argument("--xma", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "matrix_peers_h200.json")
    parser.add_argument("--commit", default=commit(), help="recorded instead of git's answer")
    options = parser.parse_args()
    report: dict[str, Any] = {"what": "E97 and M2RNN beside their peers, bf16, microseconds (medians)"}
    report |= {**facts(options.commit), "rows": []}

    def write(row: dict[str, Any]) -> None:
        row["times"] = [round(peer / ours, 2) for peer, ours in zip(row["peer"], row["ours"], strict=True)]
        report["rows"].append(row)
        print(row, flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")

    if options.emender:
        module = emender(options.emender)
        for e97_shape in E97_SHAPES:
            write(e97_row(module, *e97_shape))
    if options.xma:
        op = xma(options.xma)
        for m2rnn_shape in M2RNN_SHAPES:
            write(m2rnn_row(op, *m2rnn_shape))


if __name__ == "__main__":
    main()
