"""`elman serve` under 1 to 256 clients at once: bytes a second, and seconds to the first byte.

Each client sends its own prompt of about 40 bytes, or all send the same one ("one"), and reads a stream of 128 bytes, or of
512 to show decoding itself; the server has 64 slots. The clients are sockets in one loop; JSON is parsed afterwards.
References, from a loaded model, are `elman generate --num 64`, which reads one prompt, and `in_bursts`, which reads 64
different prompts in one batch: the work of 64 clients. Bytes are those written; bytes per second of processor time say more on
a busy machine, and include HTTP for the server. The peer is transformers' continuous batching (`generate_batch`, without HTTP,
its graphs recorded before) with a random LLaMA of the same number of parameters, since it refuses recurrent models. --only
names models. On a GPU the models are random, too. It needs the packages of extensions/serve.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import Row, Setting

from elman_core.extension import Sampling, load_writer
from elman_core.generation import generate_bytes, in_bursts

from .decode import build
from .step import llama

PROMPT = "def function_{}(self, value):\n  "
CASES = ((1, "own", 128), (8, "own", 128), (64, "own", 128), (64, "one", 128), (256, "own", 128), (64, "own", 512))
SLOTS = 64
SHIPPED = ("pretrained/e42-small", "pretrained/e88-small")
RANDOM, LLAMA = ("e42@1216x6", "e88:conv_h5n128v256@640x8"), (384, 15)  # 27M parameters each


def prompts(clients: int, kind: str) -> list[str]:
    return [PROMPT.format(f"{kind}_{clients}_{0 if kind == 'one' else n:03}") for n in range(clients)]


def ask(port: int, name: str, texts: list[str], count: int) -> tuple[list[float], list[bytes]]:
    """Stream an answer to each text, all at once; return the seconds to the first byte, and the answers."""
    fields = {"model": name, "max_tokens": count, "stream": True, "return_token_ids": True}
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    bodies = [json.dumps({**fields, "prompt": text, "seed": seed}).encode() for seed, text in enumerate(texts)]
    firsts, got = [0.0] * len(texts), [b""] * len(texts)
    with selectors.DefaultSelector() as ready:
        for index, body in enumerate(bodies):
            firsts[index] -= time.perf_counter()
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            ready.register(client, selectors.EVENT_READ, (client, index))
        while ready.get_map():
            for key, _ in ready.select():
                client, index = key.data
                new = client.recv(1 << 16)
                got[index] += new
                if firsts[index] < 0 and b"data: {" in got[index]:
                    firsts[index] += time.perf_counter()
                if not new:
                    ready.unregister(client)
                    client.close()
    return firsts, got


def count_bytes(answer: bytes) -> int:
    events = map(json.loads, re.findall(rb"^data: (\{.*)", answer, re.MULTILINE))
    return sum(len(event["choices"][0]["token_ids"]) for event in events)


def processor_seconds(process: int) -> float:
    """Processor seconds that a process has used, from /proc."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Served:
    """A server in its own process, to which `load` sends requests."""

    def __init__(self, folder: str, setting: Setting) -> None:
        words = [sys.executable, "-m", "elman_core", "serve", folder, "--port", "0", "--slots", str(SLOTS)]
        self.process = subprocess.Popen([*words, "--device", str(setting.device)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended with status {self.process.wait()}")
        self.port, self.name = int(re.findall(r":(\d+)/v1", line)[0]), line.split()[1]
        for clients in (*(1 << n for n in range(7)), 256):  # a GPU's kernels are settled for each number of rows read
            self.load(clients, "warm", 4)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def load(self, clients: int, kind: str, count: int) -> Row:
        cpu, began = processor_seconds(self.process.pid), time.perf_counter()
        firsts, answers = ask(self.port, self.name, prompts(clients, kind), count)
        wall, cpu = time.perf_counter() - began, processor_seconds(self.process.pid) - cpu
        firsts, written = sorted(firsts), sum(map(count_bytes, answers))
        return {
            "bytes": written, "bytes_s": round(written / wall, 1), "bytes_cpu_s": round(written / max(cpu, 0.01), 1),
            "first_p50_s": round(statistics.median(firsts), 3), "first_p99_s": round(firsts[int(0.99 * clients)], 3),
            "load": round(os.getloadavg()[0], 1),
        }  # fmt: skip


def alone(folder: str, setting: Setting, kind: str, count: int) -> Row:
    """64 texts without a server, the model loaded already; the second time of two."""
    ladder, _ = load_writer(folder, str(setting.device), None)
    texts = [text.encode() for text in prompts(SLOTS, kind)]
    for _ in range(2):
        began, cpu = time.perf_counter(), time.process_time()
        if kind == "one":
            for _ in generate_bytes(ladder, texts[0], max_new_bytes=count, num=SLOTS, how=Sampling(), seed=0):
                pass
        else:
            read = torch.tensor([list(text) for text in texts], device=setting.device)
            ladder.generate(read, max_new_tokens=count, do_sample=True, top_k=0, custom_generate=in_bursts)
        wall, cpu, written = time.perf_counter() - began, time.process_time() - cpu, SLOTS * count
    return {
        "bytes_s": round(written / wall, 1), "bytes_cpu_s": round(written / cpu, 1), "load": round(os.getloadavg()[0], 1)
    }  # fmt: skip


def batched(setting: Setting, clients: int, count: int) -> Row:
    """transformers' continuous batching; the second time of two."""
    from transformers import GenerationConfig

    width, depth = (64, 1) if setting.tiny else LLAMA
    model: Any = llama(width, depth).inner.to(setting.device, setting.dtype).eval()
    model.config.use_cache = True
    config = GenerationConfig(do_sample=True, max_new_tokens=count, eos_token_id=-1, pad_token_id=0, top_k=0)
    for kind in ("warm", "own"):
        texts = [list(text.encode()) for text in prompts(clients, kind)]
        began = time.perf_counter()
        made = model.generate_batch(texts, generation_config=config, persistent_manager=True)
        wall = time.perf_counter() - began
    model.destroy_cached_continuous_batching_manager()
    written = sum(len(each.generated_tokens) for each in made.values())
    if written != clients * count:
        raise RuntimeError(f"{written} tokens came, not {clients * count}")
    return {
        "bytes": written,
        "bytes_s": round(written / wall, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def rows(setting: Setting) -> Iterator[Row]:
    gpu = setting.device.type == "cuda"
    models = ("e42@64x1",) if setting.tiny else RANDOM if gpu else SHIPPED
    cases = ((8, "own", 4),) if setting.tiny else CASES
    for name in models:
        if not setting.wants(model=name):
            continue
        if "@" in name:
            build(name, setting)
        folder = str(setting.folder / name.replace(":", "_")) if "@" in name else name
        row = {"model": name, "kind": "ours"}
        for count in sorted({count for *_, count in cases}):
            for kind, who in (("one", "generate"), ("own", "in_bursts")):
                made = lambda folder=folder, kind=kind, count=count: alone(folder, setting, kind, count)  # noqa: E731
                yield setting.row(made, **row, who=who, clients=SLOTS, prompts=kind, length=count)
        with Served(folder, setting) as served:
            for n, prompts_, count in cases:
                load = lambda n=n, prompts_=prompts_, count=count, served=served: served.load(n, prompts_, count)  # noqa: E731
                yield setting.row(load, **row, who="serve", clients=n, prompts=prompts_, length=count)
    if setting.peers and gpu and setting.wants(model="llama"):  # on a CPU `generate_batch` never returns
        for n in (1,) if setting.tiny else (1, 8, 64, 256):
            row = {"model": "llama", "kind": "peer", "who": "transformers' continuous batching"}
            yield setting.row(lambda n=n: batched(setting, n, cases[0][-1]), **row, clients=n, prompts="own")
