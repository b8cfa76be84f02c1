"""The E70 mixer: its parameters. B batch, T time, I inner width, n rows and columns of the state."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elman_core import option
from elman_core.nn import (
    MatrixForm,
    MatrixWrapperConfig,
    MatrixWrapperMixer,
    SpectralNorm,
    compute_dtype,
    invariant_linear,
    xavier_uniform_,
)

from .op import e70

DECAY, RADIUS = 0.9, 0.5


@dataclass(frozen=True)
class E70Config(MatrixWrapperConfig):
    """The size of E70's state, and whether its decay is learned."""

    train_decay: bool = option(False, "the decay is a parameter, within 0 and 0.999; else it is 0.9")


class E70Mixer(MatrixWrapperMixer):
    """x → u → q, k, v = W u → S_t = λ S_{t-1} + k vᵀ, λ = 0.9 or `decay` → o silu(o) → out.

    Parameters beside the wrapper's: w_q, w_k, w_v (n, I), the last two used with largest singular value 1/2, and decay (1) with
    `train_decay`. State: S (B, 1, n, n), rows keys and columns values.
    """

    form = MatrixForm(e70, maps=())
    fp32_params = ("decay", "spectral_k.u", "spectral_k.v", "spectral_v.u", "spectral_v.v")

    def build_cell(self, inner: int) -> None:
        n = self.config.n_state
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.empty(n, inner)) for _ in range(3))
        self.spectral_k, self.spectral_v = (SpectralNorm(n, RADIUS, columns=inner) for _ in range(2))
        self.decay = nn.Parameter(torch.empty(1)) if self.config.train_decay else None

    def inputs(self, x_BTI: Tensor) -> list[Tensor]:
        weights = torch.cat([self.w_q, self.spectral_k(self.w_k), self.spectral_v(self.w_v)])
        return list(invariant_linear(x_BTI, weights)[:, :, None].chunk(3, -1))

    def scalars(self, x_BTI: Tensor) -> list[Tensor]:
        if self.decay is None:
            decay = x_BTI.new_full((1,), DECAY, dtype=compute_dtype(x_BTI))
        else:
            decay = self.decay.clamp(0, 0.999)
        return [decay.expand(*x_BTI.shape[:2], 1)]

    def reset_cell(self) -> None:
        for w in (self.w_q, self.w_k, self.w_v):
            xavier_uniform_(w)
        for spectral in (self.spectral_k, self.spectral_v):
            spectral.reset()
        if self.decay is not None:
            nn.init.constant_(self.decay, DECAY)
