"""Time GRU and LSTM beside cuDNN's and FlashRNN's, E2's slots beside E1, and E23, on one GPU; and training steps.

    python benchmarks/gates.py [--out benchmarks/results/gates_h200.json]

One layer, µs a time step, forward and forward + backward with all gradients, T = 512, B = 32. GRU and LSTM with their input
product: ours and FlashRNN's (of the widths it holds; its GRU is not fused) in bfloat16, cuDNN's (torch.nn) in float16, in which
alone it takes its persistent kernels. The GRU with the reset gate before has no peer. E2 and E23: the recurrence of 8 slots of
512 beside E1's at 1536. The step: `training_step.py`'s, as one CUDA graph, of GRU and LSTM on our kernels and on cuDNN's.
FlashRNN takes a minute to compile for a shape, so processes of their own do that meanwhile, and time it when everything else is
timed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from dense import attempt, both, flashrnn, ours
from elman_baselines.rnn import gru, lstm
from machine import commit, facts
from tables import RESULTS, markdown
from training_step import figures, random_text, row_of, steady, trainer

from elman_core.kernels.dense.run import check_errors
from elman_core.registry import resolve

WIDTHS, FLASHRNN_WIDTHS, B, T, REPEATS = (512, 768, 1024), (512, 1024), 32, 512, 31
WAIT_S = 60  # for FlashRNN, when everything else is timed
KINDS = {"gru": (gru, torch.nn.GRU, 1), "lstm": (lstm, torch.nn.LSTM, 2)}


def recurrence(kind: str, width: int) -> dict[str, Any]:
    """Ours, and cuDNN's, from the same call to the next."""
    run, module, states = KINDS[kind]
    theirs = module(width, width).cuda().half()
    weights = [w.detach().clone().bfloat16().requires_grad_() for w in theirs.parameters()]
    x = torch.randn(T, B, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    start = [torch.zeros(B, width, device="cuda") for _ in range(states)]
    found = {"ours": both(lambda: run(x, tuple(weights), *start)[:1], [x, *weights], T, REPEATS)}
    y = x.detach().half().requires_grad_()
    found["cudnn"] = both(lambda: theirs(y)[:1], [y, *theirs.parameters()], T, REPEATS)
    check_errors(torch.device("cuda", 0))
    return found


def _flashrnn(kind: str, width: int, pipe: Any) -> None:
    """Compiles, then times FlashRNN when it is told to, and sends the times or why there are none."""
    os.nice(10)
    made = attempt(flashrnn, T, B, width, kind)
    pipe.recv()
    pipe.send(made if isinstance(made, str) else attempt(both, *made, T, REPEATS // 3))


@contextmanager
def flashrnn_processes() -> Iterator[dict[str, Any]]:
    """A pipe to the process of each recurrence; none where FlashRNN is not installed."""
    context, started, pipes = processes.get_context("spawn"), [], {}
    for kind in KINDS if find_spec("flashrnn") else ():
        for width in FLASHRNN_WIDTHS:
            pipes[f"{kind} {width}"], end = context.Pipe()
            started.append(context.Process(target=_flashrnn, args=(kind, width, end), daemon=True))
            started[-1].start()
    try:
        yield pipes
    finally:
        for process in started:
            process.kill()


def reset_before(width: int) -> dict[str, Any]:
    """The GRU that no library has fused."""
    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    leaves = [torch.randn(T, B, width, **bf16)]
    leaves += [
        torch.randn(s, **bf16) * (0.45 / width**0.5) for s in ((3 * width, width), (3 * width, width), (3 * width,))
    ]
    x, *weights = (x.requires_grad_() for x in leaves)
    h0 = torch.zeros(B, width, device="cuda")
    return both(lambda: gru(x, tuple(weights), h0)[:1], leaves, T, REPEATS)


def slots() -> dict[str, Any]:
    e2, e1 = (resolve(n).variant.branch(0).kernel for n in ("e2", "e1"))  # type: ignore[attr-defined]
    from elman_e23.op import SLOTS, e23

    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    tape = [torch.randn(T, B, 512, **bf16), *(torch.randn(512, 512, **bf16) * (0.45 / 512**0.5) for _ in range(2))]
    tape += [torch.zeros(B, 512, device="cuda"), torch.randn(B, SLOTS, 512, device="cuda")]
    tape = [x.requires_grad_() for x in tape]
    u = torch.randn(T, B, 8 * 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(8, 512, 512, device="cuda") * 0.45 / 512**0.5).bfloat16().requires_grad_()
    h0 = torch.randn(B, 8 * 512, device="cuda", requires_grad=True)
    return {
        "e2, 8 slots of 512": both(lambda: e2(u, w, h0, backend="cuda"), [u, w, h0], T, REPEATS),
        "e1 at 1536": ours(e1, T, B, 1536, torch.bfloat16, REPEATS),
        "e23, 8 slots, d = 512": both(lambda: e23(*tape, tape[-1][0], backend="cuda")[:1], tape, T, REPEATS),
    }


def step(name: str, text: Path) -> dict[str, Any]:
    with trainer(name, "graph", B, T, "cuda", text) as made:
        found = figures(steady(made, 5, 20), B * T)
        return {
            "model": name,
            "backend": made.model.model.layers[0].mixer.backend(),
            "ran": made._how()["mode"],
            **found,
        }


def words(found: dict[str, Any]) -> str:
    """Markdown: of every layer, then of every training step."""
    ways = ("forward", "forward_backward")
    rows = [["layer", "ours", "cuDNN, float16", "ours / cuDNN", "FlashRNN"]]
    for name, row in found["recurrences"].items():
        us = {who: [cell[way]["median"] for way in ways] for who, cell in row.items() if isinstance(cell, dict)}
        us["ratio"] = [a / b for a, b in zip(us["ours"], us["cudnn"], strict=True)]
        shown = (us.get(who, []) for who in ("ours", "cudnn", "ratio", "flashrnn"))
        cells = [" / ".join(f"{v:.3g}" for v in vs) for vs in shown]
        rows.append([name, *cells[:3], cells[3] or row.get("flashrnn", "–")])
    more = [["recurrence", "forward / forward + backward"]]
    more += [
        [n, row.get("reason") or " / ".join(f"{row[way]['median']:.2f}" for way in ways)]
        for n, row in found["slots"].items()
    ]
    steps = [["model", "kernels of elman_csrc", "cuDNN"]]
    for name in dict.fromkeys(r["model"] for r in found["steps"]):
        steps.append([name, *(f"{r['tok_s']:,} tok/s" for r in found["steps"] if r["model"] == name)])
    return "\n\n".join(markdown(table) for table in (rows, more, steps))


def write(found: dict[str, Any], out: Path) -> None:
    out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "gates_h200.json")
    parser.add_argument("--commit", default=commit())
    given = parser.parse_args()
    os.environ["ELMAN_KERNELS"] = "require"
    found: dict[str, Any] = {"what": "see the docstring of benchmarks/gates.py", "B": B, "T": T, **facts(given.commit)}
    with flashrnn_processes() as flash, tempfile.TemporaryDirectory() as folder:
        found["recurrences"] = {f"{kind} {width}": recurrence(kind, width) for kind in KINDS for width in WIDTHS}
        found["slots"] = slots()
        for width in WIDTHS:
            found["slots"][f"gru {width}, reset before"] = row_of(lambda: reset_before(width))  # noqa: B023
        write(found, given.out)
        found["steps"], text = [], random_text(Path(folder))
        for name in ("lstm@896x6", "gru@1024x6"):
            for mode in ("require", "off"):
                os.environ["ELMAN_KERNELS"] = mode
                found["steps"].append(row_of(lambda: step(name, text)))  # noqa: B023
        write(found, given.out)
        until = time.monotonic() + WAIT_S
        for name, pipe in flash.items():
            pipe.send("go")
            ready = pipe.poll(max(0.0, until - time.monotonic()))
            found["recurrences"][name]["flashrnn"] = attempt(pipe.recv) if ready else "it did not compile in time"
    write(found, given.out)
    caption = (
        f"µs a time step of one layer, T = {T}, B = {B}, forward / forward + backward; and training steps (6 layers, B = {B}). "
        f"{found['gpu']}, torch {torch.__version__}, CUDA {torch.version.cuda}, commit {given.commit}; medians. "
        "`benchmarks/gates.py`."
    )
    given.out.with_suffix(".md").write_text(f"{caption}\n\n{words(found)}\n")
    print(words(found))


if __name__ == "__main__":
    main()
