"""The one place that decides in which dtype a model computes. Weights, gradients and optimizer state are always float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from elman_core.registry import ConfigError

from .ranks.group import Ranks


def pick_device(name: str, ranks: Ranks | None = None) -> torch.device:
    """The device of `train.device`; "auto" is the first GPU, or the CPU. Each of several ranks has the GPU with its number.

    A GPU always gets its number, because torch refuses some calls without one, such as limiting a process's memory.
    Raises `ConfigError` if there is no such device here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    there = torch.cuda.device_count()
    if ranks is not None and ranks.size > 1:
        if name not in ("cpu", "cuda"):
            raise ConfigError(
                f"train.device is {name!r}, but with {ranks.size} ranks each has its own: use auto, cpu or cuda"
            )
        if name == "cuda" and ranks.local >= there:
            raise ConfigError(
                f"there are {there} CUDA devices here, too few for the ranks on this machine: lower --nproc-per-node, or use "
                "train.device=cpu"
            )
        return torch.device(name, ranks.local) if name == "cuda" else torch.device(name)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"the device must be auto, cpu, cuda or cuda:N, not {name!r}")
    if device.type == "cuda" and (device.index or 0) >= there:
        raise ConfigError(f"no device {name!r}: this machine has {there} CUDA devices, and cpu")
    if device.type == "cuda" and device.index is None:
        # The current one; asking for it would initialise CUDA, which allocates memory on the first.
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
    return device


def has_bf16(device: torch.device) -> bool:
    """Whether bfloat16 is worth using: on GPUs with hardware for it. CPUs compute in float32 unless told otherwise."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def compute_in(precision: str, device: torch.device) -> AbstractContextManager:
    """Autocast to bfloat16 for "bf16", nothing for "fp32"."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
