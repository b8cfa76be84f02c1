"""Time of one new byte after prompts of several lengths, and of streaming a long line. CPU or GPU.

    python benchmarks/generation.py [--out benchmarks/results/generation_cpu.json] [--variants e1,e42] [--dim 128] [--depth 2]

Milliseconds per byte: the median over single steps of the decoding loop behind `elman generate` (greedy, batch 1), after the
prompt has been read. Prompts take turns in short bursts, so that whatever else the machine does falls on all of them alike;
`spread` is the slowest median over the fastest. Weights and prompts are random: neither changes the work.

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

from elman_core.generation import ByteIteratorStreamer, ByteTextStreamer
from elman_core.generation.loop import prefill
from elman_core.model import LadderConfig, LadderForCausalLM, byte_tokenizer
from elman_core.registry import list_variants, resolve

PROMPTS = (64, 4096, 65536)
BURST, BURSTS = 20, 25
LINE = 20 * 1024


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


def hardware(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--variants", default=None, help="names with commas; by default all whose state has one size")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
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


if __name__ == "__main__":
    main()
