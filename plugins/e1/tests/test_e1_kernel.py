"""E1's kernel keeps the contract."""

from elman_e1.op import dense

from elman_core.testing import KernelContract


class TestE1Kernel(KernelContract):
    spec = dense.spec()
