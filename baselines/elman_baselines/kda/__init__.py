"""Kimi delta attention (Kimi team 2025) and Gated DeltaNet 2: the layers of flash-linear-attention, parameter for parameter.

    S' = diag(α_t) S_{t-1},   S_t = S' + k_t (w_t ⊙ v_t - S'ᵀ (b_t ⊙ k_t))ᵀ,   o_t = S_tᵀ q_t / sqrt(K)
    y = W_o (RMSNorm(o) ⊙ sigmoid(W_g2 W_g1 x + bias))

q, k, v = silu(conv(W x)), q and k of length 1 in each head; α = exp(-exp(A_log) softplus(W_f2 W_f1 x + dt_bias)), one for each
channel of a key. In Kimi delta attention b = w = sigmoid(W_b x), one number for each head; in Gated DeltaNet 2
b = sigmoid(W_b x) has the width of a key, and w = sigmoid(W_w x) that of a value. `allow_neg_eigval` doubles b (in Kimi delta
attention w, too).

Initialisation as in fla 0.6: maps and convolutions N(0, 0.02), A ~ U(1, 16), softplus(dt_bias) log-uniform in (0.001, 0.1),
both float32 and never decayed.
"""

from __future__ import annotations

from elman_core import Variant

from .mixer import GatedDelta2, KDAConfig, KimiDelta
from .op import INSTALL, channel_delta

__all__ = ["GatedDelta2", "KDAConfig", "KimiDelta", "gdn2_variant", "kda_variant"]


def kda_variant() -> Variant:
    return Variant(
        name="kda",
        summary="Kimi delta attention, a linear matrix state with a delta rule and a decay per channel: fla's layer",
        equation="S_t = diag(α_t) S_{t-1} + β_t k_t (v_t - S_{t-1}ᵀ (α_t ⊙ k_t))ᵀ,  o_t = S_tᵀ q_t / sqrt(K)",
        config=KDAConfig,
        mixer=KimiDelta,
        kernels=channel_delta.specs(),
        presets={"neg_eigval": {"allow_neg_eigval": True}},
        accelerated_by={"fla": INSTALL},
    )


def gdn2_variant() -> Variant:
    return Variant(
        name="gdn2",
        summary="Gated DeltaNet 2: as kda, with gates of erasing and writing per channel: fla's layer",
        equation="S_t = diag(α_t) S_{t-1} + k_t (w_t ⊙ v_t - S_{t-1}ᵀ (α_t ⊙ b_t ⊙ k_t))ᵀ,  o_t = S_tᵀ q_t / sqrt(K)",
        config=KDAConfig,
        mixer=GatedDelta2,
        kernels=channel_delta.specs(),
        presets={"neg_eigval": {"allow_neg_eigval": True}},
        accelerated_by={"fla": INSTALL},
    )
