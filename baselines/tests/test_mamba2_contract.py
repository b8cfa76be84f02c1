from elman_core.testing import VariantContract


class TestMamba2(VariantContract):
    variant = "mamba2"
    options = (
        {"headdim": 8, "d_state": 6},
        {"headdim": 4, "d_state": 3, "d_conv": 2, "expand": 1.5, "init_depth": 3},
    )
