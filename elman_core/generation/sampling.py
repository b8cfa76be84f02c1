"""From logits to the next byte, in the order of transformers' `generate()`: penalty, temperature, top-k, top-p.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.decode import op as decode
from elman_core.kernels.decode.portable import kept_scores, race
from elman_core.registry import ConfigError


@dataclass(frozen=True)
class Sampling:
    """Settings of the draw of the next byte. The defaults draw from the model's own distribution.

    Args:
        temperature: divides the logits; 0 takes the most likely byte, and so does less than 1e-6, which would overflow.
        top_k: draw among the k most likely; 0 for all.
        top_p: draw among the fewest whose probabilities sum to this; 1 for all.
        repetition_penalty: divides positive and multiplies negative logits of bytes that have occurred; 1 for none.

    Raises:
        ConfigError: a value out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"the temperature must be 0 or more, not {self.temperature}")
        if self.top_k < 0:
            raise ConfigError(f"top-k must be 0 (all) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p must be above 0 and at most 1, not {self.top_p}")
        if not 1e-6 <= self.repetition_penalty <= 1e6:
            raise ConfigError(f"the repetition penalty must be from 1e-06 to 1e+06, not {self.repetition_penalty}")
        if self.temperature < 1e-6:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def settings(self) -> dict[str, Any]:
        """Return these settings as the arguments of `decode.draw`."""
        return {"penalty": self.repetition_penalty, **{n: getattr(self, n) for n in ("temperature", "top_k", "top_p")}}


def sample(
    logits_BV: Tensor, how: Sampling, seen_BV: Tensor | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """The next byte of every row, (B,) int64.

    Args:
        logits_BV: any floating dtype; computed in float32.
        seen_BV: booleans: the bytes that have occurred in each row; needed for a repetition penalty.
        generator: on the device of the logits; None for torch's own.
    """
    if how.repetition_penalty != 1.0 and seen_BV is None:
        raise ConfigError("a repetition penalty needs the bytes seen so far")
    scores_BV = kept_scores(logits_BV.float(), seen_BV, **how.settings)
    return race(scores_BV, noise_for(logits_BV, how, generator)).argmax(-1)


def noise_for(logits_BV: Tensor, how: Sampling, generator: torch.Generator | None) -> Tensor | None:
    """Exponential noise for the draw of each token, the same on every path; None where nothing is drawn."""
    if how.temperature == 0:
        return None
    return logits_BV.new_empty(logits_BV.shape, dtype=torch.float32).exponential_(1, generator=generator)


def choose(
    logits_BV: Tensor, how: Sampling, seen_BV: Tensor, generator: torch.Generator, next_B: Tensor, row_B: Tensor
) -> None:
    """Draw the next byte of every row, in place and without waiting for the device; on a GPU, one launch draws the noise
    and one does the rest.

    Args:
        logits_BV, how, generator: as of `sample`, from the same random numbers.
        seen_BV: bool, the bytes that have occurred; changed where a penalty reads it.
        next_B: int64, becomes the bytes. row_B: int64, becomes the bytes, or -1 where logits are not finite.
    """
    draw = decode.draw if decode.takes_draw(logits_BV) else decode.draw_plain
    draw(logits_BV, noise_for(logits_BV, how, generator), seen_BV, next_B, row_B, **how.settings)
