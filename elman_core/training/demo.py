"""The demo's choices: the variant, and settings that learn something in a minute or two on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elman_core.registry import PluginError, list_variants, resolve

from .settings import Settings, from_dict

PRESET = "demo"
WIDTH, DEPTH, WINDOW, ROWS = 192, 3, 64, 16


def choose_variant(asked: str | None = None) -> str:
    """The variant to train: the requested one; or the first by name, of those with a preset called `demo` if there are any.

    A plugin ships a preset `demo` to say that its variant learns quickly on a CPU, and with which options.

    Raises:
        PluginError: none is installed, or not the requested one.
    """
    if asked is not None:
        entry = resolve(asked)
        return asked if ":" in asked or PRESET not in entry.variant.presets else f"{entry.variant.name}:{PRESET}"
    usable = {name: entry.variant for name, entry in list_variants().items() if not entry.needs}
    if not usable:
        raise PluginError("no variant is installed that can be trained here: pip install a plugin")
    return next(
        (f"{name}:{PRESET}" for name, variant in usable.items() if PRESET in variant.presets), next(iter(usable))
    )


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
