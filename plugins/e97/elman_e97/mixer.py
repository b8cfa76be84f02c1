"""The E97 mixer: its options and gates. B batch, T time, H heads, N key width, V value width."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from elman_core import option
from elman_core.kernels import MatrixKernel
from elman_core.nn import MatrixConfig, MatrixMixer

from .op import e97, e97_raw


@dataclass(frozen=True)
class E97Config(MatrixConfig):
    """Options of E97: those of the layer, with the published defaults, and what is written."""

    gate_activation: Literal["sigmoid", "silu"] = option("silu", "activation of the gate on the output")
    use_output_norm: bool = option(False, "RMSNorm of each head's output")
    raw_write: bool = option(
        False, "the gated value is written, not its difference from what is retrieved: no erase gate"
    )


class E97Mixer(MatrixMixer):
    """`MatrixMixer` with a gate on the key for erasing and one on the value for writing.

    Additional parameters: erase_gate_proj (HN, D), unless `raw_write`, and value_write_gate_proj (HV, D).
    """

    torch_init = ("write_gate_proj", "erase_gate_proj", "value_write_gate_proj")

    @property
    def kernel(self) -> MatrixKernel:  # type: ignore[override]  # not an attribute: a pickle of a model holds no kernel
        return e97_raw if self.config.raw_write else e97

    @classmethod
    def maps(cls, config: E97Config) -> dict[str, int]:
        erase = 0 if config.raw_write else config.keys
        return {**super().maps(config), "erase_gate_proj": erase, "value_write_gate_proj": config.values}

    def recur(
        self, qkv_BTC: Tensor, decay_BTH: Tensor, projected: dict[str, Tensor], **rest: Any
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        parts = [*qkv_BTC.split([config.keys, config.keys, config.values], -1), projected["value_write_gate_proj"]]
        if not config.raw_write:
            parts.insert(2, torch.sigmoid(projected["erase_gate_proj"]))
        heads = (x.unflatten(-1, (config.n_heads, -1)) for x in parts)
        return self.kernel(*heads, decay_BTH, projected.get("write_gate_proj"), **rest)
