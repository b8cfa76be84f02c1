from elman_core.testing import VariantContract


class TestE1(VariantContract):
    variant = "e1"
    options = (
        {},
        {"expansion": 1.5, "use_conv": True, "mamba2_init": True},
        {"r_h_mode": "none", "use_conv": True, "d_conv": 2, "mamba2_init": "s4d"},
    )
