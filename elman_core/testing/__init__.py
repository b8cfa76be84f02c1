"""What a plugin's tests import. A conformance test is one class::

    from elman_core.testing import KernelContract, VariantContract

    class TestE99(VariantContract):
        variant = "e99"
        options = [{}, {"expansion": 2.0}]

    class TestE99Kernel(KernelContract):
        spec = dense.spec()

This is the only package that imports pytest, and nothing imports it but tests.
"""

from __future__ import annotations

import pytest

MODULES = ("guard", "harness", "kernel", "mixer_contract", "model_contract", "variant")
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in MODULES))

from .kernel import KernelContract  # noqa: E402
from .variant import VariantContract  # noqa: E402

__all__ = ["KernelContract", "VariantContract"]
