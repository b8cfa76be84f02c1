"""fla's functions of the rules in `tests/linear_cells.py`: their inputs, and the cells' inputs from them.

B batch, T time, H heads, K width of a key, V of a value.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """fla's function of a rule: `fla.ops.MODULE`'s chunk_NAME and fused_recurrent_NAME.

    Attributes:
        inputs: fla's inputs besides q, k and v, with their sizes and how they are drawn. ours: makes the cell's inputs from
            fla's. q: fla's name of q.
    """

    module: str
    name: str
    inputs: dict[str, tuple[str, str]]
    ours: Callable[[dict[str, Tensor]], dict[str, Any]]
    q: str = "q"

    def draw(self, B: int, T: int, H: int, K: int, V: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        """fla's inputs; logarithms of decays, and scalars, in float32."""
        draw = torch.Generator(device).manual_seed(0)
        sizes, made = {"B": B, "T": T, "H": H, "K": K, "V": V}, {}
        for name, (letters, kind) in (
            {"q": ("BTHK", "unit"), "k": ("BTHK", "unit"), "v": ("BTHV", "")} | self.inputs
        ).items():
            x = torch.randn([sizes[n] for n in letters], generator=draw, device=device)
            x = -0.2 * x.square() if kind == "log" else x.sigmoid() if kind == "gate" else x
            x = torch.nn.functional.normalize(x, dim=-1) if kind == "unit" else x
            made[name] = x if kind == "log" or letters == "BTH" else x.to(dtype)
        return made

    def theirs(self, way: str, x: dict[str, Tensor], state_BHKV: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        """Return o and S_T. way: "chunk" or "fused_recurrent". more: further arguments of fla's function."""
        function = getattr(importlib.import_module(f"fla.ops.{self.module}"), f"{way}_{self.name}")
        given = {self.q if n == "q" else n: value for n, value in x.items()}
        o_BTHV, last_BHKV = function(**given, scale=1.0, initial_state=state_BHKV, output_final_state=True, **more)
        return o_BTHV, last_BHKV


LOG, GATE, UNIT = ("BTHK", "log"), ("BTHK", "gate"), ("BTHK", "unit")
RULES = {
    "gated_deltanet": Rule(
        "gated_delta_rule", "gated_delta_rule", {"g": ("BTH", "log"), "beta": ("BTH", "gate")},
        lambda x: {"v": x["v"], "decay": x["g"].exp(), "write": x["beta"], "linear_state": True},
    ),
    "deltanet": Rule("delta_rule", "delta_rule", {"beta": ("BTH", "gate")}, lambda x: {"v": x["v"], "beta": x["beta"]}),
    "kimi_delta": Rule(
        "kda", "kda", {"g": LOG, "beta": ("BTH", "gate")},
        lambda x: {"decay": x["g"].exp(), "v": x["v"], "beta": x["beta"]},
    ),
    "gdn2": Rule(
        "gdn2", "gdn2", {"g": LOG, "b": GATE, "w": ("BTHV", "gate")},
        lambda x: {"decay": x["g"].exp(), "erase": x["g"].exp() * x["b"], "v": x["v"], "write": x["w"]},
    ),
    "rwkv7": Rule(
        "rwkv7", "rwkv7", {"w": LOG, "a": UNIT, "b": UNIT},
        lambda x: {"decay": x["w"].exp(), "read": x["a"], "again": x["b"], "v": x["v"]}, q="r",
    ),
}  # fmt: skip
