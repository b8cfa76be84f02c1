"""`pretrained/NAME`: trained models in installed packages, found without a network."""

from __future__ import annotations

import os
from pathlib import Path

from elman_core.registry import CheckpointError, did_you_mean, how_to_install, package_folders

GROUP = "elman.checkpoints"
PREFIX = "pretrained/"


def is_shipped(path: str | os.PathLike) -> bool:
    """True for `pretrained/NAME`, unless there is such a folder here."""
    return str(path).startswith(PREFIX) and not os.path.exists(path)


def shipped(path: str | os.PathLike) -> Path:
    """The folder of the model `pretrained/NAME`.

    Packages register in the entry point group `elman.checkpoints`; each folder with a config.json in such a package is a model.
    Raises `CheckpointError` if none has it."""
    name = str(path).removeprefix(PREFIX)
    folders = _folders()
    if name not in folders:
        some = f"Two small models: {how_to_install('elman-checkpoints')}"
        known = f"Installed: {', '.join(sorted(folders))}" if folders else some
        raise CheckpointError(f"no package here has the model {PREFIX}{name}.{did_you_mean(name, folders)} {known}")
    return folders[name]


def all_shipped() -> list[str]:
    """`pretrained/NAME` of every model in an installed package."""
    return [PREFIX + name for name in _folders()]


def _folders() -> dict[str, Path]:
    return {file.parent.name: file.parent for home in package_folders(GROUP) for file in home.glob("*/config.json")}
