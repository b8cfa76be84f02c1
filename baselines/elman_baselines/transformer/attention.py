"""The attention branch: causal softmax attention with rotary positions; its state is the keys and values so far.

B batch, T new positions, S positions in the cache after them, D model width, H heads, K width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core import Mixer, State
from elman_core.nn import compute_dtype, without_autocast
from elman_core.registry import StateSpec

from .config import TransformerConfig, residual_scale


class Attention(Mixer):
    """y = W_o softmax(q kᵀ / sqrt(K)) v for every head. q_proj, k_proj, v_proj, o_proj (D, D), rows head after head.

    State: k (B, S, H, K), rotated, v (B, S, H, K), and position (B, S): which position of its row each entry is, or -1 where
    the mask left it out. Entries that are left out are zero, are never attended to and do not count: the first real byte of a
    row is at position 0, however it is padded. So keys are cached once and the state grows by T entries with each call.
    """

    state_growth = "per_token"
    rollback = "replay"
    config: TransformerConfig

    def __init__(self, dim: int, config: TransformerConfig, layer_idx: int = 0) -> None:
        super().__init__(dim, config, layer_idx)
        self.heads = dim // config.head_dim
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.normal_(projection.weight, std=0.02)
        nn.init.normal_(self.o_proj.weight, std=0.02 * residual_scale(self.config.init_depth, 2))

    def forward(self, x_BTD: Tensor, state: State | None = None, mask_BT: Tensor | None = None) -> tuple[Tensor, State]:
        q, k, v = (
            p(x_BTD).unflatten(-1, (self.heads, self.config.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        position_BT = _positions(x_BTD, state, mask_BT)
        angle = rotary_angles(position_BT, self.config.head_dim, self.config.rope_theta, compute_dtype(q))
        q, k = rotate(q, *angle), rotate(k, *angle)
        if mask_BT is not None:  # what was left out must not come back through the cache, nor give a gradient
            k, v = (torch.where(mask_BT[..., None, None], x, 0) for x in (k, v))
        new_state: State = {"k": k, "v": v, "position": position_BT}
        allowed = None
        if state is not None:
            new_state = {n: torch.cat((state[n].to(x.dtype), x), 1) for n, x in new_state.items()}
        if state is not None or mask_BT is not None:
            allowed = _allowed(new_state["position"], x_BTD.shape[1])
        q_BHTK, k_BHSK, v_BHSK = (x.transpose(1, 2) for x in (q, new_state["k"], new_state["v"]))
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSK, allowed, is_causal=allowed is None)
        kept = {n: x.to(compute_dtype(x)) if x.is_floating_point() else x for n, x in new_state.items()}
        return self.o_proj(y_BHTK.transpose(1, 2).flatten(2)), kept

    @classmethod
    def state_spec(cls, dim: int, config: TransformerConfig) -> StateSpec:
        entry = (-1, dim // config.head_dim, config.head_dim)
        return {"k": (entry, torch.float32), "v": (entry, torch.float32), "position": ((-1,), torch.int64)}

    def backend(self) -> str:
        return "sdpa"


def _positions(x_BTD: Tensor, state: State | None, mask_BT: Tensor | None) -> Tensor:
    """(B, T) int64: how many real positions of the row come before each; -1 where the mask is False."""
    rows, steps = x_BTD.shape[:2]
    if mask_BT is None:
        position_BT = torch.arange(steps, device=x_BTD.device).expand(rows, steps)
    else:
        position_BT = mask_BT.cumsum(1) - 1
    if state is not None:
        position_BT = position_BT + state["position"].amax(1, keepdim=True) + 1
    return position_BT if mask_BT is None else torch.where(mask_BT, position_BT, -1)


def _allowed(position_BS: Tensor, steps: int) -> Tensor:
    """(B, 1, T, S) bool: what each of the last T entries may attend to. A masked one sees itself, so that it stays finite."""
    entries = torch.arange(position_BS.shape[1], device=position_BS.device)
    new_T1 = entries[-steps:, None]
    return ((position_BS >= 0)[:, None, :] & (entries <= new_T1) | (entries == new_T1))[:, None]


def rotary_angles(position_BT: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (B, T, 1, K / 2) of position · theta^(-2 i / K), in float32 or float64."""
    i = torch.arange(0, width, 2, device=position_BT.device, dtype=dtype)
    with without_autocast(i):
        angle = position_BT.to(dtype)[..., None, None] * theta ** (-i / width)
        return angle.cos(), angle.sin()


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + K/2}) by their angles (the layout of GPT-NeoX and of transformers); returned in x's dtype."""
    a, b = x_BTHK.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_BTHK.dtype)
