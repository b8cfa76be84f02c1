"""E42's kernel keeps the contract."""

from elman_e42.op import dense

from elman_core.testing import KernelContract


class TestE42Kernel(KernelContract):
    spec = dense.spec()
