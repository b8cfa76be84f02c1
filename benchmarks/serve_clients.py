#!/usr/bin/env python
"""`elman serve` under 1 to 256 clients at once, beside `elman generate --num 64`: bytes a second, time to the first byte.

    python benchmarks/serve_clients.py --model pretrained/e42-small --out benchmarks/results/serve_cpu.json

Each client sends a prompt of its own, or all send the one that `elman generate` continues, and reads a stream of `--bytes`
bytes. The machine may be busy, so bytes per second of
processor time are given too; for the server they include HTTP. More models than one are added to the file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import machine
import psutil

from elman_core.extension import Sampling, load_writer
from elman_core.generation import generate_bytes

PROMPT = "def function_{}(self, value):\n    "
CASES = ((1, "own"), (8, "own"), (64, "own"), (64, "one"), (256, "own"))


async def client(port: int, name: str, prompt: str, seed: int, count: int) -> tuple[float, int]:
    """(seconds to the first byte, bytes) of one stream."""
    body = {
        "model": name, "prompt": prompt, "max_tokens": count, "seed": seed, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    sent = json.dumps(body).encode()
    began, first, got = time.perf_counter(), 0.0, 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(sent) + sent)
    async for line in reader:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - began
            got += len(json.loads(line[6:])["choices"][0]["token_ids"])
    writer.close()
    return first, got


async def clients(port: int, name: str, n: int, prompts: str, count: int) -> list[tuple[float, int]]:
    texts = [PROMPT.format(f"{prompts}_{n}_{seed if prompts == 'own' else 0}") for seed in range(n)]
    return await asyncio.gather(*(client(port, name, text, seed, count) for seed, text in enumerate(texts)))


def served(model: str, count: int) -> list[dict[str, Any]]:
    """A row for each number of clients and kind of prompts."""
    words = [sys.executable, "-m", "elman_core", "serve", model, "--port", "0", "--device", "cpu", "--slots", "64"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    rows = []
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port, name = int(re.findall(r":(\d+)/v1", line)[0]), line.split()[1]
        asyncio.run(clients(port, name, 2, "own", 8))  # warm
        for n, prompts in CASES:
            cpu = sum(psutil.Process(process.pid).cpu_times()[:2])
            began = time.perf_counter()
            found = asyncio.run(clients(port, name, n, prompts, count))
            wall = time.perf_counter() - began
            cpu = sum(psutil.Process(process.pid).cpu_times()[:2]) - cpu
            firsts, written = sorted(first for first, _ in found), sum(got for _, got in found)
            rows.append(
                {
                    "clients": n, "prompts": prompts, "bytes": written, "bytes_s": round(written / wall, 1),
                    "bytes_cpu_s": round(written / cpu, 1), "first_p50_s": round(statistics.median(firsts), 3),
                    "first_p99_s": round(firsts[min(n - 1, int(0.99 * n))], 3), "load": round(os.getloadavg()[0], 1),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    finally:
        process.terminate()
        process.wait()
    return rows


def alone(model: str, count: int) -> dict[str, Any]:
    """`elman generate --num 64`, the model loaded already."""
    ladder, _ = load_writer(model, "cpu", None)
    began, cpu = time.perf_counter(), time.process_time()
    rows = list(generate_bytes(ladder, PROMPT.format(0).encode(), max_new_bytes=count, num=64, how=Sampling(), seed=0))
    wall, cpu, written = time.perf_counter() - began, time.process_time() - cpu, 64 * len(rows)
    return {"num": 64, "bytes_s": round(written / wall, 1), "bytes_cpu_s": round(written / cpu, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pretrained/e42-small")
    parser.add_argument("--bytes", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    row = {"model": args.model, "bytes": args.bytes, "generate": alone(args.model, args.bytes)}
    print(row["generate"], flush=True)
    row["serve"] = served(args.model, args.bytes)
    packages = ("torch", "transformers", "starlette", "uvicorn", "h11")
    found = json.loads(args.out.read_text()) if args.out and args.out.exists() else {"rows": []}
    found |= {
        "what": " ".join((__doc__ or "").split("\n\n")[0].split()),
        "cpu": machine.said("sh", "-c", "lscpu | sed -n 's/^Model name: *//p'"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {package: metadata.version(package) for package in packages},
        "commit": machine.commit(),
        "rows": [each for each in found["rows"] if each["model"] != args.model] + [row],
    }
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
