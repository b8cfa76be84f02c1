from elman_core.testing import VariantContract


class TestE42(VariantContract):
    variant = "e42"
    options = (
        {},
        {"expansion": 1.5, "use_conv": True, "mamba2_init": True},
        {"r_h_mode": "none", "use_conv": True, "d_conv": 2, "mamba2_init": "s4d"},
    )
