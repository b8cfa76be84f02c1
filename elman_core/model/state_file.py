"""The state of a generation as a file: safetensors, `branch.name` for every tensor, of constant size."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from elman_core.nn.layers import branches
from elman_core.registry import CheckpointError, ConfigError, State
from elman_core.storage import open_regular, replacing, storage_errors

from .config import LadderConfig

FORMAT = "elman-state-1"
MOST = 1 << 20
"""More branches than any model has."""


def save_states(path: str | os.PathLike, states: list[State | None], seen: int) -> None:
    """Write the state of every residual branch, and how many tokens they have seen, replacing `path` in one step. Raises as
    `LadderCache.save`, and `StorageError` if the file cannot be written."""
    if not states or any(state is None for state in states):
        raise ConfigError("this cache is empty: there is no state to save before the first token")
    tensors = {f"{i}.{name}": t.detach().contiguous() for i, s in enumerate(states) for name, t in (s or {}).items()}
    metadata = {"format": "pt", "kind": FORMAT, "branches": str(len(states)), "seen": str(seen)}
    with storage_errors(f"cannot write {path}"), replacing(Path(path)) as file:
        file.write(save(tensors, metadata=metadata))


def load_states(
    path: str | os.PathLike, device: str | torch.device = "cpu", config: LadderConfig | None = None
) -> tuple[list[State | None], int]:
    """Return the states that `save_states` wrote, and the number of tokens seen. `config` and errors: as of
    `LadderCache.load`."""
    try:
        os.close(open_regular(path))
        with safe_open(path, framework="pt", device=str(device)) as file:
            about = file.metadata() or {}
            if about.get("kind") != FORMAT:
                raise CheckpointError(f"{path} is not the state of a generation")
            count, seen = int(about["branches"]), int(about["seen"])
            if not 0 < count <= MOST or seen < 0:
                raise ValueError(f"it says that {count} branches have seen {seen} tokens")
            by_branch: dict[int, State] = {index: {} for index in range(count)}
            for key in file.keys():  # noqa: SIM118 (not a dict)
                branch, _, name = key.partition(".")
                by_branch[int(branch)][name] = file.get_tensor(key)
            states: list[State | None] = [*by_branch.values()]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (SafetensorError, OSError, ValueError, LookupError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    if config is not None:
        _check(path, states, config)
    return states, seen


def _check(path: str | os.PathLike, states: list[State | None], config: LadderConfig) -> None:
    specs = [mixer.state_spec(config.hidden_size, options) for mixer, options, _ in branches(config)]
    for state, spec in zip(states, specs, strict=False):
        for name, tensor in (state or {}).items():
            if name in spec and tensor.is_floating_point() != spec[name][1].is_floating_point:
                raise CheckpointError(f"{path} has {name} as {tensor.dtype}: the state is {spec[name][1]}")
    another = f"{path} is the state of another model"
    if len(states) != len(specs):
        raise CheckpointError(f"{another}: {len(states)} branches where the model has {len(specs)}")
    for index, (state, spec) in enumerate(zip(states, specs, strict=True)):
        have = {name: tuple(tensor.shape[1:]) for name, tensor in (state or {}).items()}
        want = {name: shape for name, (shape, _) in spec.items()}
        if have.keys() != want.keys() or not all(_fits(have[name], want[name]) for name in want):
            raise CheckpointError(f"{another}: branch {index} holds {have} where the model has {want}")


def _fits(shape: tuple[int, ...], spec: tuple[int, ...]) -> bool:
    """`spec`: -1 for any length."""
    return len(shape) == len(spec) and all(want in (-1, have) for have, want in zip(shape, spec, strict=True))
