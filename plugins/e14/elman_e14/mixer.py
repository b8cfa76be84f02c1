"""The E14 mixer: its parameters. B batch, T time, I inner width, K width of keys, in blocks of N of which H make K."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core import ConfigError, option
from elman_core.nn import MatrixForm, MatrixWrapperMixer, WrapperConfig, linears, xavier_uniform_
from elman_core.registry import StateSpec

from .op import e14

MAPS = (
    "w_query",
    "w_val",
    "w_key",
    "w_decay",
)  # as the kernel's q, k, v, decay: what E14 calls keys are the values there
LARGEST = 128  # rows of a kernel's state


@dataclass(frozen=True)
class E14Config(WrapperConfig):
    """The shape of E14's state."""

    d_state: int = option(0, "columns K of the state, whose rows are the inner width; 0: as many", ge=0)

    def columns(self, inner: int) -> int:
        """K, for an inner width I."""
        return self.d_state or inner

    def blocks(self, inner: int) -> int:
        """H: the sum over K is cut into so many of at most 128 keys each, which is exact: nothing is read back into S."""
        K = self.columns(inner)
        return next((H for H in range(-(-K // LARGEST), K // 4 + 1) if K % (4 * H) == 0), 0)


class E14Mixer(MatrixWrapperMixer):
    """x → [u, z], u ← silu(u) → κ = tanh(W_key u), v = W_val u, q = W_query u, a = σ(W_decay u), each with a bias
    → S_t = v κᵀ + S_{t-1} diag(a) → S_tᵀ q silu(z) → out.

    Parameters beside the wrapper's: w_key, w_decay: weight (I, I), bias (I); w_val, w_query: weight (K, I), bias (K).
    State: S (B, H, N, I), H N = K; the published state is the transpose of all blocks below each other.
    """

    gated = True
    form = MatrixForm(e14, MAPS)

    def build_cell(self, inner: int) -> None:
        for name, width in zip(MAPS, self._widths(inner, self.config), strict=True):
            self.add_module(name, nn.Linear(inner, width))

    @staticmethod
    def _widths(inner: int, config: E14Config) -> tuple[int, ...]:
        return (config.columns(inner),) * 2 + (inner,) * 2

    @classmethod
    def outputs(cls, inner: int, config: E14Config) -> int:
        return inner

    @classmethod
    def cell_state(cls, inner: int, config: Any) -> StateSpec:
        H = config.blocks(inner)
        return {"S": ((H, config.columns(inner) // H, inner), torch.float32)}

    @classmethod
    def validate(cls, dim: int, config: Any) -> None:
        """Raises `ConfigError` unless K can be cut into blocks of at most 128, each a multiple of 4."""
        super().validate(dim, config)
        inner = config.inner_width(dim)
        if not config.blocks(inner):
            raise ConfigError(
                f"d_state {config.columns(inner)} must be a multiple of 4; nearest: {max(4, config.columns(inner) // 4 * 4)}"
            )

    def inputs(self, x_BTI: Tensor) -> list[Tensor]:
        H = self.config.blocks(self.inner)
        q, k, v, decay = linears([getattr(self, name) for name in MAPS], x_BTI)
        keys = [x.unflatten(-1, (H, -1)) for x in (q, k)]
        return keys + [x[:, :, None] for x in (v, decay)]

    def readout(self, o_BTx: Tensor, x_BTI: Tensor, z_BTI: Any) -> Tensor:
        return o_BTx.unflatten(-1, (-1, self.inner)).sum(2) * F.silu(z_BTI)

    def backend(self) -> str:
        rows = self.config.columns(self.inner) // self.config.blocks(self.inner)
        return e14.backend(self.out_proj.weight.device, rows, self.inner)

    def reset_cell(self) -> None:
        for name in MAPS:
            made = getattr(self, name)
            xavier_uniform_(made.weight, 0.0 if name == "w_decay" else 1.0)
            nn.init.constant_(made.bias, 3.0 if name == "w_decay" else 0.0)
