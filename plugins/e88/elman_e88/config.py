"""The options of E88, what combinations of them can be built, and how many parameters they have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elman_core import option

CONV_WIDTH = 4


@dataclass(frozen=True)
class E88Config:
    """Options of E88. The defaults are those of the first ablation round: 16 heads of 32 x 32, sigmoid gate, output norm."""

    expansion: float = option(1.0, "width of a value / width of a key", gt=0.0, le=8.0)
    n_state: int = option(32, "width N of a query and key, the rows of a head's state", ge=4, le=128, multiple_of=4)
    n_heads: int = option(16, "number H of heads", ge=1, le=1024)
    use_conv: bool = option(False, "causal depthwise convolution of width 4 on q, k, v; its window is state")
    use_gate: bool = option(True, "gate on the output, from a projection of its own")
    gate_activation: Literal["sigmoid", "silu"] = option("sigmoid", "activation of that gate")
    use_silu: bool = option(True, "SiLU on q, k, v")
    l2_norm: bool = option(True, "q and k of each head have length 1")
    decay: Literal["mamba", "simple", "constant", "none"] = option("mamba", "decay of the state, one for each head")
    use_write_gate: bool = option(False, "sigmoid gate on what is written, one for each head")
    value_residual: bool = option(False, "a learned multiple of v is added to the output")
    tie_kv: bool = option(False, "v is k before its normalisation (needs expansion 1)")
    linear_state: bool = option(False, "no tanh around the new state")
    use_output_norm: bool = option(True, "RMSNorm of each head's output")
    head_mix: Literal["concat", "weighted_sum", "per_head", "input_weighted", "sum"] = option(
        "concat", "how the outputs of the heads become one; 'per_head' is 'concat' with each head drawn by itself"
    )

    @property
    def keys(self) -> int:
        """H N, the width of all queries or of all keys."""
        return self.n_heads * self.n_state

    @property
    def head_values(self) -> int:
        """V, the width of one head's value, the columns of its state: N · expansion, whole once validated."""
        return round(self.n_state * self.expansion)

    @property
    def values(self) -> int:
        """H V, the width of all values."""
        return self.n_heads * self.head_values

    @property
    def projected(self) -> int:
        """Rows of the projection that makes q, k and (unless tied) v."""
        return 2 * self.keys + (0 if self.tie_kv else self.values)

    @property
    def mixed(self) -> int:
        """Columns of the output projection."""
        return self.values if self.head_mix in ("concat", "per_head") else self.head_values
