"""The RWKV-7 mixer: parameters, initialisation, and which code runs.

B batch, T time, D model width, H heads, K width of a key and of a value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_baselines.heads import need_whole_heads
from elman_baselines.library import fla_runs
from elman_core import Mixer, State, option
from elman_core.nn import causal_conv, compute_dtype, linear, orthogonal_, without_autocast
from elman_core.registry import StateSpec

from . import op

SHIFTED = "rwkvag"
"""What has a share of the previous input: reading, decay, key, value, the rate of removal, the output gate."""


@dataclass(frozen=True)
class RWKV7Config:
    head_dim: int = option(
        64, "width K of a key and of a value, the rows and columns of a head's state", ge=4, le=128, multiple_of=4
    )
    init_depth: int = option(
        0, "number of layers, on which the start of each depends; 0: all start as the middle one", ge=0
    )


class HeadNorm(nn.GroupNorm):
    """In the dtype of its input."""

    def forward(self, x_BC: Tensor) -> Tensor:
        weight, bias = (p.to(x_BC.dtype) for p in (self.weight, self.bias))
        return F.group_norm(x_BC, self.num_groups, weight, bias, self.eps)


class RWKV7(Mixer):
    """Parameters, with fla's names and shapes: x_r, x_w, x_k, x_v, x_a, x_g (1, 1, D); k_k, k_a (D); r_k (H, K); r_proj,
    k_proj, v_proj, o_proj (D, D); w_lora, a_lora: lora.0 (R, D), lora.2 (D, R) with a bias; g_lora: the same without; g_norm
    (D), with a bias. R, the rank: 2.5 sqrt(D) K / 64 for w and a, 5 sqrt(D) for g, each to the nearest multiple of 32.

    State: shift (B, 1, D), the last input, and S (B, H, K, K).

    On a GPU fla's kernels run; for packed rows and on a CPU a kernel of elman-csrc or plain PyTorch.
    """

    no_decay = (*(f"x_{n}" for n in SHIFTED), "r_k")
    config: RWKV7Config
    o_proj: nn.Linear

    def __init__(self, dim: int, config: RWKV7Config, layer_idx: int = 0) -> None:
        super().__init__(dim, config, layer_idx)
        wide = config.head_dim
        self.heads = dim // wide
        for name in SHIFTED:
            self.register_parameter(f"x_{name}", nn.Parameter(torch.empty(1, 1, dim)))
        self.k_k, self.k_a = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.r_k = nn.Parameter(torch.empty(self.heads, wide))
        for name in "rkvo":
            self.add_module(f"{name}_proj", nn.Linear(dim, dim, bias=False))
        self.w_lora = _make_low_rank(dim, 2.5 * wide / 64, nn.Tanh())
        self.a_lora = _make_low_rank(dim, 2.5 * wide / 64, nn.Identity())
        self.g_lora = _make_low_rank(dim, 5.0, nn.Sigmoid(), bias=False)
        self.g_norm = HeadNorm(self.heads, dim, eps=wide * 1e-5)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        layers, place = self.config.init_depth, self.layer_idx
        before, after = (place / max(1, layers - 1), 1 - place / layers) if layers else (0.5, 0.5)
        share = torch.arange(self.dim, device=self.k_k.device) / self.dim  # of the channels before each
        across = torch.arange(self.dim, device=self.k_k.device) / max(1, self.dim - 1)
        around = torch.linspace(-1, 1, self.config.head_dim, device=self.k_k.device).repeat(self.heads)
        around = around * around.abs()
        for name, power in zip(SHIFTED, (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
            getattr(self, f"x_{name}").copy_(1 - share ** (power * after))
        self.k_k.copy_(0.71 - 0.1 * (across - 0.5))
        nn.init.constant_(self.k_a, 1.02), nn.init.constant_(self.r_k, -0.04)
        for name, gain in (("r", 1.0), ("k", 0.1), ("v", 1.0)):
            orthogonal_(getattr(self, f"{name}_proj").weight, gain)
        nn.init.zeros_(self.o_proj.weight)
        starts = {"w": -6 + 6 * across ** (1 + before**0.3) + 0.5 + 2.5 * around}
        starts["a"] = -0.19 + 0.3 * around + 0.4 * (across - 0.5)
        for name in "wag":
            first, _, second = self._low_rank(name)
            nn.init.zeros_(first.weight)
            orthogonal_(second.weight, 0.1 * math.sqrt(max(1.0, second.in_features / second.out_features)))
            if second.bias is not None:
                second.bias.copy_(starts[name])
        nn.init.constant_(self.g_norm.weight, ((place + 1) / layers if layers else 0.5) ** 0.7)
        nn.init.zeros_(self.g_norm.bias)

    def _low_rank(self, name: str) -> tuple[nn.Linear, nn.Module, nn.Linear]:
        first, activation, second = getattr(self, f"{name}_lora")["lora"]
        return first, activation, second

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        found = op.kernels(x_BTD) if starts_BT is None and fla_runs(x_BTD) else None
        back = (1 - 2 * torch.arange(2, device=x_BTD.device, dtype=x_BTD.dtype)).expand(self.dim, 2)  # x_{t-1} - x_t
        flags_TB = (None if flag is None else flag.mT for flag in (mask_BT, starts_BT))
        start, window = (None, None) if state is None else (state["S"], state["shift"])
        delta_TBD, window = causal_conv(x_BTD.transpose(0, 1), back, None, window, *flags_TB)
        mixed = {n: x_BTD + delta_TBD.transpose(0, 1) * getattr(self, f"x_{n}").to(x_BTD.dtype) for n in SHIFTED}
        r, k, v = (linear(getattr(self, f"{n}_proj"), mixed[n]) for n in "rkv")
        low_rank = ((mixed[n], *self._low_rank(n)) for n in "wag")
        w, a, g = (linear(second, activation(linear(first, y))) for y, first, activation, second in low_rank)
        wide = compute_dtype(x_BTD)
        with without_autocast(x_BTD):
            full, a = k.to(wide), F.logsigmoid(a.to(wide)).exp()
            unit = F.normalize((full * self.k_k.to(wide)).unflatten(-1, (self.heads, -1)), dim=-1)
            k = (full + full * (a - 1) * self.k_a.to(wide)).to(r.dtype)
            log = op.LEAST * F.logsigmoid(w.to(wide)).exp()
            r, log, k, v, a = (y.unflatten(-1, (self.heads, -1)) for y in (r, log, k, v, a))
        if found is not None:
            made = [log, k, v, unit.to(r.dtype), a.to(r.dtype)]
            if mask_BT is not None:
                made = [torch.where(mask_BT[..., None, None], y, 0) for y in made]
            log, k, v, unit, a = made
            o_BTHK, end = op.library_rule(found, r, log, k, v, unit, a, start)
        else:
            o_BTHK, end = op.rule(r, log, k, v, unit, a, start, mask_BT, starts_BT)
        with without_autocast(x_BTD):
            o = self.g_norm(o_BTHK.to(wide).flatten(0, 1).flatten(1)).view_as(x_BTD)
            again = (r.to(wide) * k.to(wide) * self.r_k.to(wide)).sum(-1, keepdim=True) * v.to(wide)
            y_BTD = ((o + again.flatten(2)) * g.to(wide)).to(g.dtype)
        return linear(self.o_proj, y_BTD), {"shift": window, "S": end}

    @classmethod
    def validate(cls, dim: int, config: RWKV7Config) -> None:
        """Raises `ConfigError` unless heads fill the model width."""
        need_whole_heads(dim, config.head_dim)

    @classmethod
    def state_spec(cls, dim: int, config: RWKV7Config) -> StateSpec:
        wide = config.head_dim
        return {"shift": ((1, dim), torch.float32), "S": ((dim // wide, wide, wide), torch.float32)}

    def backend(self) -> str:
        weight, wide = self.o_proj.weight, self.config.head_dim
        return "fla" if op.kernels(weight) is not None else op.dplr.backend(weight.device, wide, wide)


def _make_low_rank(dim: int, factor: float, activation: nn.Module, bias: bool = True) -> nn.ModuleDict:
    rank = max(32, round(factor * dim**0.5 / 32) * 32)
    return nn.ModuleDict(
        {"lora": nn.Sequential(nn.Linear(dim, rank, bias=False), activation, nn.Linear(rank, dim, bias=bias))}
    )
