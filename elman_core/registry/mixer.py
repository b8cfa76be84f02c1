"""`Mixer`: what a variant supplies. One residual branch without its norm and without its residual."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from .errors import ConfigError

State = dict[str, Tensor]
"""The tensors carried from one call to the next, by name, batch first."""

StateSpec = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Mixer(nn.Module):
    """Maps x (B, T, D) to y (B, T, D). The contract, which `elman_authors.testing.VariantContract` checks in full:

    1. `forward(x_BTD, state=None, mask_BT=None, starts_BT=None) -> (y_BTD, state)`. `state=None` is the initial state, made
       inside. A state is a `dict[str, Tensor]`, batch first, never changed in place, and no view of anything larger. Where
       the mask is False, the state does not change; it is not zeroed. Where `starts_BT` is True a document begins: before
       that position, masked or not, the row's state (window and keys included) becomes the initial one.
    2. Feeding a sequence in pieces equals feeding it whole; a step is `forward` with T = 1.
    3. Output at t does not depend on inputs after t; rows of a batch do not depend on each other.
    4. No input norm and no residual inside; inner norms that belong to the model (QK, output, gated) stay.
    5. Everything that changes the function is in the state dict: equal state dicts compute the same.
    6. `reset_parameters()` covers every parameter below the mixer and `reset_buffers()` every non-persistent buffer:
       transformers builds models on the meta device, where what `__init__` computed is lost. No plain tensor attributes.
    7. Gradients flow to every parameter, to the input, and through the state in both directions.

    Linear maps are called as modules (`self.in_proj(x)`), so that LoRA and quantisers find them, and a block calls nothing but
    the mixer itself: adapters may wrap it.

    Args:
        dim: model width D.
        config: an instance of the variant's config dataclass.
        layer_idx: index of the residual branch in the ladder, from 0.
    """

    state_growth: ClassVar[Literal["constant", "per_token"]] = "constant"
    """`per_token` for a key/value cache: its state grows with every byte."""

    fp32_params: ClassVar[tuple[str, ...]] = ()
    """Names of parameters and buffers that stay float32 when a model is loaded in 16 bits."""

    no_decay: ClassVar[tuple[str, ...]] = ()
    """Names of parameters of two or more dimensions that are exempt from weight decay (one-dimensional ones always are)."""

    def __init__(self, dim: int, config: Any, layer_idx: int = 0) -> None:
        super().__init__()
        self.dim, self.config, self.layer_idx = dim, config, layer_idx

    def __call__(self, x_BTD: Tensor, state: State | None = None, *more: Any, **named: Any) -> Any:
        """`forward`. Raises `ConfigError` without a row or a step, and for a state of other sizes: kernels and libraries answer
        in different ways, and some read memory that is not theirs."""
        if 0 in x_BTD.shape:
            raise ConfigError(f"{type(self).__name__}: x is {tuple(x_BTD.shape)}; a call needs a row and a step")
        if state is not None and not torch.compiler.is_compiling():
            for name, (sizes, _) in self.state_spec(self.dim, self.config).items():
                there = state[name].shape if name in state else ()
                wanted = (x_BTD.shape[0], *sizes)
                if len(there) != len(wanted) or any(b not in (a, -1) for a, b in zip(there, wanted, strict=True)):
                    raise ConfigError(
                        f"{type(self).__name__}: the state {name!r} is {tuple(there)}, not {wanted}: of another batch or model"
                    )
        return super().__call__(x_BTD, state, *more, **named)

    def forward(
        self, x_BTD: Tensor, state: State | None = None, mask_BT: Tensor | None = None, starts_BT: Tensor | None = None
    ) -> tuple[Tensor, State]:
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def reset_parameters(self) -> None:
        """Initialise every parameter of this mixer and its submodules again, in place and under no_grad (`torch.nn.init`)."""
        raise NotImplementedError(f"{type(self).__name__}.reset_parameters")

    def reset_buffers(self) -> None:
        """Compute every non-persistent buffer again. The default is for mixers without any."""

    @classmethod
    def state_spec(cls, dim: int, config: Any) -> StateSpec:
        """`{name: (shape without batch, dtype)}` of the state after a call, for a model in 32 bits or fewer."""
        raise NotImplementedError(f"{cls.__name__}.state_spec")

    @classmethod
    def validate(cls, dim: int, config: Any) -> None:
        """Raises `ConfigError` for sizes or combinations of options that the bounds of single fields cannot exclude."""

    def stacked(self) -> dict[str, tuple[int, ...]]:
        """The parameters that stack several linear maps: `{name: rows of each}`. Muon updates each map by itself."""
        return {}

    def backend(self) -> str:
        """Return the back end of the recurrence for the parameters' device and dtype, for a run's first lines and manifest.

        "torch" and "reference" mean plain PyTorch steps, which comparisons of speed on a GPU point out; "" means a branch
        without a recurrence.
        """
        return "reference"
