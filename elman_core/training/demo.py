"""The demo's choices: the variant, the number of threads, and settings that learn something in a minute or two on a CPU."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch

from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.registry import ElmanError, PluginError, list_variants, resolve

from .objective import forward_loss
from .settings import Settings, from_dict

log = logging.getLogger("elman_core")

PRESET = "demo"
WIDTH, DEPTH, WINDOW, ROWS = 192, 3, 64, 16


def choose_variant(asked: str | None = None) -> str:
    """The variant to train: the requested one; or the first by name with a preset called `demo`; or the fastest here.

    A plugin ships a preset `demo` to say that its variant learns quickly on a CPU, and with which options.

    Raises:
        PluginError: none is installed, or not the requested one.
    """
    if asked is not None:
        found = resolve(asked)
        return asked if ":" in asked or PRESET not in found.variant.presets else f"{found.variant.name}:{PRESET}"
    usable = {name: entry.variant for name, entry in list_variants().items() if not entry.needs}
    for name, variant in usable.items():
        if PRESET in variant.presets:
            return f"{name}:{PRESET}"
    times = {}
    for name in usable:
        try:
            times[name] = seconds_a_step(small_model(name))
        except ElmanError as error:
            log.info("elman: the demo passes over %s: %s", name, error)
    if not times:
        raise PluginError("no variant is installed that can be trained here: pip install a plugin")
    return min(times, key=lambda name: times[name])


def choose_threads(variant: str) -> int:
    """One thread, or all if that makes a step about twice as fast; it is set, too.

    A step is many small products, and threads meet at the end of each, so another process on one core delays all of them. On
    two cores, two threads are 1.6 times as fast as one if nothing else runs, and 2.3 times as slow beside one busy process.
    """
    most = torch.get_num_threads()
    model = small_model(variant)
    times = {}
    for threads in {1, most}:
        torch.set_num_threads(threads)
        times[threads] = seconds_a_step(model)
    best = most if times[most] < 0.55 * times[1] else 1
    torch.set_num_threads(best)
    return best


def small_model(variant: str) -> Any:
    """A model of the demo's size, for measuring."""
    return LadderForCausalLM(LadderConfig(variant=variant, hidden_size=WIDTH, num_hidden_layers=DEPTH)).train()


def seconds_a_step(model: Any, repeats: int = 2) -> float:
    """The time of a forward and a backward on a small batch, scaled to a whole one. The first, which warms up, is left out."""
    rows = ROWS // 4
    tokens = torch.randint(0, 256, (rows, WINDOW + 1))
    best = float("inf")
    for i in range(1 + repeats):
        started = time.perf_counter()
        forward_loss(model, tokens[:, :-1], tokens[:, 1:]).loss.backward()
        if i:
            best = min(best, time.perf_counter() - started)
    return best * ROWS / rows


def demo_settings(variant: str, corpus: Path, seconds: float, steps: int | None = None) -> Settings:
    """Settings for `seconds` of training (or `steps`) on a CPU."""
    length: dict[str, Any] = {"minutes": seconds / 60} if steps is None else {"steps": steps}
    return from_dict(
        {
            "model": {"variant": variant, "hidden_size": WIDTH, "num_hidden_layers": DEPTH},
            "data": {"path": str(corpus), "eval_bytes": 2**15},
            "train": {
                "batch_size": ROWS,
                "chunk_size": WINDOW,
                **length,
                "lr": 5e-3,
                "warmup": 20,
                "schedule": "wsd",
                "decay": 0.8,
                "final_lr": 0.02,
                "beta2": 0.99,
                "save_every": 0,
                "eval_every": 0,
                "log_every": 50,
                "device": "cpu",
            },
        }
    )
