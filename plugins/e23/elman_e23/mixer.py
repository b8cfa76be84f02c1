"""The E23 mixer: its options and parameters. T time, B batch, I inner width, N slots of the tape."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core import State, option
from elman_core.nn import WrapperConfig, WrapperMixer, compute_dtype, linear, orthogonal_, xavier_uniform_
from elman_core.registry import StateSpec

from .op import KERNEL, e23


@dataclass(frozen=True)
class E23Config(WrapperConfig):
    """The tape. There is no spectral norm."""

    slots: int = option(8, "vectors on the tape", ge=1, le=1024)
    tape_init: Literal["zeros", "learned"] = option(
        "zeros", "the tape before the first step: zeros, from which the slots never differ, or learned"
    )


class E23Mixer(WrapperMixer):
    """x → [u, z] → silu(u) → h_t = tanh(W_x u_t + W_h h_{t-1} + read_t + b), tape written by W_w h_t → h_t silu(z_t) → out.

    The cell's parameters: w_x.weight (I, I) is W_x, w_x.bias (I) is b, w_h (I, I), w_w (I, I), and with a learned tape
    tape_0 (N, I), from N(0, 1 / I). State: h (B, I) and tape (B, N, I).
    """

    gated = True
    no_decay = ("tape_0",)  # a state, not a map: Muon leaves it to AdamW, and nothing pulls its slots together
    config: E23Config
    tape_0: Tensor | None

    def build_cell(self, inner: int) -> None:
        self.w_x = nn.Linear(inner, inner)
        self.w_h, self.w_w = (nn.Parameter(torch.empty(inner, inner)) for _ in range(2))
        learned = self.config.tape_init == "learned"
        self.register_parameter("tape_0", nn.Parameter(torch.empty(self.config.slots, inner)) if learned else None)

    @classmethod
    def cell_state(cls, inner: int, config: E23Config) -> StateSpec:  # type: ignore[override]
        return {"h": ((inner,), torch.float32), "tape": ((config.slots, inner), torch.float32)}

    def cell(self, x_TBI: Tensor, z_TBI: Tensor | None, state: State | None, *flags: Any) -> tuple[Tensor, State]:
        assert z_TBI is not None  # gated
        kept = compute_dtype(x_TBI)
        initial_NI = x_TBI.new_zeros(self.config.slots, self.inner) if self.tape_0 is None else self.tape_0
        tape_BNI = initial_NI.expand(x_TBI.shape[1], -1, -1) if state is None else state["tape"]
        h_TBI, h_BI, tape_BNI = e23(
            linear(self.w_x, x_TBI, self.time), self.w_h, self.w_w, self.vector(state, "h", x_TBI), tape_BNI.to(kept),
            initial_NI.to(kept), *flags,
        )  # fmt: skip
        return h_TBI * F.silu(z_TBI), {"h": h_BI, "tape": tape_BNI}

    def backend(self) -> str:
        return KERNEL.backend(self.out_proj.weight.device, self.inner, self.config.slots)

    def reset_cell(self) -> None:
        xavier_uniform_(self.w_x.weight)
        nn.init.zeros_(self.w_x.bias)
        orthogonal_(self.w_h, 0.9)
        xavier_uniform_(self.w_w)
        if self.tape_0 is not None:
            nn.init.normal_(self.tape_0, std=self.inner**-0.5)
