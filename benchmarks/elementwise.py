"""Time the elementwise recurrences of this package beside its peers, all in one run on one GPU.

    python benchmarks/elementwise.py [--out benchmarks/results/elementwise_h200.json] [--repeats 31]

Microseconds of a whole sequence in bfloat16: medians of the time between two CUDA events, with the GPU kept busy before the
first, so that no launch latency of the host is in them. `forward` is a training forward, which keeps what the backward needs;
`backward` is all gradients (streams, vectors, h_0), the sum of the vectors' gradients over rows among them.

`gate` is h = f h' + (1 - f) x, y = h. Its peer is fla's fused_recurrent_hgrn, given log f and (1 - f) x, which are not timed.
`layer` is E65 behind the map that makes its two streams, forward and all gradients; its peer is pararnn-torch's ParaRNN over
ParaNLRU, which is the same map and the same recurrence without the self-gate, solved by Newton's method in parallel over time.
`the map alone` says what of both is the product. What is not installed or fails has its reason in its place.

The file is written after every row; the table beside it (.md) last. `variants.py` times training steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from dense import attempt, clocks
from machine import commit, facts
from tables import RESULTS, markdown
from timing import milliseconds
from torch import Tensor, nn

from elman_core.kernels import ElementwiseKernel
from elman_core.nn import gate, linears
from elman_core.registry import get_variant

HERE = Path(__file__).parent
SHAPES = ((32, 512, 1024), (8, 4096, 1024))  # B, T, d
VARIANTS = ("diagonal", "e34", "e61", "e62", "e64", "e65", "e67", "e68")
TARGETS = {"forward": 45, "backward": 110}
"""Microseconds of `gate` at the first shape; memory alone takes 24 and 50."""
NARROW = {"device": "cuda", "dtype": torch.bfloat16}


def plain_step(h: Tensor, a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    keep, write = gate(a)
    h = keep * h + write * x
    return h, h


plain_gate = ElementwiseKernel("plain_gate", header=HERE / "plain_gate_cell.h", step=plain_step, streams=("a", "x"))


def measure(call: Callable[[], object], repeats: int) -> float:
    return round(1e3 * statistics.median(milliseconds(call, repeats)), 1)


def both(call: Callable[[], Tensor], leaves: Sequence[Tensor], repeats: int) -> dict[str, float]:
    """Of a differentiable call: forward, and backward alone."""
    y = call()
    gy = torch.randn_like(y)
    return {
        "forward": measure(call, repeats),
        "backward": measure(lambda: torch.autograd.grad(y, leaves, gy, retain_graph=True), repeats),
    }


def ours(kernel: ElementwiseKernel, batch: int, steps: int, width: int, repeats: int) -> dict[str, float]:
    # Slices of one tensor, as the joined product of a mixer leaves them.
    wide = torch.randn(steps, batch, width * len(kernel.cell.streams), **NARROW)
    streams = [x.requires_grad_() for x in wide.split(width, -1)]
    vectors = [torch.full((width,), 0.5, device="cuda", requires_grad=True) for _ in kernel.cell.vectors]
    leaves = [*streams, *vectors, torch.zeros(batch, width, device="cuda", requires_grad=True)]
    return both(lambda: kernel(*leaves)[0], leaves, repeats)


def fla(batch: int, steps: int, width: int, repeats: int) -> dict[str, float]:
    from fla.ops.hgrn import fused_recurrent_hgrn

    a, x = (torch.randn(batch, steps, width, **NARROW) for _ in range(2))
    leaves = [(x * torch.sigmoid(-a)).requires_grad_(), F.logsigmoid(a).requires_grad_()]
    return both(lambda: fused_recurrent_hgrn(*leaves)[0], leaves, repeats)


def layer(batch: int, steps: int, width: int, repeats: int) -> dict[str, float]:
    from elman_e65.op import e65

    maps = [nn.Linear(width, width, **NARROW) for _ in range(2)]
    x = torch.randn(steps, batch, width, **NARROW).requires_grad_()
    delta, h0 = (torch.full(s, 0.5, device="cuda", requires_grad=True) for s in ((width,), (batch, width)))
    leaves = [x, *(p for m in maps for p in m.parameters()), delta, h0]
    return both(lambda: e65(*linears(maps, x), delta, h0)[0], leaves, repeats)


def pararnn(batch: int, steps: int, width: int, repeats: int) -> dict[str, float]:
    from pararnn import ParaRNN
    from pararnn.cells import ParaNLRU

    model = ParaRNN(ParaNLRU(width, width), solver="newton").to(**NARROW)
    x = torch.randn(batch, steps, width, **NARROW).requires_grad_()
    return both(lambda: model(x), [x, *model.parameters()], repeats)


def map_alone(batch: int, steps: int, width: int, repeats: int) -> dict[str, float]:
    linear = nn.Linear(width, 2 * width, **NARROW)
    x = torch.randn(steps, batch, width, **NARROW).requires_grad_()
    return both(lambda: linear(x), [x, *linear.parameters()], repeats)


def table(found: dict[str, Any]) -> str:
    shapes = [f"B = {row['B']}, T = {row['T']}, d = {row['d']}" for row in found["rows"]]
    names = [name for name in found["rows"][0] if name not in ("B", "T", "d", "target of gate")]
    cells = [[row[name] for row in found["rows"]] for name in names]
    words = [[f"{c['forward']} / {c['backward']}" if isinstance(c, dict) else c for c in of] for of in cells]
    return markdown([["", *shapes], *([n, *w] for n, w in zip(names, words, strict=True))])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "elementwise_h200.json")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--commit", default=commit())
    given = parser.parse_args(argv)
    os.environ.setdefault("ELMAN_KERNELS", "require")
    torch.manual_seed(0)
    what = "microseconds of a whole sequence; see the docstring of benchmarks/elementwise.py"
    found: dict[str, Any] = {"what": what, **facts(given.commit), "clocks before": clocks(), "rows": []}

    def save() -> None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")

    for shape in SHAPES:
        row: dict[str, Any] = dict(zip("BTd", shape, strict=True))
        if shape == SHAPES[0]:
            row["target of gate"] = TARGETS
        row["gate"] = ours(plain_gate, *shape, given.repeats)
        row["fla fused_recurrent_hgrn"] = attempt(fla, *shape, given.repeats)
        row["layer"] = layer(*shape, given.repeats)
        row["pararnn-torch ParaNLRU layer"] = attempt(pararnn, *shape, given.repeats)
        row["the map alone"] = map_alone(*shape, given.repeats)
        for name in VARIANTS:
            form = get_variant(name).mixer.form_of(get_variant(name).make_config())
            row[name] = ours(form.kernel, *shape, given.repeats)
        found["rows"].append(row)
        print(json.dumps(row), flush=True)
        save()
    found["clocks after"] = clocks()
    save()
    caption = (
        f"µs of a whole sequence, training forward / backward with all gradients, bfloat16. {found['gpu']}, torch "
        f"{torch.__version__}, CUDA {torch.version.cuda}, commit {given.commit}; medians. `benchmarks/elementwise.py`."
    )
    given.out.with_suffix(".md").write_text(f"{caption}\n\n{table(found)}\n")
    print(table(found))


if __name__ == "__main__":
    main()
