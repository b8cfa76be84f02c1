"""Vector-state mixers whose recurrence contains no product. T time, B batch, I inner width (d of the equations)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from elman_core.kernels import ElementwiseKernel
from elman_core.registry import State

from .init import xavier_uniform_
from .linear import linears
from .wrapper import WrapperMixer


@dataclass(frozen=True)
class ElementwiseForm:
    """The parts of an elementwise mixer.

    Attributes:
        kernel: the recurrence, of one state.
        maps: the maps W x + b whose outputs are the kernel's streams, in their order: {name: b at the start}.
        vectors: the kernel's learned vectors, in their order: {name: value at the start}.
    """

    kernel: ElementwiseKernel
    maps: Mapping[str, float]
    vectors: Mapping[str, float] = field(default_factory=dict)


class ElementwiseMixer(WrapperMixer):
    """A wrapper around (h_t, y_t) = cell(h_{t-1}, W x_t + b, …, p): parameters, initialisation, and the calls.

    State: h (B, I), zeros at the start. Parameters: those of the wrapper; NAME.weight (I, I) and NAME.bias (I) of every map;
    NAME (I) of every vector.

    Attributes:
        form: its parts.
        forms: instead of `form`, the parts for each value of the option `form`.
    """

    form: ClassVar[ElementwiseForm]
    forms: ClassVar[Mapping[str, ElementwiseForm]] = {}
    config: Any

    @classmethod
    def form_of(cls, config: Any) -> ElementwiseForm:
        """The form that these options choose."""
        return cls.forms[config.form] if cls.forms else cls.form

    def build_cell(self, inner: int) -> None:
        form = self.form_of(self.config)
        for name in form.maps:
            self.add_module(name, nn.Linear(inner, inner))
        for name in form.vectors:
            self.register_parameter(name, nn.Parameter(torch.empty(inner)))

    @classmethod
    def cell_params(cls, inner: int, config: Any) -> int:
        form = cls.form_of(config)
        return len(form.maps) * (inner * inner + inner) + len(form.vectors) * inner

    def streams(self, x_TBI: Tensor) -> list[Tensor]:
        """The kernel's inputs at each step; the outputs of the maps unless overridden."""
        return linears([getattr(self, name) for name in self.form_of(self.config).maps], x_TBI)

    def vectors(self) -> list[Tensor]:
        """The learned vectors as the kernel takes them; the parameters themselves unless overridden."""
        return [getattr(self, name) for name in self.form_of(self.config).vectors]

    def cell(
        self, x_TBI: Tensor, z_TBI: Tensor | None, state: State | None, *flags_TB: Tensor | None
    ) -> tuple[Tensor, State]:
        kernel, h_BI = self.form_of(self.config).kernel, self.vector(state, "h", x_TBI)
        y_TBI, h_BI = kernel(*self.streams(x_TBI), *self.vectors(), h_BI, *flags_TB)
        return y_TBI, {"h": h_BI}

    def backend(self) -> str:
        return self.form_of(self.config).kernel.backend(self.out_proj.weight.device, self.inner)

    def reset_cell(self) -> None:
        form = self.form_of(self.config)
        for name, start in form.maps.items():
            made = getattr(self, name)
            xavier_uniform_(made.weight)
            nn.init.constant_(made.bias, start)
        for name, start in form.vectors.items():
            nn.init.constant_(getattr(self, name), start)
