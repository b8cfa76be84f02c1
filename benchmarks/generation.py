"""Decoding in bytes per second, CPU or GPU.

    python benchmarks/generation.py --decode e42@1536x6 --samples 1,64 --device cuda --profile \
        --out benchmarks/results/decoding_h200.json
    python benchmarks/generation.py --recurrences --samples 1,8,64 --device cuda --add --out …

Of the loop behind `elman generate`, with its default sampling (temperature 0.8, top-k 40, top-p
0.9), all samples together, from the first byte after the step has been recorded to the last; the median of `--repeats` runs.
`graph`: steps as a CUDA graph; `eager`: launched kernel by kernel; `generate`: transformers' own loop with the static cache;
`bursts`: `generate(custom_generate=in_bursts)`, both with prompt and recording in the time.
Every model's `graph` rows come first; a row is written when it is done, and one that takes longer than `--limit` seconds says
so. Profiles of the `graph` rows are taken at the end.

--recurrences: instead, microseconds of one step of the linear rules alone, from state to state, in `gdn@640x8`'s shape (5 heads
of 128 x 256, bfloat16, states in float32; gates are given): our kernels with the cells of the tests, and fla's fused_recurrent
functions. Medians of CUDA graphs of 64 steps. differs: |ours - fla| / |fla| of the last output.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from fla_rules import RULES, Rule
from timing import captured, milliseconds

from elman_core.generation import Sampling, generate_bytes, in_bursts
from elman_core.generation import loop as generation_loop
from elman_core.kernels import Maps, MatrixKernel
from elman_core.model import LadderConfig, LadderForCausalLM, no_progress_bars
from elman_core.model.checkpoint import load_checkpoint
from elman_core.registry import parse_size

WAYS = ("graph", "eager", "generate", "bursts")
PROMPT = b"The state of a recurrent network has one size, whatever it has read. "
SKIPPED = 32
"""Bytes at the start that are not timed: the prompt, and the recording of the step."""
SLOW = 8
"""What is launched from Python is timed over this many times fewer bytes."""
HEADS, KEYS, VALUES, STEPS = 5, 128, 256, 64
"""Of `--recurrences`."""
LONGEST = 12
"""Kernels of a profile that its row names."""


def decode(model: LadderForCausalLM, samples: int, how: str, given: argparse.Namespace) -> dict[str, Any]:
    """Bytes per second of a generation: `how` is one of WAYS."""
    if how not in WAYS:
        raise ValueError(f"--how knows {', '.join(WAYS)}")
    if how == "graph" and not given.device.startswith("cuda"):
        raise RuntimeError("CUDA graphs need a GPU")
    count = given.bytes if how in ("graph", "bursts") else max(1, given.bytes // SLOW)
    rate = transformers_rate if how in ("generate", "bursts") else loop_rate
    rates = [rate(model, samples, how, count, given) for _ in range(given.repeats)]
    return {
        "dtype": given.dtype,
        "bytes": count,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes_s": round(statistics.median(rates)),
        "lowest": round(min(rates)),
        "highest": round(max(rates)),
    }


def build(name: str, given: argparse.Namespace) -> LadderForCausalLM:
    variant, width, depth = parse_size(name)
    torch.manual_seed(0)
    config = LadderConfig(variant=variant, hidden_size=width, num_hidden_layers=depth)
    with (
        tempfile.TemporaryDirectory() as folder,
        no_progress_bars(),
    ):  # as it is loaded from a checkpoint: some parameters stay float32
        LadderForCausalLM(config).save_pretrained(folder)
        return load_checkpoint(folder, device=given.device, dtype=given.dtype)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside after so long, once Python runs again."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def loop_rate(model: LadderForCausalLM, samples: int, how: str, count: int, _given: argparse.Namespace) -> float:
    """Of the loop behind `elman generate`."""
    real = generation_loop.recorder_for
    try:
        if how == "eager":
            generation_loop.recorder_for = lambda *_: None  # type: ignore[assignment]
        sampling = Sampling(temperature=0.8, top_k=40, top_p=0.9)
        rows = generate_bytes(model, PROMPT, max_new_bytes=SKIPPED + count, num=samples, how=sampling, seed=0)
        for _ in range(SKIPPED):
            next(rows)
        started = time.perf_counter()
        came = sum(1 for _ in rows)
        return came * samples / (time.perf_counter() - started)
    finally:
        generation_loop.recorder_for = real


def transformers_rate(model: LadderForCausalLM, samples: int, how: str, count: int, given: argparse.Namespace) -> float:
    """Of `generate()` with the static cache or in bursts, prompt and recording included; the first call is not timed."""
    tokens = torch.tensor([list(PROMPT)] * samples, device=given.device)
    settings = {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "pad_token_id": 0,
    } | ({"cache_implementation": "static"} if how == "generate" else {"custom_generate": in_bursts})
    model.generation_config.eos_token_id = None
    model.generate(tokens, max_new_tokens=2 * SKIPPED, **settings)
    synchronize(given.device)
    started = time.perf_counter()
    model.generate(tokens, max_new_tokens=count, **settings)
    synchronize(given.device)
    return count * samples / (time.perf_counter() - started)


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def profile(model: LadderForCausalLM, samples: int) -> dict[str, Any]:
    """What a step of the loop behind `elman generate` spends its time on: microseconds, and its longest kernels."""
    from step_profile import profile_steps

    steps = 256
    rows = generate_bytes(
        model, PROMPT, max_new_bytes=SKIPPED + steps + 64, num=samples, how=Sampling(0.8, 40, 0.9), seed=0
    )
    for _ in range(SKIPPED):
        next(rows)
    taken = profile_steps(lambda: [next(rows) for _ in range(steps)], steps, model.device)
    rows.close()
    return {
        "us": round(taken.wall_us, 1),
        "busy_us": round(taken.busy_us, 1),
        "idle": round(taken.idle, 4),
        "launches": round(sum(row.calls for row in taken.rows), 1),
        "kernels": [
            {"name": row.name[:80], "calls": round(row.calls, 2), "us": round(row.us, 1)}
            for row in taken.rows[:LONGEST]
        ],
    }


def rule_us(rule: Rule, kernel: MatrixKernel, samples: int, given: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a step of a linear rule, by our kernel and by fla's."""
    x = rule.draw(samples, 1, HEADS, KEYS, VALUES, torch.bfloat16, given.device)
    ours = rule.ours(x)
    ours |= {n: ours[n].bfloat16() for n in kernel.cell.packed}
    first = torch.randn(samples, HEADS, KEYS, VALUES, device=given.device)
    last: dict[str, Any] = {}

    def us(who: str, step: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> float:
        def steps() -> None:
            state = first
            for _ in range(STEPS):
                last[who], state = step(state)

        times = milliseconds(captured(steps).replay, 4 * given.repeats)
        return round(1e3 * statistics.median(times) / STEPS, 2)

    found = {
        "us": us("ours", lambda s: kernel(x["q"], x["k"], state_BHNV=s, maps=Maps(), backend="cuda", **ours)),
        "fla_us": us("fla", lambda s: rule.theirs("fused_recurrent", x, s)),
    }
    gap = (last["ours"].float() - last["fla"].float()).norm() / last["fla"].float().norm()
    return found | {"differs": float(f"{gap.item():.1e}")}


def recurrences(report: dict[str, Any], given: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from linear_cells import CELLS

    made = {"heads": HEADS, "keys": KEYS, "values": VALUES, "fla-core": importlib.metadata.version("fla-core")}
    report["recurrences"] = made | {"commit": given.commit, "rows": (rows := [])}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for name, rule in RULES.items():
            kernel = CELLS[name].kernel(name, Path(folder))
            for samples in (int(n) for n in given.samples.split(",")):
                rows.append(row := {"rule": name, "samples": samples})
                attempt(row, given, partial(rule_us, rule, kernel, samples, given))
                print(json.dumps(row), flush=True)
                write(report, given)


def hardware(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def decoding(given: argparse.Namespace) -> dict[str, Any]:
    """Every model, way and number of samples; a way that cannot run has its reason."""
    report: dict[str, Any] = {
        "what": "decoding, bytes per second over all samples",
        "hardware": hardware(given.device),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "triton": triton_version()},
        "commit": given.commit,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "targets": {"e42@1536x6": {"1": 5_000, "64": 150_000}},
        "rows": [],
    }
    if given.add:
        report = json.loads(given.out.read_text(encoding="utf-8"))
    if given.recurrences:
        recurrences(report, given)
        return report
    profiled = "graph" if given.device.startswith("cuda") else "eager"
    for name in given.decode.split(","):
        model = build(name, given)
        for how in sorted(given.how.split(","), key=lambda h: h != "graph"):
            for samples in (int(n) for n in given.samples.split(",")):
                row = {"model": name, "samples": samples, "how": how} | ({"commit": given.commit} if given.add else {})
                report["rows"].append(row)
                attempt(row, given, lambda row=row, model=model: decode(model, row["samples"], row["how"], given))
                print(json.dumps(row), flush=True)
                write(report, given)
    # Last of all: a process that has profiled launches more slowly from then on.
    for row in [r for r in report["rows"] if given.profile and r["how"] == profiled and "bytes_s" in r]:
        model = build(row["model"], given)
        attempt(row, given, lambda row=row, model=model: {"profile": profile(model, row["samples"])})
        write(report, given)
    return report


def attempt(row: dict[str, Any], given: argparse.Namespace, measure: Callable[[], dict[str, Any]]) -> None:
    """Add to a row what is measured, or why it cannot be."""
    try:
        with limited(given.limit):
            row |= measure()
    except Exception as error:  # any failure of any library is a result
        row["reason"] = f"{type(error).__name__}: {error}"


def write(report: dict[str, Any], given: argparse.Namespace) -> None:
    if given.out:
        given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--decode", default="e42@1536x6", help="NAME@WIDTHxDEPTH, several with commas")
    parser.add_argument("--samples", default="1,64", help="with commas")
    parser.add_argument("--bytes", type=int, default=2000, help="in each sample")
    parser.add_argument("--how", default=",".join(WAYS), help="with commas")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="the kernels of a step, in every graph row")
    parser.add_argument("--recurrences", action="store_true", help="steps of the linear rules, beside fla's, instead")
    parser.add_argument("--add", action="store_true", help="rows go behind those in --out, of the same machine")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a row")
    parser.add_argument("--commit", default=None, help="of the code, for the report")
    given = parser.parse_args(argv)
    return decoding(given)


if __name__ == "__main__":
    main()
