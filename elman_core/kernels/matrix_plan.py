"""Launch plans of the matrix-state kernels: how a recurrence is laid over the lanes of a GPU, decided when it is compiled.

A plan is a name for compile-time numbers of `elman/matrix_state_plan.cuh`. All compute the same recurrence with the same
interface. `ELMAN_MATRIX_PLAN` names the plan of every kernel that "auto" starts; without it each runs `DEFAULT`, the one that
was verified and measured.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from elman_core.registry.errors import ConfigError

DEFAULT = "default"
_MOST_PAIRED = 16  # N up to which a backward has two lines a lane


@dataclass(frozen=True)
class Layout:
    """How one of the two kernels is laid out: `Tuned` of `elman/matrix_state_plan.cuh`, which says what the numbers mean.

    Without tensor cores (float32, or N > 32) only `blocks` counts.
    """

    lines: int = 1
    vector: int = 4
    blocks: int = 0
    form: int = 0

    def digits(self) -> str:
        return f"{self.lines}{self.vector}{self.blocks}{self.form}"


@dataclass(frozen=True)
class Tuning:
    """A plan: the layouts of its forward and backward kernel."""

    forward: Layout = Layout()
    backward: Layout = Layout()

    def defines(self, rows: int) -> tuple[tuple[str, str], ...]:
        """Macros for the compiler at N = `rows`; none for the default, whose numbers are those of the binding.

        The registers of a backward hold the states of a segment of one line a lane beyond N = 16, not of two.
        """
        backward = self.backward if rows <= _MOST_PAIRED else replace(self.backward, lines=1)
        made = (("ELMAN_FORWARD", self.forward), ("ELMAN_BACKWARD", backward))
        return tuple((name, layout.digits()) for name, layout in made if layout != Layout())


# What each is for: docs/decisions/0018.
PLANS = {
    DEFAULT: Tuning(),
    "paired": Tuning(Layout(2, 4, 0, 1), Layout(2, 4, 0, 1)),
    "half_paired": Tuning(Layout(2, 4, 0, 2), Layout(2, 4, 0, 2)),
}


def chosen(asked: str | None = None) -> str:
    """The plan asked for, else that of ELMAN_MATRIX_PLAN, else the default.

    Raises:
        ConfigError: there is no plan of that name.
    """
    name = asked or os.environ.get("ELMAN_MATRIX_PLAN") or DEFAULT
    if name not in PLANS:
        raise ConfigError(f"{name!r} is not a launch plan of the matrix-state kernels: choose {', '.join(PLANS)}")
    return name
