"""From logits to the next byte, in the order of transformers' `generate()`: penalty, temperature, top-k, top-p.

The random numbers of a draw are a function of the seed, of the numbers of the text and of the token, and of the class.

Shapes: B rows, T tokens, V vocabulary.
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
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "penalty": self.repetition_penalty,
        }


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
    waits_BV = None if how.temperature == 0 else torch.empty_like(scores_BV).exponential_(1, generator=generator)
    return race(scores_BV, waits_BV).argmax(-1)


_GAMMA, _MUL_1, _MUL_2 = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _words(keys: Tensor, numbers: Tensor) -> Tensor:
    """`elman_core.data.hash_u64(key, number)` in int64, which wraps as uint64 does; copies of a sign are cut off."""
    z = keys + (numbers + 1) * _GAMMA
    for shift, factor in ((30, _MUL_1), (27, _MUL_2), (31, 1)):
        z ^= (z >> shift).bitwise_and_((1 << 64 - shift) - 1)
        z *= factor
    return z


def keys_of(seed: int, count: int, device: torch.device | None = None) -> Tensor:
    """What tells the noise of `count` texts of a seed (modulo 2**64) apart, int64."""
    return _words(torch.tensor((seed + 2**63) % 2**64 - 2**63, device=device), torch.arange(count, device=device))


def noise(keys: Tensor, tokens: Tensor, classes: int) -> Tensor:
    """Draws of a standard exponential for the choice of tokens, (…, classes) float32, from 2**-53 to 36.8. `keys` of the texts
    and numbers of the `tokens` in each text, from 0, are int64, of shapes that broadcast."""
    numbers = tokens[..., None] * classes + torch.arange(classes, device=tokens.device)
    high = _words(keys[..., None], numbers) >> 12  # 52 bits: the sum below is exact, and neither 0 nor 1
    return high.double().mul_(2**-52).add_(0.5 + 2**-53).log_().neg_().float()


class Noise:
    """The noise of B texts, computed for several tokens at a time: those after what was asked for come next."""

    def __init__(self, keys_B: Tensor, classes: int) -> None:
        self.keys_B, self.classes, self.first = keys_B, classes, 0
        self.made_TBV = keys_B.new_empty(0)

    def of(self, first: int, count: int) -> Tensor:
        """Of so many tokens from this one on, (count, B, V)."""
        if not self.first <= first <= self.first + len(self.made_TBV) - count:
            most = (1 << (16 if self.keys_B.device.type == "cpu" else 20)) // (len(self.keys_B) * self.classes)
            tokens_T = torch.arange(first, first + max(count, min(most, 32)), device=self.keys_B.device)
            self.first = first
            self.made_TBV = noise(self.keys_B, tokens_T[:, None], self.classes)
        return self.made_TBV[first - self.first :][:count]


def choose(
    logits_BV: Tensor, how: Sampling, seen_BV: Tensor, waits_BV: Tensor | None, next_B: Tensor, row_B: Tensor
) -> None:
    """Draw the next byte of every row, in place and without waiting for the device; on a GPU, in one launch.

    Args:
        logits_BV, how: as of `sample`. waits_BV: `noise`; None for temperature 0.
        seen_BV: bool, the bytes that have occurred; changed where a penalty reads it.
        next_B: int64, becomes the bytes. row_B: int64, becomes the bytes, or -1 where logits are not finite.
    """
    draw = decode.draw if decode.takes_draw(logits_BV) else decode.draw_plain
    draw(logits_BV, waits_BV, seen_BV, next_B, row_B, **how.settings)
