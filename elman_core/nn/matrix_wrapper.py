"""Matrix-state mixers inside the wrapper. B batch, T time, I inner width, H heads, n rows and columns of a head's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from elman_core.kernels import Maps, MatrixKernel
from elman_core.registry import State, StateSpec, option

from .elementwise import FormMixer
from .functional import self_gate
from .linear import linears
from .wrapper import WrapperConfig


@dataclass(frozen=True)
class MatrixWrapperConfig(WrapperConfig):
    """Options of one square matrix state, in addition to those of the wrapper. A variant with heads adds `n_heads`."""

    n_state: int = option(32, "rows and columns n of the state", ge=4, le=128, multiple_of=4)


@dataclass(frozen=True)
class MatrixForm:
    """The parts of a matrix-state mixer inside the wrapper.

    Attributes:
        kernel: the recurrence; or only its reference, if no cell can express it.
        maps: the maps W u whose outputs are the kernel's q, k, other rows and lines, in their order.
        biases: {map: bias at the start} of the maps W u + b.
        vectors: the kernel's params, in their order: {name: value at the start}.
        options: options of the kernel that are on. inputs: one of the kernel's `maps`, by
            default the first: which inputs pass through SiLU or are normalised.
    """

    kernel: MatrixKernel | Callable[..., tuple[Tensor, Tensor]]
    maps: tuple[str, ...] = ("w_q", "w_k", "w_v")
    biases: Mapping[str, float] = field(default_factory=dict)
    vectors: Mapping[str, float] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    inputs: Maps | None = None


class MatrixWrapperMixer(FormMixer):
    """A wrapper around (S_t, o_t) = cell(S_{t-1}, W u_t, …, p), y_t = g(o_t). Parameters (H n, …) hold head after head.

    State: S (B, H, n, n), rows keys and columns values, zeros at the start.
    """

    time = 1
    form: ClassVar[MatrixForm]
    forms: ClassVar[Mapping[str, MatrixForm]] = {}

    @classmethod
    def outputs(cls, inner: int, config: Any) -> int:
        return config.n_state * getattr(config, "n_heads", 1)

    @classmethod
    def cell_state(cls, inner: int, config: Any) -> StateSpec:
        n = config.n_state
        return {"S": ((cls.outputs(inner, config) // n, n, n), torch.float32)}

    def inputs(self, x_BTI: Tensor) -> list[Tensor]:
        """q, k, other rows and lines, (B, T, H, n) each: the outputs of the maps unless overridden."""
        made = linears([getattr(self, name) for name in self.form_of(self.config).maps], x_BTI)
        return [y.unflatten(-1, (-1, self.config.n_state)) for y in made]

    def scalars(self, x_BTI: Tensor) -> list[Tensor]:
        """The kernel's scalars, (B, T, H) each."""
        return []

    def readout(self, o_BTx: Tensor, x_BTI: Tensor, z_BTI: Tensor | None) -> Tensor:
        """y from the readout o (B, T, H n): o silu(o) unless overridden."""
        return self_gate(o_BTx)

    def cell(
        self, x_BTI: Tensor, z_BTI: Tensor | None, state: State | None, *flags_BT: Tensor | None
    ) -> tuple[Tensor, State]:
        form, inputs = self.form_of(self.config), self.inputs(x_BTI)
        vectors = [p.view(-1, inputs[-1].shape[-1]) for p in self.wide_vectors()]
        mask_BT, starts_BT = flags_BT
        s = None if state is None else state["S"]
        options: dict[str, Any] = dict.fromkeys(form.options, True)
        q, k, *given = [*inputs, *self.scalars(x_BTI), *vectors]
        if isinstance(form.kernel, MatrixKernel):
            rest: dict[str, Any] = {"state_BHNV": s, "mask_BT": mask_BT, "starts_BT": starts_BT, "maps": form.inputs}
            o_BTHn, s = form.kernel(q, k, *given, **rest, **options)
        else:
            o_BTHn, s = form.kernel(q, k, *given, s, mask_BT, starts_BT, **options)
        return self.readout(o_BTHn.flatten(2), x_BTI, z_BTI), {"S": s}

    def backend(self) -> str:
        kernel, n = self.form_of(self.config).kernel, self.config.n_state
        return kernel.backend(self.out_proj.weight.device, n, n) if isinstance(kernel, MatrixKernel) else "reference"

    def matrices(self, weight: Tensor) -> Sequence[Tensor]:
        return weight.split(self.config.n_state)
