"""Time of one new byte after prompts of several lengths, and of streaming a long line. CPU or GPU.

    python benchmarks/generation.py [--out benchmarks/results/generation_cpu.json] [--variants e1,e42] [--dim 128] [--depth 2]

Milliseconds per byte: the median over single steps of the decoding loop behind `elman generate` (greedy, batch 1), after the
prompt has been read. Prompts take turns in short bursts, so that whatever else the machine does falls on all of them alike;
`spread` is the slowest median over the fastest. Weights and prompts are random: neither changes the work.

    python benchmarks/generation.py --decode e42@1536x6 --samples 1,64 --device cuda --profile \
        --out benchmarks/results/decoding_h200.json

Decoding: bytes per second of the loop behind `elman generate`, with its default sampling (temperature 0.8, top-k 40, top-p
0.9), all samples together, from the first byte after the step has been recorded to the last; the median of `--repeats` runs.
`graph`: steps as a CUDA graph; `eager`: launched kernel by kernel; `generate`: transformers' own loop with the static cache;
`bursts`: `generate(custom_generate=in_bursts)`, both with prompt and recording in the time.
Every model's `graph` rows come first; a row is written when it is done, and one that takes longer than `--limit` seconds says
so. Profiles of the `graph` rows are taken at the end.

Streaming: seconds that a streamer needs for 20 KB of text without a newline, byte by byte, all else left out; transformers' own
TextStreamer is measured on a tenth of it, since its time grows with the square.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import os
import platform
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TextStreamer

from elman_core.generation import ByteIteratorStreamer, ByteTextStreamer, Sampling, generate_bytes, in_bursts
from elman_core.generation import loop as generation_loop
from elman_core.generation.loop import prefill
from elman_core.model import LadderConfig, LadderForCausalLM, byte_tokenizer, no_progress_bars
from elman_core.model.checkpoint import load_checkpoint
from elman_core.registry import list_variants, parse_size, resolve

PROMPTS = (64, 4096, 65536)
BURST, BURSTS = 20, 25
LINE = 20 * 1024
WAYS = ("graph", "eager", "generate", "bursts")
PROMPT = b"The state of a recurrent network has one size, whatever it has read. "
SKIPPED = 32
"""Bytes at the start that are not timed: the prompt, and the recording of the step."""
SLOW = 8
"""What is launched from Python is timed over this many times fewer bytes."""
LONGEST = 12
"""Kernels of a profile that its row names."""


def step_times(variant: str, dim: int, depth: int, device: str) -> dict[str, Any]:
    """Median milliseconds of a step after each prompt length, and the bytes of the state, which is one and the same."""
    torch.manual_seed(0)
    model = LadderForCausalLM(LadderConfig(variant=variant, hidden_size=dim, num_hidden_layers=depth)).to(device).eval()
    readers = {}
    for length in PROMPTS:
        cache, logits_1V = prefill(model, os.urandom(length))
        readers[length] = [cache, logits_1V.argmax(-1)[:, None]]
    times: dict[int, list[float]] = {length: [] for length in PROMPTS}
    for burst in range(BURSTS + 1):  # the first warms up
        for length, reader in readers.items():
            for _ in range(BURST):
                seconds = one_step(model, reader)
                if burst:
                    times[length].append(seconds)
    medians = {length: 1e3 * statistics.median(t) for length, t in times.items()}
    sizes = {sum(t.nbytes for s in cache.states for t in s.values()) for cache, _ in readers.values()}
    assert len(sizes) == 1
    return {
        "ms_per_byte": {str(length): round(ms, 4) for length, ms in medians.items()},
        "spread": round(max(medians.values()) / min(medians.values()), 4),
        "state_bytes": sizes.pop(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


@torch.inference_mode()
def one_step(model: LadderForCausalLM, reader: list[Any]) -> float:
    """Feed one byte and choose the next; seconds."""
    cache, byte_11 = reader
    started = time.perf_counter()
    logits_1V = model(input_ids=byte_11, past_key_values=cache, use_cache=True).logits[:, -1]
    reader[1] = logits_1V.argmax(-1)[:, None]
    if byte_11.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def streaming_times() -> dict[str, float]:
    """Seconds for a line of 20 KB through each streamer; 2 KB through transformers' own."""
    tokens = [torch.tensor([byte]) for byte in (b"no newline in this text, " * (LINE // 25 + 1))[:LINE]]
    quiet = io.StringIO()

    class Discarding(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            quiet.write(text + "\n" * stream_end)

    found = {}
    for name, streamer, count in (
        ("ByteTextStreamer, 20 KB", ByteTextStreamer(quiet), LINE),
        ("ByteIteratorStreamer, 20 KB", ByteIteratorStreamer(), LINE),
        ("transformers TextStreamer, 2 KB", Discarding(byte_tokenizer()), LINE // 10),
    ):
        started = time.perf_counter()
        for token in tokens[:count]:
            streamer.put(token)
        streamer.end()
        found[name] = round(time.perf_counter() - started, 4)
    return found


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
        report["rows"] = json.loads(given.out.read_text(encoding="utf-8"))["rows"]
    profiled = "graph" if given.device.startswith("cuda") else "eager"
    for name in given.decode.split(","):
        model = build(name, given)
        for how in sorted(given.how.split(","), key=lambda h: h != "graph"):
            for samples in (int(n) for n in given.samples.split(",")):
                row = {"model": name, "samples": samples, "how": how}
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
    parser.add_argument("--variants", default=None, help="names with commas; by default all whose state has one size")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--decode", help="measure decoding of NAME@WIDTHxDEPTH instead, several with commas")
    parser.add_argument("--samples", default="1,64", help="of --decode, with commas")
    parser.add_argument("--bytes", type=int, default=2000, help="of --decode, in each sample")
    parser.add_argument("--how", default=",".join(WAYS), help="of --decode, with commas")
    parser.add_argument("--dtype", default="bfloat16", help="of --decode")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="of --decode: the kernels of a step, in every graph row")
    parser.add_argument(
        "--add", action="store_true", help="of --decode: rows go behind those in --out, of the same machine"
    )
    parser.add_argument("--limit", type=float, default=120.0, help="of --decode: seconds for a row")
    parser.add_argument("--commit", default=None, help="of the code, for the report")
    given = parser.parse_args(argv)
    if given.decode:
        return decoding(given)
    torch.set_num_threads(1)
    names = given.variants.split(",") if given.variants else sorted(list_variants())
    constant = [
        n
        for n in names
        if all(resolve(n).variant.branch(r).state_growth == "constant" for r in range(resolve(n).variant.rungs))
    ]
    report = {
        "hardware": hardware(given.device),
        "threads": 1,
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "size": f"{given.dim}x{given.depth}",
        "streaming_seconds": streaming_times(),
        "variants": {name: step_times(name, given.dim, given.depth, given.device) for name in constant},
    }
    text = json.dumps(report, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")
    return report


if __name__ == "__main__":
    main()
