"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024): the layer of flash-linear-attention, parameter for parameter.

    S_t = α_t S_{t-1} + β_t k_t (v_t - α_t S_{t-1}ᵀ k_t)ᵀ,   o_t = S_tᵀ q_t / sqrt(K),   y = W_o (RMSNorm(o) ⊙ silu(W_g x))

q, k, v = silu(conv(W x)), q and k of length 1 in each head;
α = exp(-exp(A_log) softplus(W_a x + dt_bias)), β = sigmoid(W_b x), or twice that with `allow_neg_eigval`.

Best practice, and where it comes from (flash-linear-attention 0.6, its layer and its language model):

* convolution of width 4 without a bias on q, k and v, SiLU; output gate with SiLU after an RMSNorm of each head, epsilon 1e-5.
* A ~ U(0, 16), softplus(dt_bias) log-uniform in (0.001, 0.1), both float32 and never decayed.
* all maps and convolutions start as N(0, 0.02), as its language model starts them; `init = "linear"` is the layer alone, whose
  maps start as torch's. (Earlier releases drew Xavier with gain 2^-2.5.)
* pre-norm, residual stream in float32, tied embedding N(0, 0.02): the ladder's.
"""

from __future__ import annotations

from elman_core import Variant
from elman_core.registry import Published

from .config import GDNConfig
from .mixer import GatedDeltaNet
from .op import INSTALL
from .reference import delta_rule_chunked, delta_rule_reference

__all__ = ["GDNConfig", "GatedDeltaNet", "delta_rule_chunked", "delta_rule_reference", "gdn_variant"]


def gdn_variant() -> Variant:
    return Variant(
        name="gdn",
        summary="Gated DeltaNet, a linear matrix state with a delta rule and one decay per head: fla's layer",
        equation="S_t = α_t S_{t-1} + β_t k_t (v_t - α_t S_{t-1}ᵀ k_t)ᵀ,  o_t = S_tᵀ q_t / sqrt(K)",
        config=GDNConfig,
        mixer=GatedDeltaNet,
        presets={"e1": {"expand_v": 1.0}, "predecessor": {"init": "linear"}, "neg_eigval": {"allow_neg_eigval": True}},
        aliases={"fla-gdn": "predecessor"},
        published=(
            Published("gdn@768x20", 95_020_016, "191.6k tok/s", "fla 0.6 on one H200: B = 32, T = 512, bf16 weights"),
            Published("gdn@768x20", 95_020_016, "1.51 nats/byte in steps 1501-2000", "10 min on RTX 6000 Ada, B = 32"),
            Published(
                "gdn:e1@1024x20", 105_717_568, "1.40 nats/byte", "10 min on RTX 6000 Ada, B = 32, last 100 steps"
            ),
        ),
        accelerated_by={"fla": INSTALL},
    )
