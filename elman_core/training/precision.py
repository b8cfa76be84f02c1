"""The one place that decides in which dtype a model computes. Weights, gradients and optimizer state are always float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from elman_core.registry import ConfigError

from .ranks.group import Ranks


def pick_device(name: str, ranks: Ranks | None = None) -> torch.device:
    """The device of `train.device`; "auto" is the first GPU, or the CPU. Each of several ranks has the GPU with its number.

    A GPU always gets its number, because torch refuses some calls without one, such as limiting a process's memory.

    Raises:
        ConfigError: no such device here.
    """
    if ranks is not None and ranks.size > 1:
        return _device_of(ranks, name)
    if name == "auto":
        return _numbered(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"the device must be auto, cpu, cuda or cuda:N, not {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"the device must be auto, cpu, cuda or cuda:N, not {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"no device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices, and cpu")
    return _numbered(device)


def _numbered(device: torch.device) -> torch.device:
    """A GPU with its number; by default the current one. Does not initialise CUDA, which would allocate memory there."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def has_bf16(device: torch.device) -> bool:
    """Whether bfloat16 is worth using: on GPUs with hardware for it. CPUs compute in float32 unless told otherwise."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def compute_in(precision: str, device: torch.device) -> AbstractContextManager:
    """Autocast to bfloat16 for "bf16", nothing for "fp32"."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def full_precision_in(device: torch.device) -> AbstractContextManager:
    """Inside `compute_in`: autocast off, for code such as a backward."""
    return torch.autocast(device.type, enabled=False)


def _device_of(ranks: Ranks, name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(
            f"train.device is {name!r}, but with {ranks.size} ranks each has its own: use auto, cpu or cuda"
        )
    if name == "cuda" and ranks.local >= torch.cuda.device_count():
        raise ConfigError(
            f"there are {torch.cuda.device_count()} CUDA devices here, too few for the ranks on this machine: lower "
            f"--nproc-per-node, or use train.device=cpu"
        )
    return torch.device(name, ranks.local) if name == "cuda" else torch.device(name)
