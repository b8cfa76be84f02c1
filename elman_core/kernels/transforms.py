"""Forward-mode derivatives and the transforms of torch.func, which the operators of kernels do not know.

An operator made with `torch.library` drops a tangent without a word, and stops under `torch.func.grad`. So under either "auto"
takes plain PyTorch, which autograd differentiates in every mode, and whoever names a kernel is told.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad


def transformed() -> bool:
    """Whether derivatives are being taken otherwise than by `backward`: torch.func.grad, jvp and what is made of them, or
    `torch.autograd.forward_ad`. Not under vmap alone, of which an operator is a loop."""
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        return True
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    kinds = (functorch.TransformType.Grad, functorch.TransformType.Jvp)
    return any(level.key() in kinds for level in functorch.get_interpreter_stack() or ())


def refuse_transforms(name: str, otherwise: str) -> None:
    """Raise where a kernel was named and `transformed`.

    Raises:
        NotImplementedError: names the kernel and what to take instead.
    """
    if transformed():
        raise NotImplementedError(
            f"{name}: torch.func and forward-mode derivatives exist only with {otherwise}; backward() exists with all"
        )
