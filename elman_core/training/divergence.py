"""Where a loss or gradient stopped being finite: looked up by running the same batch again with every module watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def first_bad(model: nn.Module, forward: Callable[[], Any], gradients: bool = True) -> dict[str, str] | None:
    """The first tensor that is not finite, in the order of computation: weights, activations, then gradients.

    Args:
        model: holds the gradients of the step that failed. forward: runs that step's forward again; its result is not used.
        gradients: whether those are of a step that failed.

    Returns:
        kind (`weight`, `buffer`, `activation` or `gradient`), name of the module or parameter, and how many elements are bad;
        None if everything is finite.
    """
    for kind, named in (("weight", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if bad := _bad(tensor):
                return {"kind": kind, "name": name, "elements": bad}
    found: list[dict[str, str]] = []

    def watch(name: str) -> Callable[..., None]:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if not found and (bad := _bad(tensor)):
                    found.append({"kind": "activation", "name": name or "loss", "elements": bad})

        return look

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    # The backward runs from the head to the embedding, so the last parameter with a bad gradient was met first.
    for name, p in reversed(list(model.named_parameters())) if gradients else ():
        if p.grad is not None and (bad := _bad(p.grad)):
            return {"kind": "gradient", "name": name, "elements": bad}
    return None


def _bad(tensor: Tensor) -> str:
    if not tensor.is_floating_point():
        return ""
    count = int((~torch.isfinite(tensor)).sum())
    return f"{count} of {tensor.numel()}" if count else ""


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [t for item in value for t in _tensors(item)]
