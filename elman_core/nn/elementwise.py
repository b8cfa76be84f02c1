"""Vector-state mixers whose recurrence contains no product. T time, B batch, I inner width (d of the equations)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from elman_core.kernels import ElementwiseKernel
from elman_core.registry import ConfigError, State, StateSpec

from .computed import Wide
from .init import xavier_uniform_
from .linear import linears
from .wrapper import WrapperMixer


@dataclass(frozen=True)
class ElementwiseForm:
    """The parts of an elementwise mixer.

    Attributes:
        kernel: the recurrence.
        maps: the maps W x + b whose outputs are the kernel's streams, in their order: {name: b at the start}.
        vectors: the kernel's learned vectors, in their order: {name: value at the start}.
    """

    kernel: ElementwiseKernel
    maps: Mapping[str, float]
    vectors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted, given = (", ".join(names) or "none" for names in (self.kernel.cell.vectors, self.vectors))
        if len(self.vectors) != len(self.kernel.cell.vectors):
            raise ConfigError(f"{self.kernel.name} takes the vectors {wanted}: its form has {given}")

    @property
    def biases(self) -> Mapping[str, float]:
        return self.maps


class _Vectors(Wide):
    def __init__(self, make: Callable[[], Sequence[Tensor]]) -> None:
        super().__init__()
        self.make = make

    def compute(self, *_: Tensor) -> list[Tensor]:  # type: ignore[override]
        return super().compute(*self.make())


class FormMixer(WrapperMixer):
    """A wrapper around a recurrence whose parameters a form names: maps of the wrapper's x, and learned vectors.

    Parameters beside the wrapper's, with N = `outputs`: NAME.weight (N, I) of every map, and NAME.bias (N) where it has one;
    NAME (N) of every vector.

    Attributes:
        form: its parts: `maps`, `biases`: {map: bias at the start} and `vectors`: {name: value at the start}.
        forms: instead of `form`, the parts for each value of the option `form`.
    """

    form: ClassVar[Any]
    forms: ClassVar[Mapping[str, Any]] = {}
    config: Any

    @classmethod
    def form_of(cls, config: Any) -> Any:
        """The form that these options choose."""
        return cls.forms[config.form] if cls.forms else cls.form

    def __init__(self, dim: int, config: Any, layer_idx: int = 0) -> None:
        super().__init__(dim, config, layer_idx)
        self.made = _Vectors(self.vectors)

    def build_cell(self, inner: int) -> None:
        form, width = self.form_of(self.config), self.outputs(inner, self.config)
        for name in form.maps:
            self.add_module(name, nn.Linear(inner, width, bias=name in form.biases))
        for name in form.vectors:
            self.register_parameter(name, nn.Parameter(torch.empty(width)))

    def vectors(self) -> list[Tensor]:
        """The learned vectors as the kernel takes them; the parameters themselves unless overridden."""
        return [getattr(self, name) for name in self.form_of(self.config).vectors]

    def wide_vectors(self) -> list[Tensor]:
        """`vectors` in float32 or float64, made once per generation."""
        return self.made(*(getattr(self, name) for name in self.form_of(self.config).vectors))

    def matrices(self, weight: Tensor) -> Sequence[Tensor]:
        """The parts of a map's weight that are drawn apart."""
        return (weight,)

    def reset_cell(self) -> None:
        form = self.form_of(self.config)
        for name in form.maps:
            for matrix in self.matrices(getattr(self, name).weight):
                xavier_uniform_(matrix)
        for name, start in form.biases.items():
            nn.init.constant_(getattr(self, name).bias, start)
        for name, start in form.vectors.items():
            nn.init.constant_(getattr(self, name), start)


class ElementwiseMixer(FormMixer):
    """A wrapper around (h_t, …, y_t) = cell(h_{t-1}, …, W x_t + b, …, p). State: the kernel's states, (B, I) each, zeros at the
    start."""

    form: ClassVar[ElementwiseForm]
    forms: ClassVar[Mapping[str, ElementwiseForm]] = {}

    def streams(self, x_TBI: Tensor) -> list[Tensor]:
        """The kernel's inputs at each step; the outputs of the maps unless overridden."""
        return linears([getattr(self, name) for name in self.form_of(self.config).maps], x_TBI, self.time)

    def cell(
        self, x_TBI: Tensor, z_TBI: Tensor | None, state: State | None, *flags_TB: Tensor | None
    ) -> tuple[Tensor, State]:
        kernel = self.form_of(self.config).kernel
        states = [self.vector(state, name, x_TBI) for name in kernel.cell.states]
        y_TBI, *last = kernel(*self.streams(x_TBI), *self.wide_vectors(), *states, *flags_TB)
        return y_TBI, dict(zip(kernel.cell.states, last, strict=True))

    @classmethod
    def cell_state(cls, inner: int, config: Any) -> StateSpec:
        return dict.fromkeys(cls.form_of(config).kernel.cell.states, ((inner,), torch.float32))

    def backend(self) -> str:
        return self.form_of(self.config).kernel.backend(self.out_proj.weight.device, self.inner)
