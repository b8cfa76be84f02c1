"""Triton's autotuners without their choosing, which takes minutes: for checks of values, where any candidate must be right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def first_that_fits() -> Iterator[None]:
    """Inside, every autotuner runs its first candidate, or the next where that one does not fit on the GPU."""
    from triton.runtime import autotuner

    run = autotuner.Autotuner.run

    def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        every, error = self.configs, None
        try:
            for config in every:
                self.configs = [config]
                try:
                    return run(self, *args, **kwargs)
                except Exception as raised:  # too much shared memory, say: the autotuner passes over it, too
                    error = raised
        finally:
            self.configs = every
        assert error is not None
        raise error

    autotuner.Autotuner.run = run_first
    try:
        yield
    finally:
        autotuner.Autotuner.run = run
