"""Launch plans of the matrix-state kernels: how a recurrence is laid over the lanes of a GPU, decided when it is compiled.

A plan is a name for compile-time numbers of `elman/matrix_state_plan.cuh`. All compute the same recurrence with the same
interface. `ELMAN_MATRIX_PLAN` names the plan of every kernel that "auto" starts; without it each runs `DEFAULT`, the one that
was verified and measured.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from elman_core.registry.errors import ConfigError

DEFAULT = "default"


@dataclass(frozen=True)
class Tuning:
    """The numbers of a plan."""

    def defines(self) -> tuple[tuple[str, str], ...]:
        """Macros for the compiler; none for the default."""
        return ()


PLANS = {DEFAULT: Tuning()}


def chosen(asked: str | None = None) -> str:
    """The plan asked for, else that of ELMAN_MATRIX_PLAN, else the default.

    Raises:
        ConfigError: there is no plan of that name.
    """
    name = asked or os.environ.get("ELMAN_MATRIX_PLAN") or DEFAULT
    if name not in PLANS:
        raise ConfigError(f"{name!r} is not a launch plan of the matrix-state kernels: choose {', '.join(PLANS)}")
    return name
