"""The contract for plugins' tests. The test of a variant is one class::

    from elman_authors.testing import VariantContract

    class TestE99(VariantContract):
        variant = "e99"
        options = ({}, {"expansion": 2.0})

        def step(self, o, p, s, x, z): ...           # one time step in NumPy, from the equation
        def step_gradient(self, o, p, s, x, z, gy, gs): ...   # and its derivative
        def initial_values(self, o): ...             # what each parameter starts as, as `initial.InitialContract` describes

`elman_authors.testing.oracle.Cell` says what the two take and return. This is the only package that imports pytest, and only
tests import it.
"""

from __future__ import annotations

import pytest

MODULES = ("equation_contract", "harness", "initial", "kernel", "mixer_contract", "model_contract", "variant")
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in MODULES))

from . import initial  # noqa: E402
from .kernel import KernelContract  # noqa: E402
from .oracle import maps_gradient, self_gate, self_gate_slope, sigmoid, silu, silu_slope  # noqa: E402
from .variant import VariantContract  # noqa: E402

__all__ = [
    "KernelContract", "VariantContract", "initial", "maps_gradient", "self_gate", "self_gate_slope", "sigmoid", "silu",
    "silu_slope",
]  # fmt: skip
