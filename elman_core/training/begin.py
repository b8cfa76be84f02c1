"""The model that a training begins with instead of new weights: `model.init`."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch

from elman_core.model.checkpoint import locate
from elman_core.model.shipped import is_shipped
from elman_core.registry import CheckpointError, ConfigError

from .settings import ModelSettings


def source_of(model: ModelSettings, new: bool) -> Path | str | None:
    """The checkpoint folder or hub id of `model.init`; None if the training begins with new weights.

    Args:
        new: the settings were given by a user, who may not choose what the model decides.

    Raises:
        ConfigError: settings that the model decides. CheckpointError: no such model, or no state of an optimizer to keep.
    """
    if not model.init:
        return None
    own = dataclasses.asdict(ModelSettings(init=model.init, init_optimizer=model.init_optimizer))
    for name, value in dataclasses.asdict(model).items() if new else ():
        if value != own[name]:
            raise ConfigError(f"{model.init} decides model.{name}: leave it out, or begin without a model")
    source = locate(model.init)
    if model.init_optimizer == "keep" and not (isinstance(source, Path) and (source / "state/trainer.json").exists()):
        raise CheckpointError(f"{model.init} holds no state of an optimizer: leave out model.init_optimizer=keep")
    return source


def facts(model: Any, source: Path | str, settings: ModelSettings) -> dict[str, str]:
    """What the manifest says of the model that a run began with: its place, a digest of its tensors, and its optimizer."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    kept = {"drop": "dropped", "keep": "kept"}[settings.init_optimizer]
    place = settings.init if is_shipped(settings.init) else str(source)
    return {"model": place, "blake2b": digest.hexdigest(), "optimizer": kept}
