from elman_core.testing import VariantContract


class TestGRU(VariantContract):
    variant = "gru"
    options = (
        {},
        {"reset_after": False, "expansion": 1.5, "init": "normal"},
        {"in_proj": False, "zero_out_proj": True},
    )


class TestLSTM(VariantContract):
    variant = "lstm"
    options = ({}, {"expansion": 1.5, "init": "normal", "forget_bias": 0.5}, {"in_proj": False, "zero_out_proj": True})
