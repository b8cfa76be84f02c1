"""Decoding in bytes per second over all samples, with the default sampling of `elman generate` (temperature 0.8, top-k 40,
top-p 0.9).

`program`: the loop of `elman generate` for one sample, the whole model in one launch, from the first byte after the first
launch to the last. `graph`: its steps recorded as a CUDA graph. `eager`: the same, launched kernel by kernel. `bursts`:
`generate(custom_generate=in_bursts)`, prompt and recording included. The peers are transformers' own loop, `generate()`
with the static cache, on the same model; and, with about 27M parameters, fla's language model of Gated DeltaNet (an MLP in each
layer) and mamba_ssm's of Mamba-2 with its CUDA graph, both in their own `generate()`. ELMAN_PROFILE=FOLDER writes a table of
kernels of each `graph` row. --only names models, ways or numbers of samples; a model that is not in the list is timed too.

`prefill`: seconds for a prompt of 1 MB, with its pieces in order and with its layers as a wave; the memory for a quarter of
the prompt and for all of it; and the difference of states and logits from those of the pieces in order.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import LIMITS, Row, Setting

from elman_core.generation import Sampling, decoder, generate_bytes, in_bursts
from elman_core.generation.prefill import prefill as read_prompt
from elman_core.generation.prefill import whole_chunk
from elman_core.model import LadderConfig, LadderForCausalLM, no_progress_bars
from elman_core.model.checkpoint import load_checkpoint
from elman_core.registry import parse_size

from .step import mamba_lm
from .step_profile import profile_steps

MODELS = (
    "e42@1536x6", "e1@1280x6", "e88:h32n16@1536x20", "e88:conv_h32n32@640x8", "e75@1952x6", "e97@1152x6",
    "diagonal@1168x6", "e68@1024x6", "lstm@640x6", "gdn@640x8", "mamba2@640x10",
)  # fmt: skip
PREFILL = ("e42@1152x6", "e1@896x6", "e88:conv_h5n128v256@640x8", "gdn@640x8", "lstm@640x6", "gdn*3+transformer@640x8")
PROMPT = b"The state of a recurrent network has one size, whatever it has read. "
SKIPPED = 64
"""Bytes at the start that are not timed: the prompt, and the recording of the step."""
SLOW = 8
"""What is launched from Python is timed over this many times fewer bytes."""
HOW = Sampling(temperature=0.8, top_k=40, top_p=0.9)
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9}


def build(name: str, setting: Setting) -> LadderForCausalLM:
    """A random model, loaded as from a checkpoint: some parameters stay float32. No byte ends its texts."""
    variant, width, depth = parse_size(name)
    config = LadderConfig(variant=variant, hidden_size=width, num_hidden_layers=depth, eos_token_id=None)
    folder = setting.folder / name.replace(":", "_")
    with no_progress_bars():
        if not folder.exists():
            LadderForCausalLM(config).save_pretrained(folder)
        return load_checkpoint(folder, device=str(setting.device), dtype=str(setting.dtype).removeprefix("torch."))


def loop_rate(model: LadderForCausalLM, samples: int, way: str, count: int) -> float:
    """Bytes a second of the loop of `elman generate`."""
    recorder_for = (lambda *_: None) if way == "eager" else decoder.recorder_for
    program = "on" if way == "program" else "off"
    with mock.patch.dict(os.environ, ELMAN_WHOLE=program), mock.patch.object(decoder, "recorder_for", recorder_for):
        if way == "program" and decoder.program_for(model, count) is None:
            raise ValueError("this model has no program")
        rows = generate_bytes(model, PROMPT, max_new_bytes=SKIPPED + count, num=samples, how=HOW, seed=0)
        for _ in range(SKIPPED):
            next(rows)
        started = time.perf_counter()
        came = sum(1 for _ in rows)
        return came * samples / (time.perf_counter() - started)


def transformers_rate(model: LadderForCausalLM, samples: int, bursts: bool, count: int) -> float:
    """Bytes a second of `generate()`, prompt and recording included; the first call is not timed."""
    tokens = torch.tensor([list(PROMPT)] * samples, device=model.device)
    way = {"custom_generate": in_bursts} if bursts else {"cache_implementation": "static"}
    settings = SAMPLED | {"pad_token_id": 0} | way
    model.generation_config.eos_token_id = None
    for length in (2 * SKIPPED, count):
        started = time.perf_counter()
        model.generate(tokens, max_new_tokens=length, **settings)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
    return count * samples / (time.perf_counter() - started)


def fla_gdn(setting: Setting) -> Callable[[torch.Tensor, int], object]:
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    sizes = {"hidden_size": 640, "head_dim": 128, "num_heads": 5, "num_hidden_layers": 4, "vocab_size": 256}
    config = GatedDeltaNetConfig(**sizes, tie_word_embeddings=True, eos_token_id=None)
    model = GatedDeltaNetForCausalLM(config).to(setting.device, setting.dtype).eval()
    return lambda tokens, count: model.generate(tokens, max_new_tokens=count, pad_token_id=0, **SAMPLED)


def mamba_ssm(setting: Setting) -> Callable[[torch.Tensor, int], object]:
    model = mamba_lm(640, 10).inner.to(setting.device, setting.dtype).eval()
    how = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "cg": True}
    return lambda tokens, count: model.generate(tokens, tokens.shape[1] + count, **how)


def library_rate(write: Callable[[torch.Tensor, int], object], device: torch.device, samples: int, count: int) -> float:
    """Bytes a second of a library's own generation, prompt included; the first call, of equal length, is not timed."""
    tokens = torch.tensor([list(PROMPT)] * samples, device=device)
    for _ in range(2):
        started = time.perf_counter()
        write(tokens, count)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return count * samples / (time.perf_counter() - started)


def profiled(model: LadderForCausalLM, samples: int, to: Path) -> None:
    steps = 256
    rows = generate_bytes(model, PROMPT, max_new_bytes=SKIPPED + steps + 64, num=samples, how=HOW, seed=0)
    for _ in range(SKIPPED):
        next(rows)
    profile_steps(lambda: [next(rows) for _ in range(steps)], steps, model.device).write(to)
    rows.close()


def rows(setting: Setting) -> Iterator[Row]:
    count = 8 if setting.tiny else 2000
    models = ("e42@16x1", "lstm@16x1") if setting.tiny else MODELS
    ways: dict[str, Callable[[LadderForCausalLM, int], float]] = {
        "program": lambda model, n: loop_rate(model, n, "program", count),
        "graph": lambda model, n: loop_rate(model, n, "graph", count),
        "bursts": lambda model, n: transformers_rate(model, n, True, count),
        "eager": lambda model, n: loop_rate(model, n, "eager", max(1, count // SLOW)),
        "generate()": lambda model, n: transformers_rate(model, n, False, max(1, count // SLOW)),
    }
    if setting.device.type == "cpu":
        del ways["graph"], ways["program"]
    for name in (*models, *(word for word in setting.only if "@" in word and word not in models)):
        for way, rate in ways.items():
            for samples in (1, 2) if setting.tiny else (1, 64):
                kind = "peer" if way == "generate()" else "ours"
                if way == "program" and samples > 1:
                    continue
                if (kind == "peer" and not setting.peers) or not setting.wants(model=name, way=way, samples=samples):
                    continue

                def measured(
                    rate: Callable[[LadderForCausalLM, int], float] = rate, name: str = name, n: int = samples
                ) -> Row:
                    model = build(name, setting)
                    rates = [rate(model, n) for _ in range(2 if setting.tiny else 5)]
                    figures = {
                        "bytes_s": round(statistics.median(rates)),
                        "lowest": round(min(rates)),
                        "highest": round(max(rates)),
                    }
                    return {"parameters": sum(p.numel() for p in model.parameters()), **figures}

                yield setting.row(measured, model=name, samples=samples, who=way, kind=kind)
    libraries = {"fla's generate()": fla_gdn, "mamba_ssm's generate()": mamba_ssm}
    for who, make in libraries.items() if setting.peers and setting.device.type == "cuda" else ():
        for samples in (1, 64):
            if setting.wants(model=who, samples=samples):

                def theirs(make: Callable[[Setting], Any] = make, n: int = samples) -> Row:
                    write = make(setting)
                    rates = [library_rate(write, setting.device, n, max(1, count // SLOW)) for _ in range(5)]
                    middle = statistics.median(rates)
                    return {"bytes_s": round(middle), "lowest": round(min(rates)), "highest": round(max(rates))}

                yield setting.row(theirs, model=who, samples=samples, who=who, kind="peer")
    if folder := os.environ.get(
        "ELMAN_PROFILE"
    ):  # last of all: a process that has profiled launches more slowly from then on
        for name in models:
            if setting.wants(model=name):
                profiled(build(name, setting), 1, Path(folder, f"decode_{name.replace(':', '_').replace('@', '_')}"))


def prefill(setting: Setting) -> Iterator[Row]:
    length = 192 if setting.tiny else 1 << 20
    models = ("e42@16x2", "lstm@16x2") if setting.tiny else PREFILL
    cuda = setting.device.type == "cuda"
    text = bytes(torch.randint(256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).tolist())
    for name in (*models, *(word for word in setting.only if "@" in word and word not in models)):
        for way in ("in order", "wave") if cuda else ("in order",):
            if not setting.wants(model=name, way=way):
                continue

            def measured(name: str = name, wave: bool = way == "wave") -> Row:
                model = build(name, setting)
                chunk = 16 if setting.tiny else whole_chunk(model, length)

                def read(prompt: bytes, wave: bool = wave) -> tuple[list[torch.Tensor], float]:
                    """Return the result, and seconds."""
                    started = time.perf_counter()
                    cache, logits = read_prompt(model, prompt, chunk, wave)
                    made = [logits, *(x for state in cache.states for x in (state or {}).values())]
                    return [x.float().cpu() for x in made], time.perf_counter() - started

                def gib(prompt: bytes) -> float:
                    """Peak GiB of the device, above what was in use before."""
                    if not cuda:
                        return 0.0
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_reserved()
                    read(prompt)
                    return round((torch.cuda.max_memory_reserved() - before) / 2**30, 2)

                some = text[: length // 4]
                pairs = zip(read(some)[0], read(some, wave=False)[0], strict=True)
                differs = max(float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in pairs)
                if not differs <= LIMITS[setting.dtype]:
                    raise ValueError(f"a wave computes something else: {differs:.1e}")
                memory = {"gib_of_a_quarter": gib(some), "gib": gib(text)}
                seconds = statistics.median(read(text)[1] for _ in range(min(3, setting.repeats)))
                figures = {
                    "bytes": length,
                    "chunk": chunk,
                    "seconds": round(seconds, 3),
                    "bytes_s": round(length / seconds),
                }
                return {**figures, **memory, "differs": differs}

            yield setting.row(measured, model=name, who=way, kind="ours")
