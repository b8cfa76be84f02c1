"""The wrapper around every vector-state cell: input projection, causal convolution, SiLU, cell, dropout, output projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core.registry import ConfigError, Mixer, State, StateSpec, option

from .conv import CausalConv
from .functional import compute_dtype, time_major
from .init import xavier_uniform_
from .linear import columns, linear


@dataclass(frozen=True)
class WrapperConfig:
    """Options of the wrapper; the config of a vector-state variant inherits them."""

    expansion: float = option(1.0, "inner width / model width; the inner width is rounded down", gt=0.0, le=64.0)
    use_conv: bool = option(False, "causal depthwise convolution before the SiLU; its window is state")
    d_conv: int = option(4, "width of that convolution, in steps", ge=2, le=64)
    dropout: float = option(0.0, "dropout on the output of the cell, in training", ge=0.0, lt=1.0)
    mamba2_init: bool = option(False, "draw both projections from N(0, 0.02²)")

    def inner_width(self, dim: int) -> int:
        """I = floor(dim · expansion)."""
        return int(dim * self.expansion)


class WrapperMixer(Mixer):
    """(B, T, D) → in_proj → [u, z] → conv → SiLU → `cell` → dropout → out_proj → (B, T, D).

    Subclasses make their parameters in `build_cell`, draw them in `reset_cell`, run the recurrence in `cell` and name its state
    in `cell_state`. Inside everything is time-major: the input is transposed once, where it is narrowest, and the output is a
    view. With `time` 1, nothing is transposed, and (T, B, …) here means (B, T, …).

    Parameters beside the cell's: in_proj.weight (I, D), or (2I, D) for u and z, is W_in; out_proj.weight (D, `outputs`) is
    W_out; with `use_conv` conv.weight (I, 1, K) and conv.bias (I). State beside the cell's: conv (B, K - 1, I) with `use_conv`.

    Attributes:
        gated: whether in_proj has a second half z, which passes neither convolution nor SiLU.
        time: the axis of time inside.
        pre_silu: whether the cell sees silu(u) or u; `build_cell` may set it from the options.
    """

    gated: ClassVar[bool] = False
    time: ClassVar[Literal[0, 1]] = 0
    pre_silu: bool = True
    config: WrapperConfig

    def __init__(self, dim: int, config: WrapperConfig, layer_idx: int = 0) -> None:
        super().__init__(dim, config, layer_idx)
        self.inner = config.inner_width(dim)
        self.in_proj = nn.Linear(dim, self.inner * (2 if self.gated else 1), bias=False)
        self.conv = CausalConv(self.inner, config.d_conv, dim=self.time) if config.use_conv else None
        self.build_cell(self.inner)
        self.dropout = nn.Dropout(config.dropout)
        self.out_proj = nn.Linear(self.outputs(self.inner, config), dim, bias=False)
        self.reset_parameters()

    def build_cell(self, inner: int) -> None:
        """Make the parameters of the cell, for I channels."""
        raise NotImplementedError(f"{type(self).__name__}.build_cell")

    def reset_cell(self) -> None:
        """Draw the parameters of the cell, in place; called under no_grad."""
        raise NotImplementedError(f"{type(self).__name__}.reset_cell")

    @classmethod
    def outputs(cls, inner: int, config: Any) -> int:
        """The width of the cell's output, for I channels."""
        return inner

    def cell(
        self, x_TBI: Tensor, z_TBI: Tensor | None, state: State | None, *flags_TB: Tensor | None
    ) -> tuple[Tensor, State]:
        """The recurrence over time: (y_TBI in the dtype of x, the cell's new state). flags: mask and starts."""
        raise NotImplementedError(f"{type(self).__name__}.cell")

    def cell_of_silu(self, u_TBI: Tensor, *rest: Any) -> tuple[Tensor, State]:
        """`cell` of silu(u). Override it if the recurrence includes the SiLU."""
        return self.cell(F.silu(u_TBI), *rest)

    @classmethod
    def cell_state(cls, inner: int, config: WrapperConfig) -> StateSpec:
        """The cell's part of `state_spec`; one vector of I channels unless overridden."""
        return {"h": ((inner,), torch.float32)}

    def stacked(self) -> dict[str, tuple[int, ...]]:
        return {"in_proj.weight": (self.inner, self.inner)} if self.gated else {}

    def forward(
        self, x_BTD: Tensor, state: State | None = None, mask_BT: Tensor | None = None, starts_BT: Tensor | None = None
    ) -> tuple[Tensor, State]:
        mask_TB, starts_TB, x_TBD = mask_BT, starts_BT, x_BTD
        if self.time == 0:
            mask_TB, starts_TB = (None if x is None else time_major(x) for x in (mask_BT, starts_BT))
            x_TBD = time_major(x_BTD)
        silu = self.pre_silu
        early = silu and self.conv is None and x_TBD.shape[self.time] == 1  # then the projection's kernel applies SiLU
        u_TBI, *gate = columns(self.in_proj, x_TBD, self.inner, early, self.time)
        z_TBI = gate[0] if self.gated else None
        new_state: State = {}
        if self.conv is not None:
            u_TBI, new_state["conv"] = self.conv(u_TBI, None if state is None else state["conv"], mask_TB, starts_TB)
        cell = self.cell_of_silu if silu and not early else self.cell
        y_TBI, cell_state = cell(u_TBI, z_TBI, state, mask_TB, starts_TB)
        out_TBD = linear(self.out_proj, self.dropout(y_TBI), self.time)
        return out_TBD if self.time else out_TBD.transpose(0, 1), {**new_state, **cell_state}

    def vector(self, state: State | None, name: str, x_TBI: Tensor) -> Tensor:
        """The state vector `name` (B, I) for this call, zeros at the start, in the dtype of states for this x."""
        if state is None:
            return x_TBI.new_zeros(x_TBI.shape[1], self.inner, dtype=compute_dtype(x_TBI))
        return state[name].to(compute_dtype(x_TBI))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for projection in (self.in_proj, self.out_proj):
            if self.config.mamba2_init:
                nn.init.normal_(projection.weight, std=0.02)
            else:
                xavier_uniform_(projection.weight)
        if self.conv is not None:
            self.conv.reset_parameters()
        self.reset_cell()

    @classmethod
    def validate(cls, dim: int, config: WrapperConfig) -> None:
        """Raises `ConfigError` if nothing is left of the inner width."""
        if config.inner_width(dim) < 1:
            raise ConfigError(f"expansion {config.expansion} of width {dim} leaves nothing; use at least {1 / dim:.6g}")

    @classmethod
    def state_spec(cls, dim: int, config: WrapperConfig) -> StateSpec:
        inner = config.inner_width(dim)
        conv: StateSpec = {"conv": ((config.d_conv - 1, inner), torch.float32)} if config.use_conv else {}
        return {**conv, **cls.cell_state(inner, config)}
