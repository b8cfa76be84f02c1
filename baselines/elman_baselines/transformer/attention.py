"""The attention branch: causal softmax attention with rotary positions; its state is the keys and values so far.

B batch, T new positions, S positions in the cache after them, D model width, H heads, K width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from elman_baselines.heads import need_whole_heads
from elman_core import Mixer, State
from elman_core.nn import compute_dtype, linear, without_autocast
from elman_core.registry import StateSpec

from .config import TransformerConfig

BLOCK = 128
"""Steps of a block of FlexAttention."""


class Attention(Mixer):
    """y = W_o softmax(q kᵀ / sqrt(K)) v for every head. q_proj, k_proj, v_proj, o_proj (D, D), rows head after head.

    State: k (B, S, H, K), rotated, v (B, S, H, K), and position (B, S): which position of its document each entry is, or -1
    where it is left out, by the mask or because its document has ended. Entries that are left out are zero, are never attended
    to and do not count: the first real byte of a document is at position 0, however the row is padded or packed. So keys are
    cached once and the state grows by T entries with each call.
    """

    state_growth = "per_token"
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
        nn.init.normal_(self.o_proj.weight, std=0.02 * self.config.residual_scale)

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        q, k, v = (
            linear(p, x_BTD).unflatten(-1, (self.heads, self.config.head_dim))
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        position_BT = _positions(x_BTD, state, mask_BT, starts_BT)
        angle = rotary_angles(position_BT, self.config.head_dim, self.config.rope_theta, compute_dtype(q))
        q, k = rotate(q, *angle), rotate(k, *angle)
        entries: State = {"k": k, "v": v, "position": position_BT}
        if mask_BT is not None:
            entries = _only(mask_BT, entries)
        if state is not None:
            entries = {n: torch.cat((state[n].to(x.dtype), x), 1) for n, x in entries.items()}
        document_BS, allowed = None, None
        if starts_BT is not None:  # documents of a row are numbered; the entries of the state are of number 0
            document_BS = F.pad(starts_BT.cumsum(1), (entries["position"].shape[1] - starts_BT.shape[1], 0))
        blocks = None
        if starts_BT is not None and state is mask_BT is None and _has_flex(q):
            blocks = block_mask(starts_BT)
        elif not (state is mask_BT is starts_BT is None):
            allowed = _allowed(entries["position"], document_BS, x_BTD.shape[1])
        q_BHTK, k_BHSK, v_BHSK = (x.transpose(1, 2) for x in (q, entries["k"], entries["v"]))
        if blocks is not None:
            y_BHTK = _compiled()(q_BHTK, k_BHSK, v_BHSK, block_mask=blocks)
        else:
            y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSK, allowed, is_causal=allowed is None)
        if document_BS is not None:
            entries = _only(document_BS == document_BS[:, -1:], entries)
        kept = {n: x.to(compute_dtype(x)) if x.is_floating_point() else x for n, x in entries.items()}
        return linear(self.o_proj, y_BHTK.transpose(1, 2).flatten(2)), kept

    @classmethod
    def validate(cls, dim: int, config: TransformerConfig) -> None:
        """Raises `ConfigError` unless heads fill the width."""
        need_whole_heads(dim, config.head_dim)

    @classmethod
    def state_spec(cls, dim: int, config: TransformerConfig) -> StateSpec:
        entry = (-1, dim // config.head_dim, config.head_dim)
        return {"k": (entry, torch.float32), "v": (entry, torch.float32), "position": ((-1,), torch.int64)}

    def backend(self) -> str:
        return "sdpa"


def _positions(x_BTD: Tensor, state: State | None, mask_BT: Tensor | None, starts_BT: Tensor | None) -> Tensor:
    """(B, T) int64: how many real positions of the document come before each."""
    real_BT = torch.ones(x_BTD.shape[:2], dtype=torch.bool, device=x_BTD.device) if mask_BT is None else mask_BT
    position_BT = real_BT.cumsum(1) - 1
    past_B1 = 0 if state is None else F.pad(state["position"], (1, 0), value=-1).amax(1, keepdim=True) + 1
    if starts_BT is None:
        return position_BT + past_B1
    before_BT = torch.where(starts_BT, position_BT + 1 - real_BT.long(), 0).cummax(1).values
    return position_BT - before_BT + torch.where(starts_BT.cumsum(1) == 0, past_B1, 0)


def _only(keep_BS: Tensor, entries: State) -> State:
    """Leave out the entries where `keep_BS` is False: they must not come back through the cache, nor give a gradient."""
    wide = keep_BS[..., None, None]
    k, v = (torch.where(wide, entries[n], 0) for n in ("k", "v"))
    return {"k": k, "v": v, "position": torch.where(keep_BS, entries["position"], -1)}


def _allowed(position_BS: Tensor, document_BS: Tensor | None, steps: int) -> Tensor:
    """(B, 1, T, S) bool: what each of the last T entries may attend to. A masked one sees itself, so that it stays finite."""
    entries = torch.arange(position_BS.shape[1], device=position_BS.device)
    new_T1 = entries[-steps:, None]
    seen_BTS = (position_BS >= 0)[:, None, :] & (entries <= new_T1)
    if document_BS is not None:
        seen_BTS = seen_BTS & (document_BS[:, None, :] == document_BS[:, -steps:, None])
    return (seen_BTS | (entries == new_T1))[:, None]


def _has_flex(q: Tensor) -> bool:
    """Whether torch's FlexAttention runs packed rows: on a GPU in 16 bits. Elsewhere a mask of all pairs says what is seen."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] in (16, 32, 64, 128, 256)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """FlexAttention as a Triton kernel in each direction; uncompiled it would make all scores."""
    return torch.compile(flex_attention)


def block_mask(starts_BT: Tensor) -> BlockMask:
    """What each step may attend to: the steps up to it of its document. Blocks before a document are skipped, and nothing is
    read on the host, so that a CUDA graph can hold it (flash attention's lengths would have to be)."""
    steps = starts_BT.shape[1]
    place_T, document_BT = torch.arange(steps, device=starts_BT.device), starts_BT.cumsum(1)
    first_BN = (
        torch.where(starts_BT, place_T, 0).cummax(1).values[:, ::BLOCK] // BLOCK
    )  # the first block that each block sees
    block_N = torch.arange(first_BN.shape[1], device=starts_BT.device)
    seen_BNM = (first_BN[..., None] + block_N).clamp(max=len(block_N) - 1)

    def allowed(b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_BT[b, query] == document_BT[b, key])

    count_BN = block_N - first_BN + 1
    given = {"BLOCK_SIZE": BLOCK, "mask_mod": allowed, "seq_lengths": (steps, steps)}
    return BlockMask.from_kv_blocks(count_BN[:, None].int(), seen_BNM[:, None].int(), **given)  # type: ignore[arg-type]


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
