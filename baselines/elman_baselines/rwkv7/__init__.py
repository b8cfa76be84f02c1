"""RWKV-7 (Peng et al. 2025): the time mixing of flash-linear-attention's layer, parameter for parameter.

    S_t = diag(w_t) S_{t-1} - (a_t ⊙ κ_t) (S_{t-1}ᵀ κ_t)ᵀ + k_t v_tᵀ,   o_t = S_tᵀ r_t
    y = W_o ((GroupNorm(o) + (r · (r_k ⊙ k)) v) ⊙ g)

Each input of a map is x + x_n ⊙ (x_{t-1} - x). r, k', v = W x; κ = k' ⊙ k_k, of length 1 in each head;
k = k' ⊙ (1 + (a - 1) ⊙ k_a); w = exp(-exp(-1/2) sigmoid(B_w tanh(A_w x) + b_w)), a = sigmoid(B_a A_a x + b_a),
g = B_g sigmoid(A_g x).

Two parts of the published model are not here: the values of the first layer, which later layers mix into their own, since a
layer sees its own input alone (every layer is as fla's first), and its channel mixing; `--set model.mlp_ratio=…` puts a SwiGLU
in its place. Initialisation as in fla 0.6, which follows the authors' code.
"""

from __future__ import annotations

from elman_core import Variant

from .mixer import RWKV7, RWKV7Config
from .op import INSTALL, dplr

__all__ = ["RWKV7", "RWKV7Config", "rwkv7_variant"]


def rwkv7_variant() -> Variant:
    return Variant(
        name="rwkv7",
        summary="RWKV-7's time mixing, a linear matrix state, diagonal plus low rank: fla's layer",
        equation="S_t = diag(w_t) S_{t-1} - (a_t ⊙ κ_t) (S_{t-1}ᵀ κ_t)ᵀ + k_t v_tᵀ,  o_t = S_tᵀ r_t",
        config=RWKV7Config,
        mixer=RWKV7,
        kernels=dplr.specs(),
        accelerated_by={"fla": INSTALL},
    )
