from elman_core.testing import VariantContract


class TestTransformer(VariantContract):
    variant = "transformer"
    options = (
        {"head_dim": 8, "mlp_multiple": 8},
        {"head_dim": 4, "rope_theta": 100.0, "mlp_ratio": 1.5, "mlp_multiple": 5, "init_depth": 3},
    )
