"""Operators of `torch.library` that a kernel is called through: what they compute, and the shapes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, register_fake


def implement(library: Library, name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Give `elman::name`, which `library` has defined, its code for tensors on any device, and for FakeTensors.

    Returns:
        The operator.
    """
    library.impl(name, run, "CompositeExplicitAutograd")
    register_fake(f"elman::{name}", fake, lib=library)
    made: Callable[..., Any] = getattr(torch.ops.elman, name).default
    return made
