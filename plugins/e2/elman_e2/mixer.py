"""The E2 mixer: its options and parameters. T time, B batch, I inner width, S slots."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core import State, option
from elman_core.nn import SpectralNorm, WrapperConfig, WrapperMixer, linear, orthogonal_, xavier_uniform_
from elman_core.registry import StateSpec

from .op import e2


@dataclass(frozen=True)
class E2Config(WrapperConfig):
    """How many slots, and what bounds their recurrent matrices."""

    slots: int = option(8, "independent networks side by side", ge=1, le=256)
    share_wx: bool = option(False, "one W_x for all slots")
    r_h_mode: Literal["clip", "none"] = option("clip", "what bounds the recurrent matrices: clip scales down alone")
    spectral_radius: float = option(0.99, "largest singular value of each W_h under clip", gt=0.0, le=2.0)


class E2Mixer(WrapperMixer):
    """x → [u, z] → silu(u) → h_t^s = tanh(W_x^s u_t + W_h^s h_{t-1}^s + b^s) → (Σ_s C_s h_t^s) silu(z_t) → out.

    The cell's parameters: w_x.weight (S I, I), the W_x of the slots below each other, w_x.bias (S I), their b, w_h (S, I, I)
    and c (S), which is C. With `share_wx`, w_x.weight (I, I) and b (S I). State: h (B, S, I).
    """

    gated = True
    kernel = e2
    config: E2Config
    fp32_params = ("clip.u", "clip.v")

    def build_cell(self, inner: int) -> None:
        slots, shared = self.config.slots, self.config.share_wx
        self.w_x = nn.Linear(inner, inner if shared else slots * inner, bias=not shared)
        self.b = nn.Parameter(torch.empty(slots * inner)) if shared else None
        self.w_h = nn.Parameter(torch.empty(slots, inner, inner))
        self.c = nn.Parameter(torch.empty(slots))
        clips = self.config.r_h_mode == "clip"
        self.clip = SpectralNorm(inner, self.config.spectral_radius, blocks=slots, clip=True) if clips else None

    @classmethod
    def cell_state(cls, inner: int, config: E2Config) -> StateSpec:  # type: ignore[override]
        return {"h": ((config.slots, inner), torch.float32)}

    def cell(self, x_TBI: Tensor, z_TBI: Tensor | None, state: State | None, *flags: Any) -> tuple[Tensor, State]:
        assert z_TBI is not None  # gated
        slots = self.config.slots
        u = linear(self.w_x, x_TBI, self.time)  # (T, B, S I)
        if self.b is not None:
            u = u.tile(slots) + self.b.to(u.dtype)
        w_SII = self.w_h if self.clip is None else self.clip(self.w_h)
        h0 = self.vector(None, "h", u[..., : self.inner]).tile(slots) if state is None else state["h"].flatten(1)
        y, last = self.kernel(u, w_SII, h0, *flags)
        mixed_TBI = torch.einsum("tbsi,s->tbi", y.unflatten(-1, (slots, -1)), self.c.to(y.dtype))
        return mixed_TBI * F.silu(z_TBI), {"h": last.unflatten(-1, (slots, -1))}

    def stacked(self) -> dict[str, tuple[int, ...]]:
        return {**super().stacked(), "w_x.weight": (self.inner,) * (self.w_x.out_features // self.inner)}

    def backend(self) -> str:
        return self.kernel.backend(self.out_proj.weight.device, self.config.slots * self.inner)

    def reset_cell(self) -> None:
        slots = self.config.slots
        for w in self.w_x.weight.split(self.inner):
            if self.config.mamba2_init:
                nn.init.normal_(w, std=0.02)
            else:
                xavier_uniform_(w)
        nn.init.zeros_(self.w_x.bias if self.b is None else self.b)
        for w in self.w_h:
            orthogonal_(w, 0.99 * 0.5)
        nn.init.constant_(self.c, 1 / slots)
        if self.clip is not None:
            self.clip.reset()
