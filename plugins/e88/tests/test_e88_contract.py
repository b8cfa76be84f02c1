from elman_core.testing import VariantContract

SMALL = {"n_heads": 4, "n_state": 8}
PLAIN = {**SMALL, "use_gate": False, "use_output_norm": False}


class TestE88(VariantContract):
    variant = "e88"
    dim = 32
    options = (
        SMALL,
        PLAIN,
        {
            **SMALL,
            "use_conv": True,
            "expansion": 2.0,
            "use_write_gate": True,
            "value_residual": True,
            "decay": "simple",
        },
        {**PLAIN, "use_conv": True, "tie_kv": True, "decay": "constant", "head_mix": "weighted_sum"},
        {**PLAIN, "linear_state": True, "decay": "none", "head_mix": "input_weighted"},
        {**SMALL, "l2_norm": False, "gate_activation": "silu", "head_mix": "sum"},
    )
