"""The published level names of E88: what each of them fixes, and nothing more. Widths and depths come from the user.

A level is `E88`, a letter for its ablation round, and a name. All have expansion 1. Rounds a to c have the sigmoid gate,
a and b the output norm; rounds d to h have neither. Only E88_conv_silu and E88_full_fla convolve. A missing n is 32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Options = dict[str, Any]

FULL: Options = {"use_gate": True, "gate_activation": "sigmoid", "use_output_norm": True, "use_conv": False}
GATED: Options = {**FULL, "use_output_norm": False}
PLAIN: Options = {"use_gate": False, "use_output_norm": False, "use_conv": False}


def _heads(heads: int, n: int = 32) -> Options:
    return {"n_heads": heads, "n_state": n}


A16 = {**FULL, **_heads(16)}
C16 = {**GATED, **_heads(16)}
D16 = {**PLAIN, **_heads(16)}
H8 = {**PLAIN, **_heads(8)}
FLA = {**_heads(56), "use_gate": True}
CONV = {**GATED, "use_conv": True, "use_write_gate": True}
LARGE = {"linear_state": True, "use_output_norm": True, "gate_activation": "silu", "init": "zero"}

PRESETS: Mapping[str, Options] = {
    # the plain form: no gate, no norm, no convolution
    **{
        f"h{heads}n{n}": {**PLAIN, **_heads(heads, n)}
        for heads, n in (
            (4, 32), (4, 64), (4, 128), (6, 32), (8, 32), (10, 32), (12, 32), (16, 16), (16, 32), (20, 32), (24, 24),
            (32, 16), (32, 32), (64, 8), (128, 8), (256, 8),
        )
    },
    # with the parts of Gated DeltaNet: convolution, write gate, output gate; sigmoid gate and no norm unless said
    "conv_h32n32": {**CONV, **_heads(32, 32)},
    "conv_h16n64": {**CONV, **_heads(16, 64)},
    "conv_linear": {**CONV, **_heads(16, 64), "linear_state": True},  # the best of them with AdamW
    # for Muon: few heads with many values each; at equal bytes the second is the best of E88
    "conv_h5v256": {**CONV, **LARGE, **_heads(5, 64), "expansion": 4.0},
    "conv_h5n128v256": {**CONV, **LARGE, **_heads(5, 128), "expansion": 2.0, "output_norm_eps": 128e-5},
    "demo": {**PLAIN, **_heads(8, 16)},  # small enough for a CPU
    # one change each to 16 heads of 32 with sigmoid gate and output norm
    "a_noconv": A16,
    "a_linear": {**A16, "linear_state": True},
    "a_nogate": {**A16, "use_gate": False},
    "a_simpledecay": {**A16, "decay": "simple"},
    "a_minimal": {**A16, "use_gate": False, "decay": "simple"},
    "b_nosilu": {**A16, "use_silu": False},
    "b_nol2": {**A16, "l2_norm": False},
    "b_nonorm": {**A16, "use_output_norm": False},
    "b_nosilu_nol2": {**A16, "use_silu": False, "l2_norm": False},
    "b_nogate_nonorm": {**A16, "use_gate": False, "use_output_norm": False},
    # no norm, sigmoid gate
    "c_h32n16": {**GATED, **_heads(32, 16)},
    "c_h8n64": {**GATED, **_heads(8, 64)},
    "c_h24n24": {**GATED, **_heads(24, 24)},
    "c_simpledecay": {**C16, "decay": "simple"},
    "c_nogate": {**C16, "use_gate": False},
    # no norm, no gate
    "d_tiekv": {**D16, "tie_kv": True},
    "d_linear": {**D16, "linear_state": True},
    "d_simpledecay": {**D16, "decay": "simple"},
    "d_tiekv_linear": {**D16, "tie_kv": True, "linear_state": True},
    "e_h12_linear": {**PLAIN, **_heads(12), "linear_state": True},
    "h_wsum": {**H8, "head_mix": "weighted_sum"},
    "h_perhead": {**H8, "head_mix": "per_head"},
    "h_inputw": {**H8, "head_mix": "input_weighted"},
    "h_sum": {**H8, "head_mix": "sum"},
    # 56 heads of 32 with the parts of Gated DeltaNet
    "gated_sigmoid": {**FLA, "gate_activation": "sigmoid", "use_output_norm": False, "use_conv": False},
    "gated_silu": {**FLA, "gate_activation": "silu", "use_output_norm": False, "use_conv": False},
    "conv_silu": {**FLA, "gate_activation": "silu", "use_output_norm": False, "use_conv": True},
    "full_fla": {**FLA, "gate_activation": "silu", "use_output_norm": True, "use_conv": True},
}  # fmt: skip

ALIASES: Mapping[str, str | Options] = {
    "88": "",
    "E88a_noconv_linear": "a_linear",  # the convolution was off in a_linear too
    "E88a_noconv_nogate": "a_nogate",
    "E88d_h12": "h12n32",
    "E88d_h20": "h20n32",
    "E88e_h8_75m": "h8n32",
    "E88e_h10_75m": "h10n32",
    "E88e_h12_75m": "h12n32",
    "E88e_h16_48m": "h16n32",
    "E88f_h32n16": "h32n16",
    "E88f_h24n24": "h24n24",
    "E88f_h4": "h4n32",
    "E88f_h6": "h6n32",
    "E88f_h4n64": "h4n64",
    "E88g_h64n8": "h64n8",
    "E88g_h128n8": "h128n8",
    "E88g_h256n8": "h256n8",
    "E88g_h16n16": "h16n16",
    "E88g_h4n128": "h4n128",
    "E88h_concat": "h8n32",
    "E88h_h32n32": "h32n32",
    **{f"E88{name}": name for name in PRESETS if re.match(r"[a-h]_", name)},
    **{f"E88_{name}": name for name in ("gated_sigmoid", "gated_silu", "conv_silu", "full_fla")},
}

_SIZE = r"_\d+(?:\.\d+)?[mb]"
_FAMILIES: tuple[tuple[str, Options], ...] = (
    (r"e88h(?P<heads>\d+)(?:n(?P<n>\d+))?", FULL),
    (r"e88sh(?P<heads>\d+)(?:n(?P<n>\d+))?", {**FULL, "expansion": 1.0}),
    (r"e88th(?P<heads>\d+)(?:n(?P<n>\d+))?", {**FULL, "expansion": 1.0, "tie_kv": True}),
    (rf"e88_[hb](?P<heads>\d+)(?:n(?P<n>\d+))?(?:{_SIZE})?", PLAIN),
    (rf"e88_n(?P<n>\d+)(?:{_SIZE})?", PLAIN),
    (rf"e88_dim\d+(?:{_SIZE})?", PLAIN),
    (rf"e88{_SIZE}", PLAIN),
)


def parse_alias(name: str) -> Options | None:
    """Options of a level in one of the families, or None.

    `E88h{H}[n{n}]` (gate and norm), `E88sh…` (the same, expansion 1), `E88th…` (the same, tied), and plain: `E88_h{H}n{n}`,
    `E88_b{H}n{n}`, `E88_n{n}`, `E88_dim{D}`, `E88_100M`, each optionally followed by a size such as `_500m`. Widths and sizes
    in a name are not options: the user sets them.
    """
    for pattern, setting in _FAMILIES:
        if match := re.fullmatch(pattern, name, re.IGNORECASE):
            found = match.groupdict()
            options = dict(setting)
            if found.get("heads"):
                options.update(_heads(int(found["heads"])))
            if found.get("n"):
                options["n_state"] = int(found["n"])
            return options
    return None
