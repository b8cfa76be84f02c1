"""Time of one new byte after prompts of several lengths, and of streaming a long line. CPU or GPU.

    python benchmarks/generation.py [--out benchmarks/results/generation_cpu.json] [--variants e1,e42] [--dim 128] [--depth 2]

Milliseconds per byte: the median over single steps of the decoding loop behind `elman generate` (greedy, batch 1), after the
prompt has been read. Prompts take turns in short bursts, so that whatever else the machine does falls on all of them alike;
`spread` is the slowest median over the fastest. Weights and prompts are random: neither changes the work.

    python benchmarks/generation.py --decode e42@1536x6 --samples 1,64 --device cuda --out benchmarks/results/decoding_h200.json

Decoding: bytes per second of the loop behind `elman generate`, with its default sampling (temperature 0.8, top-k 40, top-p
0.9), all samples together, from the first byte after the step has been recorded to the last; the median of `--repeats` runs.
`graph`: the step as a CUDA graph; `eager`: launched kernel by kernel; `generate`: transformers' own loop with the static cache.

Streaming: seconds that a streamer needs for 20 KB of text without a newline, byte by byte, all else left out; transformers' own
TextStreamer is measured on a tenth of it, since its time grows with the square.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from elman_core.generation import ByteIteratorStreamer, ByteTextStreamer, Sampling, generate_bytes
from elman_core.generation import loop as generation_loop
from elman_core.generation.loop import prefill
from elman_core.model import LadderConfig, LadderForCausalLM, byte_tokenizer
from elman_core.registry import list_variants, parse_size, resolve

PROMPTS = (64, 4096, 65536)
BURST, BURSTS = 20, 25
LINE = 20 * 1024
WAYS = ("graph", "eager", "generate")
PROMPT = b"The state of a recurrent network has one size, whatever it has read. "
SKIPPED = 32
"""Bytes at the start that are not timed: the prompt, and the recording of the step."""


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


def decode(name: str, samples: int, how: str, given: argparse.Namespace) -> dict[str, Any]:
    """Bytes per second of a generation: `how` is graph, eager or generate."""
    if how not in WAYS:
        raise ValueError(f"--how knows {', '.join(WAYS)}")
    if how == "graph" and not given.device.startswith("cuda"):
        raise RuntimeError("CUDA graphs need a GPU")
    variant, width, depth = parse_size(name)
    torch.manual_seed(0)
    config = LadderConfig(variant=variant, hidden_size=width, num_hidden_layers=depth)
    model = LadderForCausalLM(config).to(given.device, getattr(torch, given.dtype)).eval()
    row = {"model": name, "samples": samples, "how": how, "dtype": given.dtype, "bytes": given.bytes}
    row["parameters"] = sum(p.numel() for p in model.parameters())
    rates = [
        (transformers_rate if how == "generate" else loop_rate)(model, samples, how, given)
        for _ in range(given.repeats)
    ]
    return row | {"bytes_s": round(statistics.median(rates)), "lowest": round(min(rates)), "highest": round(max(rates))}


def loop_rate(model: LadderForCausalLM, samples: int, how: str, given: argparse.Namespace) -> float:
    """Of the loop behind `elman generate`."""
    real = generation_loop.recorder_for
    try:
        if how == "eager":
            generation_loop.recorder_for = lambda *_: None  # type: ignore[assignment]
        sampling = Sampling(temperature=0.8, top_k=40, top_p=0.9)
        rows = generate_bytes(model, PROMPT, max_new_bytes=SKIPPED + given.bytes, num=samples, how=sampling, seed=0)
        for _ in range(SKIPPED):
            next(rows)
        started = time.perf_counter()
        count = sum(1 for _ in rows)
        return count * samples / (time.perf_counter() - started)
    finally:
        generation_loop.recorder_for = real


def transformers_rate(model: LadderForCausalLM, samples: int, _how: str, given: argparse.Namespace) -> float:
    """Of `generate()` with the static cache, which transformers compiles on a GPU; the first call is not timed."""
    tokens = torch.tensor([list(PROMPT)] * samples, device=given.device)
    how = {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "cache_implementation": "static",
        "pad_token_id": 0,
    }
    model.generation_config.eos_token_id = None
    model.generate(tokens, max_new_tokens=SKIPPED, **how)
    synchronize(given.device)
    started = time.perf_counter()
    model.generate(tokens, max_new_tokens=given.bytes, **how)
    synchronize(given.device)
    return given.bytes * samples / (time.perf_counter() - started)


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def profile(name: str, samples: int, given: argparse.Namespace) -> None:
    """Write the table of kernels of a decoded byte beside --out."""
    from elman_core.training.profile import profile_steps

    variant, width, depth = parse_size(name)
    model = LadderForCausalLM(LadderConfig(variant=variant, hidden_size=width, num_hidden_layers=depth))
    model = model.to(given.device, getattr(torch, given.dtype)).eval()
    rows = generate_bytes(model, PROMPT, max_new_bytes=SKIPPED + 1000, num=samples, how=Sampling(0.8, 40, 0.9), seed=0)
    for _ in range(SKIPPED):
        next(rows)
    taken = profile_steps(lambda: [next(rows) for _ in range(256)], 256, model.device)
    taken.write(given.out.with_name(f"{given.out.stem}_profile_{samples}"))


def hardware(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def decoding(given: argparse.Namespace) -> dict[str, Any]:
    """Every number of samples in every way; a way that cannot run has its reason."""
    samples = [int(n) for n in given.samples.split(",")]
    report: dict[str, Any] = {
        "what": "decoding, bytes per second over all samples",
        "hardware": hardware(given.device),
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "targets": {"e42@1536x6": {"1": 5_000, "64": 150_000}},
        "rows": [],
    }
    for count in samples:
        for how in given.how.split(","):
            try:
                row = decode(given.decode, count, how, given)
            except Exception as error:  # any failure of any library is a result
                row = {
                    "model": given.decode,
                    "samples": count,
                    "how": how,
                    "reason": f"{type(error).__name__}: {error}",
                }
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
            if given.out:
                given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if given.profile and given.out:
            profile(given.decode, count, given)
    return report


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--variants", default=None, help="names with commas; by default all whose state has one size")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--decode", help="measure decoding of NAME@WIDTHxDEPTH instead")
    parser.add_argument("--samples", default="1,64", help="of --decode, with commas")
    parser.add_argument("--bytes", type=int, default=2000, help="of --decode, in each sample")
    parser.add_argument("--how", default=",".join(WAYS), help="of --decode, with commas")
    parser.add_argument("--dtype", default="bfloat16", help="of --decode")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="of --decode: a table of kernels beside --out")
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
