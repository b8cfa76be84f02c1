"""How a step is run: eager, compiled, or captured; what `train.launch = "auto"` comes to, and why another way is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elman_core.model.graph import CudaRecorder
from elman_core.registry import ConfigError

from .capture import CapturedStep
from .hooks import acting
from .settings import Settings
from .step import TrainStep


@dataclass(frozen=True)
class Mode:
    """How a run's steps are run.

    Attributes:
        name: "eager", "graph", "compile" or "compile+graph". why: for the run's first lines.
        asked: the setting.
    """

    name: str
    why: str
    asked: str

    @property
    def compiles(self) -> bool:
        return self.name.startswith("compile")

    @property
    def captures(self) -> bool:
        return self.name.endswith("graph")

    def facts(self) -> dict[str, str]:
        """For the manifest."""
        return {"mode": self.name, "why": self.why, "asked": self.asked}


def choose_mode(settings: Settings, model: Any, device: torch.device, sharded: bool = False) -> Mode:
    """What `train.launch` means for this run. "auto" is a CUDA graph on a GPU where nothing stands against it.

    Args:
        sharded: whether several processes share the weights.

    Raises:
        ConfigError: what was asked for by name cannot be had; says why.
    """
    asked = settings.train.launch
    against = _against_capture(settings, model, device)
    if sharded and asked == "auto":
        return Mode("eager", "the weights are shared out among the ranks", asked)
    if sharded and asked != "eager":
        raise ConfigError(f"train.launch={asked!r} cannot be had with train.parallel='fsdp': use 'auto'")
    if asked == "auto":
        return Mode("eager", against, asked) if against else Mode("graph", "on a GPU, and nothing against it", asked)
    if asked.endswith("graph") and against:
        raise ConfigError(f"train.launch={asked!r} cannot be had: {against}; use 'auto'")
    if asked.startswith("compile") and settings.data.sampling == "tbptt":
        raise ConfigError(f"train.launch={asked!r} cannot be had: a carried state is not compiled; use 'auto'")
    return Mode(asked, "asked for", asked)


def _against_capture(settings: Settings, model: nn.Module, device: torch.device) -> str:
    """Why the step cannot be captured, or ""."""
    train = settings.train
    if hooks := acting():
        names = sorted({name for plugins in hooks.values() for name in plugins})
        return f"{', '.join(names)} acts on every step, in {' and '.join(hooks)}"
    if settings.data.documents == "reset":
        return "data.documents='reset' cuts each window elsewhere"
    drops = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
    if train.gradient_checkpointing and drops:
        return "train.gradient_checkpointing draws the dropout again on the host"
    if device.type != "cuda":
        return f"there are no CUDA graphs on {device.type}"
    return ""


def make_step(step: TrainStep, mode: Mode) -> TrainStep | CapturedStep:
    """The step as `mode` runs it."""
    if mode.compiles:
        step.model.model.compile(dynamic=False)
        step.compiled = True
    if not mode.captures:
        return step
    return CapturedStep(step, CudaRecorder(step.device), required=mode.asked != "auto")
