"""A checkpoint: a Hugging Face folder that `from_pretrained` loads, with the state that makes the next step exact in `state/`.

    config.json  model.safetensors  tokenizer…    the published weights (schedule-free: the average), float32
    state/trainer.json                            step, bytes seen, training time, the optimizer's numbers, run and settings
    state/optimizer.safetensors                   moments by parameter name (schedule-free: also the base weights z)
    state/last.safetensors                        schedule-free: the training weights y
    state/rng.safetensors                         states of the random generators; of further ranks as `rank3/cpu`
    state/carry.safetensors                       tbptt: the model's state at the end of the step, all rows
    checksums.json                                size and SHA-256 of every file

It contains only safetensors and JSON: nothing that runs when it is read. The first rank writes it for all ranks, so it does not
depend on how many processes trained, nor on whether they sharded the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from elman_core.model import no_progress_bars
from elman_core.model.checkpoint import list_checkpoints, step_of
from elman_core.registry import CheckpointError
from elman_core.storage import (
    read_json,
    remove_folder,
    remove_leftovers,
    storage_errors,
    write_folder,
    write_json,
)

from .optim import Optimizer
from .ranks.group import Ranks
from .ranks.tensors import gather_rows, is_sharded, like, whole

FORMAT = 1


@dataclass
class Progress:
    """The cursor of a training. Batches are functions of the step and need nothing else."""

    step: int = 0
    bytes_seen: int = 0
    seconds: float = 0.0
    """Time spent in steps, without the first step of each process, evaluations and checkpoints."""

    carry: list[dict[str, Tensor] | None] | None = field(default=None, repr=False)
    """tbptt: the state of every residual branch, for this rank's rows of the batch."""


@dataclass(frozen=True)
class Position:
    """The state of a run when a process begins to train it: `progress` at the checkpoint to continue from, without the carried
    state, which is loaded with the weights, and the last evaluation up to there."""

    progress: Progress = field(default_factory=Progress)
    checkpoint: Path | None = None
    evaluation: dict[str, Any] | None = None


def set_aside(folder: Path, after: Path | None) -> None:
    """Rename the checkpoints later than `after` to `….damaged`: the run will repeat their steps."""
    for path in list_checkpoints(folder):
        if after is not None and (step_of(path) or 0) > (step_of(after) or 0):
            aside = path.with_name(f"{path.name}.damaged")
            with storage_errors(f"cannot rename {path}"):
                if aside.exists():
                    remove_folder(aside)
                path.rename(aside)


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    keep: int,
    ranks: Ranks,
    about: Mapping[str, Any],
) -> Path:
    """Write `folder/step-…`, then delete all but the last `keep` (0: keep all). Returns its path.

    Every rank calls this, and the first writes. `about`: the id and the settings of the run, and the fingerprint of its text.
    Raises `StorageError` without space, or if the disk failed; earlier checkpoints are untouched.
    """
    # Sharded weights are gathered; others are written as the model has them.
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in _tied(model)}
    gathered = _to_first(own, ranks) if is_sharded(model) else None
    files = _collect(model, optimizer, progress, ranks)
    numbers = {
        "step": progress.step,
        "bytes_seen": progress.bytes_seen,
        "seconds": progress.seconds,
        "optimizer": optimizer.numbers(),
        "untouched": optimizer.untouched,
        "carry": None if progress.carry is None else len(progress.carry),
    }

    def fill(partial: Path) -> None:
        state = partial / "state"
        state.mkdir()
        with optimizer.evaluation_weights(), no_progress_bars():
            model.save_pretrained(partial, state_dict=gathered)  # type: ignore[operator]
        for name, tensors in files.items():
            tensors = {n: t.detach().contiguous() for n, t in tensors.items()}
            save_file(tensors, state / f"{name}.safetensors", metadata={"format": "pt"})
        write_json(state / "trainer.json", {"format": FORMAT, **numbers, **about})

    def write() -> Path:
        remove_leftovers(folder)
        path = folder / f"step-{progress.step:08d}"
        sizes = (t.nbytes for tensors in (own, *files.values()) for t in tensors.values())
        write_folder(path, fill, needed=sum(sizes) + (1 << 20))
        if keep:
            with storage_errors(f"cannot delete old checkpoints in {folder}"):
                for old in list_checkpoints(folder)[:-keep]:
                    remove_folder(old)
        return path

    return ranks.first(write)


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks | None = None, run: str = ""
) -> Progress:
    """Load a verified checkpoint into a model and optimizer of the same shape, bit for bit, and into the random generators.

    Every rank calls this, however many there are, and loads its part. Raises `CheckpointError` for another model, or for a run
    of another id than `run`.
    """
    ranks = ranks or Ranks()
    with _readable(path):
        progress, trainer = _read_numbers(path, run)
        load_optimizer(path, model, optimizer)
        progress.carry = _load_carry(path, trainer["carry"], next(model.parameters()).device, ranks)
        _restore_rng(load_file(path / "state/rng.safetensors"), ranks, progress.step)
    return progress


def load_optimizer(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load the weights that are trained and the optimizer's state of a verified checkpoint. Raises as `load_checkpoint`."""
    with _readable(path):
        weights = {n: x for file in path.glob("model*.safetensors") for n, x in load_file(file).items()}
        trainer = read_json(path / "state/trainer.json")
        state = load_file(path / "state/optimizer.safetensors")
        if optimizer.averages and trainer["settings"]["train"]["beta1"] == optimizer.beta:
            weights.update(load_file(path / "state/last.safetensors"))
        elif optimizer.averages:  # beta1 has changed: the average and z stay, and y lies elsewhere between them
            for name, average in weights.items():
                if f"z/{name}" in state:
                    weights[name] = average.lerp(state[f"z/{name}"], 1 - optimizer.beta)
        _copy_into(model, weights)
        optimizer.load(state, trainer["optimizer"], trainer.get("untouched", ()))


def read_progress(path: Path, run: str) -> Progress:
    """The cursor of a verified checkpoint without its carried state. Raises as `load_checkpoint`."""
    with _readable(path):
        return _read_numbers(path, run)[0]


def _read_numbers(path: Path, run: str) -> tuple[Progress, dict[str, Any]]:
    """The cursor and everything else in `state/trainer.json`."""
    trainer = read_json(path / "state/trainer.json")
    if trainer["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {trainer['format']}; this version reads format {FORMAT}")
    if run and trainer.get("run", run) != run:
        raise CheckpointError(f"{path} is a checkpoint of another run")
    progress = Progress(int(trainer["step"]), int(trainer["bytes_seen"]), float(trainer["seconds"]))
    if not all(0 <= value < math.inf for value in (progress.step, progress.bytes_seen, progress.seconds)):
        raise ValueError(f"state/trainer.json has {progress}")
    if step_of(path) not in (None, progress.step):
        raise ValueError(f"state/trainer.json is of step {progress.step}")
    return progress, trainer


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns whatever reading a checkpoint raises into a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _collect(model: nn.Module, optimizer: Optimizer, progress: Progress, ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    """The state of all ranks together, by the name of its file under `state/`; complete on the first rank."""
    sharded = is_sharded(model)
    files = {
        "optimizer": _to_first(optimizer.tensors(), ranks) if sharded else optimizer.tensors(),
        "rng": {
            f"rank{rank}/{name}" if rank else name: state
            for rank, states in enumerate(ranks.gather(_rng(ranks)))
            for name, state in states.items()
        },
    }
    if optimizer.averages:
        files["last"] = {name: p.detach() for name, p in optimizer.params.items()}
    if progress.carry is not None:
        own = {f"{i}/{name}": t for i, state in enumerate(progress.carry) for name, t in (state or {}).items()}
        files["carry"] = {n: gather_rows(t, ranks) for n, t in own.items()} if ranks.size > 1 else own
    return files


def _to_first(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Sharded tensors, gathered one at a time and kept on the first rank, on the CPU."""
    together = ((name, whole(tensor)) for name, tensor in tensors.items())
    return {name: tensor.cpu() for name, tensor in together if ranks.main}


def _copy_into(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy into the existing tensors: their memory is aligned as in a new run, so sums have the same bits."""
    own = model.state_dict()
    if missing := sorted(set(own) - set(weights) - _tied(model)):
        raise CheckpointError(f"the checkpoint lacks {', '.join(missing[:3])}")
    if odd := sorted(set(weights) - set(own)):
        raise CheckpointError(f"the checkpoint holds {', '.join(odd[:3])}, which the model does not have")
    with torch.no_grad():
        for name, tensor in weights.items():
            if tensor.shape != own[name].shape:
                raise CheckpointError(
                    f"the checkpoint's {name} is {tuple(tensor.shape)}, the model's {tuple(own[name].shape)}"
                )
            if tensor.dtype != own[name].dtype or not tensor.isfinite().all():
                raise CheckpointError(f"the checkpoint's {name} is not finite {own[name].dtype}")
            own[name].copy_(like(tensor, own[name]))


def _tied(model: nn.Module) -> set[str]:
    """Names of tensors that are another parameter."""
    return set(getattr(model, "_tied_weights_keys", None) or {}) if model.config.tie_word_embeddings else set()  # type: ignore[union-attr]


def _load_carry(
    path: Path, branches: int | None, device: torch.device, ranks: Ranks
) -> list[dict[str, Tensor] | None] | None:
    if branches is None:
        return None
    carry: list[dict[str, Tensor]] = [{} for _ in range(branches)]
    for key, tensor in load_file(path / "state/carry.safetensors").items():
        if not tensor.is_floating_point():
            raise CheckpointError(f"the carried state {key} is {tensor.dtype}")
        index, _, name = key.partition("/")
        rows = ranks.rows(len(tensor))
        carry[int(index)][name] = tensor[rows.start : rows.stop].to(device, copy=True)
    return [state or None for state in carry]


def _rng(ranks: Ranks) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # With several ranks each has one device: asking for others would allocate memory there.
        all_states = torch.cuda.get_rng_state_all() if ranks.size == 1 else [torch.cuda.get_rng_state()]
        states |= {f"cuda/{i}": state for i, state in enumerate(all_states)}
    return states


def _restore_rng(states: Mapping[str, Tensor], ranks: Ranks, step: int) -> None:
    before = f"rank{ranks.rank}/" if ranks.rank else ""
    if f"{before}cpu" not in states:  # written by fewer ranks: draw numbers that no other rank draws
        torch.manual_seed((int(states["cpu"].sum()) * 1_000_003 + step) * 4_099 + ranks.rank)
        return
    torch.set_rng_state(states[f"{before}cpu"])
    if ranks.size > 1:
        if f"{before}cuda/0" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states[f"{before}cuda/0"])
        return
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda/{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda/{index}"], index)
