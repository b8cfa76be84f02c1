"""Weights computed from parameters: at every use in training, once per generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .functional import compute_dtype
from .init import orthogonal_


class ComputedWeight(nn.Module):
    """Called with parameters, it returns the weight that `compute` makes from them; inside `scaled_once` it keeps that
    weight."""

    def __init__(self) -> None:
        super().__init__()
        self._holders = 0  # how many `scaled_once` are under way
        self._held: tuple[tuple[tuple[int, int], ...], Any] | None = None  # of which parameters, and the weight

    def compute(self, *parameters: Tensor, **how: bool) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.compute")

    def forward(self, *parameters: Tensor, **how: bool) -> Any:
        if not self._holders or self.training or torch.is_grad_enabled():
            return self.compute(*parameters, **how)
        if torch.compiler.is_compiling():  # cannot look whether they are the same: inside `scaled_once` they are
            return self.compute(*parameters, **how) if self._held is None else self._held[1]
        # What was computed under inference mode has no version, and does not change.
        which = tuple((p.data_ptr(), -1 if p.is_inference() else p._version) for p in parameters)
        if self._held is None or self._held[0] != which:
            self._held = (which, self.compute(*parameters, **how))
        return self._held[1]


@contextmanager
def scaled_once(model: nn.Module) -> Iterator[None]:
    """Inside, in evaluation without gradients, every computed weight of `model` is computed once instead of at every use."""
    weights = [module for module in model.modules() if isinstance(module, ComputedWeight)]
    for weight in weights:
        weight._holders += 1
    try:
        yield
    finally:
        for weight in weights:
            weight._holders -= 1
            if not weight._holders:
                weight._held = None


class Wide(ComputedWeight):
    """Parameters as kernels take vectors, in float32 or float64: a cast takes as long as a kernel's step."""

    def compute(self, *parameters: Tensor) -> list[Tensor]:  # type: ignore[override]
        return [p.to(compute_dtype(p)) for p in parameters]


class LowRank(ComputedWeight):
    """W = U V, formed once per call. Parameters: u (width d, rank r), v (rank, width).

    This takes 2 d² r operations, and the recurrence 2 T B d²; after that, W is like any other matrix.
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.empty(width, rank))
        self.v = nn.Parameter(torch.empty(rank, width))

    def forward(self, _x: None = None) -> Tensor:  # type: ignore[override]
        """W. An adapter around this module needs an input to pass on: give it None."""
        return super().forward(self.u, self.v)

    def compute(self, u: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        return u @ v

    def reset(self, gain: float) -> None:
        """Draw both (semi-)orthogonal, times `gain`."""
        for factor in (self.u, self.v):
            orthogonal_(factor, gain)
