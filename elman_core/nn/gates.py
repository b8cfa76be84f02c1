"""Vector-state mixers with several products of the same h in every step. T time, B batch, I inner width, k gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from elman_core.kernels import GatesKernel
from elman_core.registry import ConfigError, State, StateSpec

from .init import orthogonal_, xavier_uniform_
from .linear import linear
from .wrapper import WrapperMixer


class GatesMixer(WrapperMixer):
    """A wrapper around (h_t, …) = step(W_h h_{t-1}, W_x x_t + b, …), y_t = h_t, where W_h h and W_x x are k gates.

    Parameters beside the wrapper's, gate below gate, with heads head below head: w_x.weight (k I, I), each gate of a head with
    Xavier's bounds; w_x.bias (k I); w_h (k I, I / heads), each gate of a head orthogonal. State: the kernel's states, (B, I)
    each, zeros at the start. The kernel gets no b: the biases are in u.

    Attributes:
        kernel: the recurrence. start: {gate, from 0: its bias at the start}; the others start at 0. heads: of W_h, which is
            block-diagonal: a head's gates see its own h. `build_cell` may set it from the options.
    """

    kernel: ClassVar[GatesKernel]
    start: ClassVar[Mapping[int, float]] = {}
    heads: int = 1

    def build_cell(self, inner: int) -> None:
        gates = self.kernel.cell.gates
        rows = gates * inner
        if odd := [gate for gate in self.start if gate not in range(gates)]:
            raise ConfigError(f"{type(self).__name__}.start has gate {odd[0]}: {self.kernel.name} has 0 to {gates - 1}")
        if inner % self.heads:
            raise ConfigError(f"heads={self.heads} does not divide {inner}, the width of the state")
        self.w_x, self.w_h = nn.Linear(inner, rows), nn.Parameter(torch.empty(rows, inner // self.heads))

    @classmethod
    def cell_state(cls, inner: int, config: Any) -> StateSpec:
        return dict.fromkeys(cls.kernel.cell.states, ((inner,), torch.float32))

    def stacked(self) -> dict[str, tuple[int, ...]]:
        gates = (self.w_h.shape[1],) * (self.heads * self.kernel.cell.gates)
        return super().stacked() | {"w_x.weight": gates, "w_h": gates}

    def reset_cell(self) -> None:
        for weight, draw in ((self.w_x.weight, xavier_uniform_), (self.w_h, orthogonal_)):
            for gate in weight.split(self.w_h.shape[1]):
                draw(gate)
        for index, bias in enumerate(self.w_x.bias.split(self.w_h.shape[1])):
            nn.init.constant_(bias, self.start.get(index % self.kernel.cell.gates, 0.0))

    def cell(
        self, x_TBI: Tensor, z_TBI: Tensor | None, state: State | None, *flags_TB: Tensor | None
    ) -> tuple[Tensor, State]:
        mask_TB, starts_TB = flags_TB
        names, u_TBI = self.kernel.cell.states, linear(self.w_x, x_TBI, self.time)
        states = [self.vector(state, name, x_TBI) for name in names]
        y_TBI, *last = self.kernel(u_TBI, self.w_h, None, *states, mask=mask_TB, starts=starts_TB)
        return y_TBI, dict(zip(names, last, strict=True))

    def backend(self) -> str:
        return self.kernel.backend(self.w_h.device, self.inner)
