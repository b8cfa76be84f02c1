"""The learning rate as a pure function of the step (or of the fraction of the time): no state, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

WARM = 0.1
"""Largest share of the time that warm-up takes, where time ends the run."""


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then `kind`, to `final` times the peak at the horizon, and constant after it.

    Attributes:
        kind: `cosine`: half a cosine; `wsd`: stable, then linear over the last `decay` of the horizon; `constant`.
        warmup: step s < warmup has factor (s + 1) / warmup; 0 is no warm-up. If time ends the run, warm-up takes at most
            a tenth of the time.
        horizon: steps for which the schedule was made, stored when a run starts; None if time ends the run.
        final: factor at the end. decay: fraction of the horizon that decays (wsd).
    """

    kind: Literal["cosine", "wsd", "constant"]
    warmup: int
    horizon: int | None
    final: float = 0.1
    decay: float = 0.2

    def factor(self, step: int, fraction: float | None = None) -> float:
        """The factor of the peak learning rate in step `step` (from 0). `fraction`: of the time, where time ends the run."""
        share = 0.0 if self.horizon is not None else (fraction or 0.0) / WARM
        if step < self.warmup and share < 1:
            return max((step + 1) / self.warmup, share)
        if self.kind == "constant":
            return 1.0
        if self.horizon is not None:  # 0 in the first step after warm-up, 1 in the last step of the horizon
            span = self.horizon - 1 - self.warmup
            done = min(1.0, (step - self.warmup) / span) if span > 0 else 1.0
            fraction = min(1.0, step / (self.horizon - 1)) if self.horizon > 1 else 1.0
        else:
            fraction = done = min(1.0, fraction or 0.0)
        if self.kind == "cosine":
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2
        into_decay = max(0.0, fraction - (1 - self.decay)) / self.decay
        return 1 - (1 - self.final) * min(1.0, into_decay)

    def at_landmarks(self) -> dict[str, float]:
        """The factor at 0, 1, 10, 50 and 100 % of the horizon (of the time after warm-up, where time ends the run)."""
        marks = {}
        for percent in (0, 1, 10, 50, 100):
            if self.horizon is None:
                marks[f"{percent}%"] = self.factor(0 if percent == 0 else self.warmup, percent / 100)
            else:
                marks[f"{percent}%"] = self.factor(round((self.horizon - 1) * percent / 100))
        return marks
