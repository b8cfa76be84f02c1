from elman_core.testing import VariantContract


class TestGatedDeltaNet(VariantContract):
    variant = "gdn"
    options = (
        {"head_dim": 8},
        {"head_dim": 8, "n_heads": 3, "expand_v": 0.5, "d_conv": 2, "init": "linear"},
    )
