"""Time the problems of this project, beside its peers, on this machine.

    python benchmarks/run.py --list
    python benchmarks/run.py dense --peers --only e42,plain --out benchmarks/results/dense_h100.json
    python benchmarks/run.py all --peers --out everything.json

A figure is a median between two CUDA events (on a CPU, of the wall clock) after three calls that do not count. A peer gets our
inputs, and its output and gradients are compared with ours first. The file is written after every row; it has the hardware,
driver, versions and commit. Several problems run one after the other, each in its own process. Peers are timed if they are
installed; nothing is downloaded. The exit code is 1 if a row of ours has no figures, or if a peer computes something else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch
from harness import Row, Setting, facts

PROBLEMS = {
    "dense": ("dense", "µs a step: E1, E42 and h = tanh(W h + u)", "torch.nn (cuDNN), FlashRNN, cuBLAS step by step"),
    "gates": (
        "gates",
        "µs a step: GRU and LSTM with their input product; slots of E2 and E23",
        "torch.nn (cuDNN), FlashRNN",
    ),
    "elementwise": ("elementwise", "µs: a gated update, eight variants, E65 as a layer", "fla's HGRN, pararnn-torch"),
    "matrix": ("matrix", "µs: E88 and the other cells of matrix states; large heads", ""),
    "matrix-peers": ("matrix", "µs: E97 and M²RNN, the same inputs", "Emender's and xma's Triton kernels"),
    "rules": ("matrix", "µs of a decoding step: the linear rules", "fla's fused_recurrent"),
    "rules-whole": (
        "matrix",
        "µs: the linear rules with a decay for each channel, 32K and 128K tokens",
        "fla's chunks",
    ),
    "conv": ("conv", "µs: the causal convolution, four taps", "causal-conv1d, fla, torch"),
    "cross-entropy": (
        "cross_entropy",
        "µs and MiB: head and loss of 32,000 and 150,000 classes",
        "Liger, torch's fused and plain",
    ),
    "step": (
        "step",
        "tok/s, ms and GiB of a whole training step, B = 32 and 64",
        "mamba_ssm, fla, transformers' LLaMA",
    ),
    "packed": ("step", "tok/s and ms of a whole training step with documents that begin inside rows", ""),
    "documents": ("documents", "bytes/s of documents of 256 bytes to 4 KB in packed rows and in padded ones", ""),
    "optimizers": ("step", "tok/s with each optimizer; µs of an update", "schedulefree"),
    "decode": ("decode", "bytes/s, one text and 64", "transformers' generate()"),
    "whole": ("whole", "texts of models' programs that equal those of recorded steps, and errors of their logits", ""),
    "prefill": ("decode", "seconds and GiB for a prompt of 1 MB, its layers one after another and as a wave", ""),
    "decode-cpu": ("decode_cpu", "bytes/s of one text on a CPU, with a recorded step and without", ""),
    "int8": ("int8", "bits per byte of held-out text that weights in int8 cost (CPU)", ""),
    "serve": (
        "serve",
        "bytes/s and time to the first byte: 1 to 256 clients of `elman serve`, beside `elman generate`",
        "transformers' continuous batching of a LLaMA",
    ),
    "scaling": ("scaling", "tok/s on 1, 2, 4, … GPUs", ""),
    "parity": ("parity", "errors of the baselines against float64", "mamba_ssm's and fla's layers"),
    "verify": ("verify", "errors of kernels against float64, full grid", ""),
    "tracking": ("tracking", "share of right answers: which recurrences track a state (CPU)", ""),
    "plain-lstm": ("plain_lstm", "accuracy on formal languages: what the ladder adds to torch.nn.LSTM", ""),
    "cpu": ("cpu", "tok/s and GiB of whole training steps on a CPU, beside the tree before", ""),
    "data": ("data", "MB/s packed, tokens/s fed from packed files, eight ranks (CPU)", "datasets"),
    "feeding": ("feeding", "tok/s of trainings fed from three packed files, and the gaps between their kernels", ""),
    "kills": ("kills", "trainings and schedulers that are killed end as if they had not been (CPU)", ""),
}
"""Name: (module, whose `rows` or NAME are called, what is measured, peers)."""


def rows_of(name: str):  # type: ignore[no-untyped-def]
    module = import_module(f"problems.{PROBLEMS[name][0]}")
    return getattr(module, name.replace("-", "_"), None) or module.rows


def save(out: Path | None, found: Row) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")


def run(name: str, given: argparse.Namespace) -> list[Row]:
    """The rows of one problem, here; the file is written after each."""
    device = torch.device(given.device)
    if device.type == "cuda":
        os.environ.setdefault("ELMAN_KERNELS", "require")  # a kernel, or the reason why there is none
    elif given.tiny:
        os.environ.setdefault("ELMAN_KERNELS", "off")
    torch.manual_seed(0)
    found: Row = {"problem": name, "what": PROBLEMS[name][1], "tiny": given.tiny, **facts(device), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        only = tuple(word for word in given.only.split(",") if word)
        setting = Setting(device, given.tiny, given.peers, given.repeats, only, Path(folder))
        for row in rows_of(name)(setting):
            print(json.dumps({"problem": name, **row}), flush=True)
            found["rows"].append({"problem": name, **row})
            save(given.out, found)
    if not found["rows"]:
        sys.exit(f"{name}: no row is named {given.only}; the same command without --only shows the names")
    return list(found["rows"])


def apart(names: Sequence[str], given: argparse.Namespace) -> list[Row]:
    """The rows of several problems, each in its own process."""
    found: Row = {"problem": ", ".join(names), **facts(torch.device(given.device)), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            part = Path(folder, f"{name}.json")
            more = [word for flag in ("peers", "tiny") if getattr(given, flag) for word in [f"--{flag}"]]
            words = [
                name,
                *more,
                "--only",
                given.only,
                "--repeats",
                str(given.repeats),
                "--device",
                given.device,
                "--out",
                str(part),
            ]
            ended = subprocess.run([sys.executable, __file__, *words], check=False)
            rows = json.loads(part.read_text())["rows"] if part.exists() else []
            if ended.returncode not in (0, 1) or not rows:
                rows.append({"problem": name, "kind": "ours", "reason": f"it ended with exit code {ended.returncode}"})
            found["rows"] += rows
            save(given.out, found)
    return list(found["rows"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="problems, or all")
    parser.add_argument("--list", action="store_true", help="the problems, what they measure, and the peers")
    parser.add_argument("--peers", action="store_true", help="time the peers too")
    parser.add_argument(
        "--only", default="", help="rows with one of these words among their names: a model, a peer, a width"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes in float32, which show that everything runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=31, help="of each figure")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    if given.list or not given.names:
        for name, (_, what, peers) in PROBLEMS.items():
            print(f"{name:12} {what}{f'; beside {peers}' if peers else ''}")
        return 0
    names = list(PROBLEMS) if given.names == ["all"] else given.names
    if unknown := [name for name in names if name not in PROBLEMS]:
        parser.error(f"no problem {unknown[0]!r}: choose among {', '.join(PROBLEMS)}")
    rows = run(names[0], given) if len(names) == 1 else apart(names, given)
    return int(any(row.get("agrees") is False or ("reason" in row and row.get("kind") != "peer") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
