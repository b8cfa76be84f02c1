"""A checkpoint: a Hugging Face folder that `from_pretrained` loads, and in `state/` what makes the next step the same step.

    config.json  model.safetensors  tokenizer…    the published weights (schedule-free: the average), float32
    state/trainer.json                            step, bytes seen, training time, the optimizer's numbers
    state/optimizer.safetensors                   moments by parameter name (schedule-free: also the base weights z)
    state/last.safetensors                        schedule-free: the training weights y
    state/rng.safetensors                         states of the random generators
    state/carry.safetensors                       tbptt: the model's state at the end of the step
    checksums.json                                size and SHA-256 of every file

Safetensors and JSON only: nothing that runs when it is read.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from elman_core.model import no_progress_bars
from elman_core.registry import CheckpointError

from .optim import Optimizer
from .storage import check_folder, remove_folder, remove_leftovers, storage_errors, write_folder

log = logging.getLogger("elman_core")

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")


@dataclass
class Progress:
    """Where a training is: the cursor. Batches need no more than the step, being functions of it."""

    step: int = 0
    bytes_seen: int = 0
    seconds: float = 0.0
    """Time spent in steps, without the first of each process, evaluations and checkpoints."""

    carry: list[dict[str, Tensor] | None] | None = field(default=None, repr=False)
    """tbptt: the state of every residual branch, all rows of the batch."""


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name, or None for another name."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, earliest first. What has this name is complete."""
    found = [p for p in folder.iterdir() if step_of(p) is not None] if folder.is_dir() else []
    return sorted(found, key=lambda p: step_of(p) or 0)


def last_good(folder: Path, say: Callable[[str], None] = log.warning) -> Path | None:
    """The latest checkpoint whose checksums match; what is wrong with later ones is said. None if there are none at all.

    Raises:
        CheckpointError: there are checkpoints, and every one is damaged.
    """
    damaged: list[tuple[Path, CheckpointError]] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            check_folder(path)
        except CheckpointError as error:
            damaged.append((path, error))
            say(f"damaged checkpoint left out: {error}")
        else:
            return path
    if damaged:
        raise CheckpointError(f"no checkpoint is intact: {damaged[0][1]}")
    return None


def set_aside(folder: Path, after: Path | None) -> None:
    """Rename the checkpoints later than `after` to `….damaged`: the run will come by their steps again."""
    for path in list_checkpoints(folder):
        if after is not None and (step_of(path) or 0) > (step_of(after) or 0):
            aside = path.with_name(f"{path.name}.damaged")
            with storage_errors(f"cannot rename {path}"):
                if aside.exists():
                    remove_folder(aside)
                path.rename(aside)


def save_checkpoint(folder: Path, model: nn.Module, optimizer: Optimizer, progress: Progress, keep: int = 0) -> Path:
    """Write `folder/step-…`, then delete all but the last `keep` (0: none are deleted). Returns its path.

    Raises:
        StorageError: no space, or the disk failed; the checkpoints that were there still are.
    """
    remove_leftovers(folder)
    path = folder / checkpoint_name(progress.step)
    write_folder(path, lambda partial: _fill(partial, model, optimizer, progress), needed=_size(model, optimizer))
    if keep:
        with storage_errors(f"cannot delete old checkpoints in {folder}"):
            for old in list_checkpoints(folder)[:-keep]:
                remove_folder(old)
    return path


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> Progress:
    """Put a verified checkpoint into a model and optimizer of the same shape, bit for bit, and the random generators too.

    Raises:
        CheckpointError: not a checkpoint of this model.
    """
    try:
        trainer = json.loads((path / "state/trainer.json").read_text(encoding="utf-8"))
        if trainer["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {trainer['format']}; this version reads format {FORMAT}")
        weights: dict[str, Tensor] = {}
        for file in sorted(path.glob("model*.safetensors")):
            weights.update(load_file(file))
        if (path / "state/last.safetensors").exists():
            weights.update(load_file(path / "state/last.safetensors"))
        _copy_into(model, weights)
        optimizer.load(load_file(path / "state/optimizer.safetensors"), trainer["optimizer"])
        carry = _load_carry(path, trainer["carry"], next(model.parameters()).device)
        _restore_rng(load_file(path / "state/rng.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return Progress(trainer["step"], trainer["bytes_seen"], trainer["seconds"], carry)


def _fill(partial: Path, model: Any, optimizer: Optimizer, progress: Progress) -> None:
    state = partial / "state"
    state.mkdir()
    with optimizer.evaluation_weights(), no_progress_bars():
        model.save_pretrained(partial)
    if optimizer.averages:
        _save(state / "last.safetensors", {n: p.detach() for n, p in optimizer.params.items()})
    _save(state / "optimizer.safetensors", optimizer.tensors())
    _save(state / "rng.safetensors", _rng())
    if progress.carry is not None:
        _save(state / "carry.safetensors", _flat(progress.carry))
    trainer = {
        "format": FORMAT,
        "step": progress.step,
        "bytes_seen": progress.bytes_seen,
        "seconds": progress.seconds,
        "optimizer": optimizer.numbers(),
        "carry": None if progress.carry is None else len(progress.carry),
    }
    (state / "trainer.json").write_text(json.dumps(trainer, indent=2) + "\n", encoding="utf-8")


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({n: t.detach().contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})


def _size(model: nn.Module, optimizer: Optimizer) -> int:
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    state = sum(t.numel() * t.element_size() for t in optimizer.tensors().values())
    return weights * (2 if optimizer.averages else 1) + state + (1 << 20)


def _copy_into(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copied into the tensors that exist: their memory is aligned as in a fresh run, so sums come out the same."""
    own = model.state_dict()
    tied = set(getattr(model, "_tied_weights_keys", None) or {}) if model.config.tie_word_embeddings else set()  # type: ignore[union-attr]
    if missing := sorted(set(own) - set(weights) - tied):
        raise CheckpointError(f"the checkpoint lacks {', '.join(missing[:3])}")
    if odd := sorted(set(weights) - set(own)):
        raise CheckpointError(f"the checkpoint holds {', '.join(odd[:3])}, which the model does not have")
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)


def _flat(carry: list[dict[str, Tensor] | None]) -> dict[str, Tensor]:
    return {f"{i}/{name}": tensor for i, state in enumerate(carry) for name, tensor in (state or {}).items()}


def _load_carry(path: Path, branches: int | None, device: torch.device) -> list[dict[str, Tensor] | None] | None:
    if branches is None:
        return None
    carry: list[dict[str, Tensor]] = [{} for _ in range(branches)]
    for key, tensor in load_file(path / "state/carry.safetensors").items():
        index, _, name = key.partition("/")
        carry[int(index)][name] = tensor.to(device, copy=True)
    return [state or None for state in carry]


def _rng() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda/{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _restore_rng(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for name, state in states.items():
        if name.startswith("cuda/") and (index := int(name.partition("/")[2])) < devices:
            torch.cuda.set_rng_state(state, index)
