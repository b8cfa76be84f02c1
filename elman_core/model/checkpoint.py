"""Checkpoint folders: find the newest good one, say which file of a bad one is wrong, load, write all or nothing.

A checkpoint is a Hugging Face folder (config.json, model.safetensors or its shards, tokenizer). One that training wrote also
has `state/`, and `checksums.json`: `{file: {"bytes": n, "sha256": hex}}`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from elman_core.registry import CheckpointError, ElmanError
from elman_core.storage import CHECKSUMS, check_folder, missing_folder, read_json

from .config import LadderConfig
from .modeling import LadderForCausalLM
from .pretrained import check_safetensors
from .shipped import all_shipped, is_shipped, shipped

WEIGHTS = "model.safetensors"
_NAME = re.compile(r"step-(\d+)")
log = logging.getLogger("elman_core")


def check_checkpoint(folder: str | os.PathLike, checksums: bool = True) -> None:
    """Raise `CheckpointError` naming the first file of `folder` that is missing, truncated, altered or unreadable. `checksums`:
    also compare `checksums.json`, if there is one, which reads every file in full."""
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError(f"{root} is not a folder")
    config = _read_json(root / "config.json")
    if config.get("model_type") != LadderConfig.model_type:
        raise CheckpointError(
            f"{root / 'config.json'} describes a {config.get('model_type')!r} model, not {LadderConfig.model_type!r}"
        )
    for path in _weight_files(root):
        check_safetensors(path)
    if checksums and ((root / CHECKSUMS).exists() or (root / "state/trainer.json").exists()):
        check_folder(root)


def _weight_files(root: Path) -> list[Path]:
    index = root / f"{WEIGHTS}.index.json"
    if index.exists():
        files = _read_json(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(n, str) and Path(n).name == n for n in files.values()):
            raise CheckpointError(f"{index} is damaged: its weight_map is not a table of files")
        names = sorted(set(files.values()))
    else:
        names = [WEIGHTS]
    for name in names:
        if not (root / name).is_file():
            raise CheckpointError(f"{root / name} is missing")
    return [root / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name, or None for another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, earliest first, good or not."""
    checkpoints = [p for p in folder.iterdir() if step_of(p) is not None] if folder.is_dir() else []
    return sorted(checkpoints, key=lambda p: step_of(p) or 0)


def find_checkpoint(path: str | os.PathLike) -> Path:
    """The checkpoint folder that `path` means: itself, the newest good one of a run, or the one of `pretrained/NAME`.

    Raises:
        CheckpointError: not a checkpoint or run, or no good checkpoint in it; names the files. A warning names each newer bad
            checkpoint that is skipped.
    """
    if is_shipped(path):
        check_folder(shipped(path))
        return shipped(path)
    root = Path(path)
    if not root.exists():
        raise missing_folder(path, all_shipped())
    if not (root / "checkpoints").is_dir():
        if not (root / "config.json").exists():
            if (root / "adapter_config.json").exists():
                raise CheckpointError(f"{root} is an adapter: save the model of its merge_and_unload()")
            raise CheckpointError(f"{root} is neither a checkpoint (no config.json) nor a run with one (none saved)")
        check_checkpoint(root)
        return root
    newest = newest_good(root / "checkpoints")
    if newest is None:
        raise CheckpointError(f"{root} has no checkpoint: none was written yet")
    return newest


def newest_good(folder: Path, check: Callable[[Path], None] = check_checkpoint) -> Path | None:
    """Return the latest checkpoint in `folder` that `check` accepts, with a warning for each later one; None if there are none.
    Raises `CheckpointError` if there are checkpoints, and every one is bad."""
    problems: list[str] = []
    for candidate in reversed(list_checkpoints(folder)):
        try:
            check(candidate)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            log.warning("elman: %s; using %s", problem, candidate.name)
        return candidate
    if problems:
        raise CheckpointError(f"{folder.parent} has no good checkpoint: {'; '.join(problems)}")
    return None


def locate(path: str | os.PathLike) -> Path | str:
    """The checkpoint folder that `path` means, checked, or a hub id as it is. Raises as `find_checkpoint`."""
    source = str(path)
    local = os.path.exists(source) or source.startswith((".", "/", "~", "runs/")) or source.count("/") != 1
    if local or is_shipped(source) or any(Path(source).parent.glob("*/manifest.json")):  # a slip in the name of a run
        return find_checkpoint(source)
    return source


def load_checkpoint(
    path: str | os.PathLike, *, device: str | torch.device = "cpu", dtype: str | torch.dtype | None = None
) -> LadderForCausalLM:
    """The model of a run, a checkpoint folder, `pretrained/NAME` or a hub id, in evaluation mode.

    Args:
        path: a folder or `pretrained/NAME`; anything else is looked up on the hub, unless it would lie beside runs.
        dtype: of the weights; None for what was saved. Tensors that their mixer keeps in float32 stay in it.

    Raises:
        CheckpointError: truncated, altered or incomplete files (the file is named), or not found.
        PluginError: its variant is not installed. ConfigError: its options are not accepted by what is installed.
    """
    source = locate(path)
    compares: dict[str, Any] = {"checksums": False} if isinstance(source, Path) else {}  # `locate` has compared those
    with no_progress_bars(quiet=True):
        try:
            loaded: Any = LadderForCausalLM.from_pretrained(
                str(source),
                dtype=dtype if dtype is not None else "auto",
                output_loading_info=True,
                **compares,
            )
        except ElmanError:
            raise
        except Exception as error:
            if source != Path(path) and not os.path.exists(source) and os.path.isdir(path):
                return load_checkpoint(path, device=device, dtype=dtype)  # the run, in training, has a newer one
            first = str(error).strip().splitlines() or [type(error).__name__]
            raise CheckpointError(f"{path} cannot be loaded: {first[0]}") from error
    model, report = loaded
    wrong = [k for kind in ("missing", "mismatched", "unexpected") for k in sorted(map(str, report[f"{kind}_keys"]))]
    if wrong:
        raise CheckpointError(
            f"{path} and its config.json are of different models: {len(wrong)} tensors do not fit, such as {wrong[0]}"
        )
    return model.to(device).eval()


@contextmanager
def no_progress_bars(quiet: bool = False) -> Iterator[None]:
    """Inside, transformers draws no progress bars and, if `quiet`, logs nothing; afterwards its settings are what they were."""
    were_on, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    if quiet:
        transformers_logging.set_verbosity(logging.CRITICAL + 1)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if were_on:
            transformers_logging.enable_progress_bar()
