"""Time the dense recurrences of this package beside its peers, all in one run on one GPU.

    python benchmarks/dense.py [--out benchmarks/results/dense_h200.json] [--steps 512] [--quick] [--shapes 4096x32]
    python benchmarks/dense.py --merge A.json B.json     one file of two runs; measures nothing

Microseconds per time step, forward and forward+backward. Every figure is the median over repetitions of the time between two
CUDA events; the GPU is kept busy before the first one, so that no launch latency of the host is in it. Inputs are random.

Ours: the whole op as training calls it: exchange buffers cleared, y (for E1 with its gate) and the final state written;
backward: all gradients (u, z, W, h_0), with the one product for dW. `e42 tied` is what E42 trains with: W (h + x) + b, which
contains the projection of x and its gradients (x, b). `plain` is h = tanh(W h + u), y = h: the peers' function.
Peers: one cuBLAS product and one pointwise kernel a step in a CUDA graph (its backward with the same dW product); cuDNN's RNN
and LSTM through torch.nn (their figures contain the product W_x x, which ours leaves to the layer; the LSTM does four times the
work), as a CUDA graph too; FlashRNN's Elman where it is installed, at two shapes, since it compiles a kernel for each (about a
minute; flashrnn_cuda13.py says how under CUDA 13). Its backward waits for the device before its products, here as in any use:
that is in its figure.

What is launched step by step (cuDNN where it holds no weights on chip, ours where no persistent launch fits) is recorded as a
CUDA graph too, as a training step is, and the faster way stands. A merged file has of two runs the last, but of cells that the
host's pace is in the faster, with its commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flashrnn_cuda13
import torch
import torch.nn.functional as F
from elman_baselines.rnn.op import packed_for_cudnn
from machine import commit, facts, said
from timing import captured, milliseconds
from torch import Tensor

from elman_core.kernels import DenseKernel
from elman_core.kernels.dense import run as dense_run

HERE = Path(__file__).parent
SHAPES = [(512, 32), (512, 64), (768, 32), (1024, 32), (1024, 64), (1280, 32), (1536, 32), (1536, 64), (2048, 32)]
FLASHRNN_SHAPES = [(512, 32), (1024, 32)]
LARGE = [(1024, 256), (1280, 256), (4096, 32)]
TARGETS = {
    (512, 32): (0.95, 2.05),
    (768, 32): (1.15, 2.4),
    (1024, 32): (1.3, 2.75),
    (1024, 64): (1.4, 3.0),
    (1536, 32): (1.65, 3.6),
    (1536, 64): (2.2, 4.8),
    (2048, 32): (2.4, 5.5),
}


def plain_reference(u: Tensor, w: Tensor, h0: Tensor, *_flags: Tensor | None) -> tuple[Tensor, Tensor]:
    h, out = h0, []
    for u_t in u.unbind(0):
        h = torch.tanh(u_t + h @ w.T)
        out.append(h)
    return torch.stack(out), h


plain = DenseKernel(
    "plain",
    header=HERE / "plain_cell.h",
    cell="elman::plain::Cell",
    reference=plain_reference,
    update=lambda a, _h: torch.tanh(a),
    readout=lambda h, _h: h,
)


def measure(call: Callable[[], Any], steps: int, repeats: int) -> dict[str, float]:
    """{"median", "p10", "p90"} of a call, in microseconds per step."""
    times = [ms * 1e3 / steps for ms in milliseconds(call, repeats)]
    tenth = repeats // 10
    found = {"median": statistics.median(times), "p10": times[tenth], "p90": times[-1 - tenth]}
    return {name: round(us, 4) for name, us in found.items()}


def both(forward: Callable[[], tuple[Tensor, ...]], leaves: list[Tensor], steps: int, repeats: int) -> dict[str, Any]:
    """Timings of a differentiable call: without autograd, and with all gradients."""
    outputs = forward()
    gradients = [torch.randn_like(x) for x in outputs]

    def without() -> None:
        with torch.no_grad():
            forward()

    return {
        "forward": measure(without, steps, repeats),
        "forward_backward": measure(lambda: torch.autograd.grad(forward(), leaves, gradients), steps, repeats),
    }


def problem(steps: int, batch: int, width: int, extras: int, dtype: torch.dtype) -> list[Tensor]:
    """u, extras, W, h_0 as leaves."""
    draw = [torch.randn(steps, batch, width, device="cuda", dtype=dtype) for _ in range(1 + extras)]
    w = (torch.randn(width, width, device="cuda") * (0.45 / width**0.5)).to(dtype)
    return [x.requires_grad_() for x in (*draw, w, torch.randn(batch, width, device="cuda"))]


def ours(kernel: DenseKernel, steps: int, batch: int, width: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    leaves = problem(steps, batch, width, len(kernel.cell.extras), dtype)
    plan = str(dense_run.plan_for(kernel.cell, batch, width, dtype, 0))
    found = faster(lambda: kernel(*leaves, backend="cuda"), leaves, steps, repeats, plan.startswith("steps"))
    torch.cuda.synchronize()
    dense_run.check_errors(torch.device("cuda", 0))
    return found | {"plan": plan}


def tied(kernel: DenseKernel, steps: int, batch: int, width: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    x, w, h0 = problem(steps, batch, width, 0, dtype)
    b = torch.randn(width, device="cuda", requires_grad=True)
    plan = str(dense_run.plan_for(kernel.cell, batch, width, dtype, 0))
    found = faster(
        lambda: kernel(x, w, h0, v=w, b=b, silu=True, backend="cuda"),
        [x, w, b, h0],
        steps,
        repeats,
        plan.startswith("steps"),
    )
    return found | {"plan": plan}


def per_step(steps: int, batch: int, width: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """h = tanh(W h + u): a cuBLAS product with u added by it, and tanh; back: two pointwise kernels and a product a step."""
    u, w, h0 = (x.detach() for x in problem(steps, batch, width, 0, dtype))
    history = torch.empty(steps + 1, batch, width, device="cuda", dtype=dtype)
    history[0] = h0
    gy, da, r = torch.randn_like(u), torch.empty_like(u), torch.zeros_like(u[0])
    w_t = w.t()

    def forward() -> None:
        for t in range(steps):
            torch.addmm(u[t], history[t], w_t, out=history[t + 1])
            history[t + 1].tanh_()

    def backward() -> None:
        r.zero_()
        for t in range(steps - 1, -1, -1):
            r.add_(gy[t])
            torch.ops.aten.tanh_backward.grad_input(r, history[t + 1], grad_input=da[t])
            torch.mm(da[t], w, out=r)
        torch.mm(da.flatten(0, 1).t(), history[:-1].flatten(0, 1))

    def whole() -> None:
        forward()
        backward()

    return {
        "forward": measure(captured(forward).replay, steps, repeats),
        "forward_backward": measure(captured(whole).replay, steps, repeats),
    }


def cudnn(kind: str, steps: int, batch: int, width: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    layer = getattr(torch.nn, kind)(width, width, device="cuda", dtype=dtype)
    weights = list(layer.parameters())
    with torch.no_grad():  # flatten_parameters does nothing for bfloat16, and cuDNN would be given copies at every call
        for mine, packed in zip(weights, packed_for_cudnn(weights), strict=True):
            mine.data = packed
    x = torch.randn(steps, batch, width, device="cuda", dtype=dtype, requires_grad=True)
    return faster(lambda: (layer(x)[0],), [x, *layer.parameters()], steps, repeats, True)


def faster(
    call: Callable[[], tuple[Tensor, ...]], leaves: list[Tensor], steps: int, repeats: int, records: bool
) -> dict[str, Any]:
    """`both`, and if `records` the same launches as a CUDA graph: what is faster."""
    found = both(call, leaves, steps, repeats)
    if not records:
        return found
    recorded = attempt(in_a_graph, call, leaves, steps, repeats)
    if isinstance(recorded, str):
        return found | {"graph": recorded}
    return min(found | {"launched": "eager"}, recorded, key=pace)


def in_a_graph(
    call: Callable[[], tuple[Tensor, ...]], leaves: list[Tensor], steps: int, repeats: int
) -> dict[str, Any]:
    """The same launches recorded: without the host in between."""
    gradients = [torch.randn_like(x) for x in call()]

    def forward() -> None:
        with torch.no_grad():
            call()

    def whole() -> None:
        torch.autograd.grad(call(), leaves, gradients)

    return {
        "forward": measure(captured(forward).replay, steps, repeats),
        "forward_backward": measure(captured(whole).replay, steps, repeats),
        "launched": "graph",
    }


def pace(cell: dict[str, Any]) -> float:
    return float(cell["forward_backward"]["median"])


def from_the_host(name: str, cell: dict[str, Any]) -> bool:
    """Whether the host's pace is in a cell."""
    by_steps = name.startswith("cuDNN") or cell.get("plan", "").startswith("steps")
    return by_steps and cell.get("launched") != "graph"


def merge(files: list[Path], out: Path) -> None:
    """One file of several runs, the last one's facts in front; see the module's docstring.

    Raises:
        SystemExit: they are of different GPUs or lengths.
    """
    read = [json.loads(file.read_text()) for file in files]
    last = read[-1]
    for key in ("what", "T", "gpu", "driver", "torch", "cuda", "cudnn"):
        if any(one[key] != last[key] for one in read):
            raise SystemExit(f"{key} differs: {[one[key] for one in read]}")
    rows = {(row["d"], row["B"]): row for row in last["rows"]}
    for one in read[:-1]:
        for row in one["rows"]:
            mine = rows.setdefault((row["d"], row["B"]), {"d": row["d"], "B": row["B"], "target": row["target"]})
            for name, cell in row.items():
                if not isinstance(cell, dict):
                    continue
                better = (
                    isinstance(mine.get(name), dict)
                    and from_the_host(name, mine[name])
                    and pace(cell) < pace(mine[name])
                )
                if name not in mine or better:
                    mine[name] = {"commit": one["commit"], "when": one["when"]} | cell
    write(last | {"rows": list(rows.values())}, out)


def write(result: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def flashrnn(
    steps: int, batch: int, width: int, function: str = "elman"
) -> tuple[Callable[[], tuple[Tensor]], list[Tensor]]:
    """A call of FlashRNN, and what it is differentiated by. Compiles its kernels. LSTM and GRU have their input product.

    Raises:
        ImportError: FlashRNN is not installed.
        RuntimeError: its kernels do not compile (`flashrnn_cuda13.why_not`), or no launch fits.
    """
    from flashrnn import flashrnn as run

    gates, biases = {"elman": (1, 1), "gru": (3, 4), "lstm": (4, 4)}[function]
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    x, r = (
        torch.randn(batch, steps, width, **bf16),
        torch.randn(gates, 1, width, width, **bf16) * (0.45 / width**0.5),
    )
    leaves = [x.requires_grad_() for x in (x, r, torch.zeros(biases, 1, width, **bf16))]
    if function != "elman":
        leaves.append((torch.randn(gates * width, width, **bf16) / width**0.5).requires_grad_())

    def forward() -> tuple[Tensor]:
        x, r, b, *projection = leaves
        wx = (F.linear(x, *projection) if projection else x).view(batch, steps, gates, 1, width)
        return (run(wx, r, b, function=function, backend="cuda_fused", dtype="bfloat16")[0],)

    flashrnn_cuda13.prepare()
    try:
        torch.autograd.grad(forward()[0].sum(), leaves)
    except RuntimeError as error:
        raise RuntimeError(flashrnn_cuda13.why_not(error) or str(error)) from error
    return forward, leaves


def attempt(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result, or why there is none."""
    try:
        return call(*arguments)
    except Exception as error:  # of any library: it has no figure then, and this is why
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def chosen(words: str) -> list[tuple[int, int]]:
    """The shapes that WIDTHxBATCH with commas asks for.

    Raises:
        SystemExit: one that is not in the table.
    """
    known = {f"{width}x{batch}": (width, batch) for width, batch in SHAPES + LARGE}
    if unknown := [word for word in words.split(",") if word not in known]:
        raise SystemExit(f"no shape {unknown[0]!r}: choose among {', '.join(known)}")
    return [known[word] for word in words.split(",")]


def clocks() -> str:
    return said(
        "nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw", "--format=csv,noheader", "-i", "0"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "dense_h200.json")
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--quick", action="store_true", help="ours alone, in bf16")
    parser.add_argument("--shapes", help="only these, WIDTHxBATCH with commas")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="join these into --out; measures nothing")
    given = parser.parse_args(argv)
    if given.merge:
        merge(given.merge, given.out)
        return
    shapes = chosen(given.shapes) if given.shapes else SHAPES + ([] if given.quick else LARGE)
    from elman_e1.op import e1
    from elman_e42.op import e42

    torch.manual_seed(0)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    steps, repeats = given.steps, given.repeats
    before, rows = clocks(), []
    for width, batch in shapes:
        row: dict[str, Any] = {"d": width, "B": batch, "target": TARGETS.get((width, batch))}
        for name, kernel in (("e1", e1), ("e42", e42), ("plain", plain)):
            row[f"{name} bf16"] = ours(kernel, steps, batch, width, bf16, repeats)
        row["e42 tied bf16"] = tied(e42, steps, batch, width, bf16, repeats)
        if not given.quick:
            few = max(7, repeats // 3)
            row["plain fp16"] = ours(plain, steps, batch, width, fp16, repeats)
            row["plain fp32"] = ours(plain, steps, batch, width, fp32, few)
            row["cuBLAS per step, CUDA graph, bf16"] = attempt(per_step, steps, batch, width, bf16, few)
            for kind in ("RNN", "LSTM"):
                for dtype, short in ((bf16, "bf16"), (fp16, "fp16")):
                    row[f"cuDNN {kind} {short}"] = attempt(cudnn, kind, steps, batch, width, dtype, few)
            if (width, batch) in FLASHRNN_SHAPES:
                row["FlashRNN fused bf16"] = attempt(
                    lambda: both(*flashrnn(steps, batch, width), steps, few)  # noqa: B023
                )
        rows.append(row)
        show(row)
    result = {
        "what": "microseconds per time step, medians; see the docstring of benchmarks/dense.py",
        "T": steps,
        "repeats": repeats,
        **facts(given.commit),
        "clocks_sm_mem_temperature_power": {"before": before, "after": clocks()},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nvcc": said("nvcc", "--version").splitlines()[-1],
        "rows": rows,
    }
    write(result, given.out)


def show(row: dict[str, Any]) -> None:
    print(f"d={row['d']} B={row['B']} target {row['target']}")
    for name, found in row.items():
        if isinstance(found, dict):
            one, two = found["forward"]["median"], found["forward_backward"]["median"]
            print(f"   {name:36s} {one:8.3f} {two:8.3f}   {found.get('plan', '')}")
        elif isinstance(found, str):
            print(f"   {name:36s} {found}")
    print(end="", flush=True)


if __name__ == "__main__":
    main()
