"""Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"): the module of mamba_ssm, parameter for parameter.

    [z, x B C, dt] = W_in u;   x B C ← silu(conv(x B C));   Δ = softplus(dt + b)
    h_t = exp(-exp(A_log) Δ_t) h_{t-1} + Δ_t x_t B_tᵀ,   y_t = h_t C_t + D x_t,   out = W_out RMSNorm(y ⊙ silu(z))

Best practice, and where it comes from (mamba_ssm 2.3, its module and its language model):

* A ~ U(1, 16), softplus(dt_bias) log-uniform in (0.001, 0.1), D = 1, maps and convolution as torch starts them, no biases
  but the convolution's; heads of 64, state 128, convolution of width 4, expand 2, one group.
* the norm after the gate (`norm_before_gate` false) over the whole inner width, epsilon 1e-5.
* its language model divides W_out by the square root of the number of layers at the start: option `init_depth`.
* pre-norm, residual stream in float32, the embedding N(0, 0.02) and tied: the ladder's, and that language model's as well.
* A_log, dt_bias and D stay float32 and are not decayed.
"""

from __future__ import annotations

from elman_core import Variant
from elman_core.registry import Published

from .config import Mamba2Config
from .mixer import Mamba2
from .op import INSTALL
from .reference import ssd_chunked, ssd_reference

__all__ = ["Mamba2", "Mamba2Config", "mamba2_variant", "ssd_chunked", "ssd_reference"]

COUNTED = "its 101,936,528 parameters include 21 · 896 biases of LayerNorms, which the ladder does not have"


def mamba2_variant() -> Variant:
    return Variant(
        name="mamba2",
        summary="Mamba-2, a linear state-space model with one decay per head: mamba_ssm's module",
        equation="h_t = exp(-exp(A_log) Δ_t) h_{t-1} + Δ_t x_t B_tᵀ,  y_t = h_t C_t + D x_t",
        config=Mamba2Config,
        mixer=Mamba2,
        presets={"x20": {"init_depth": 20}, "n64": {"d_state": 64}},
        published=(
            Published(
                "mamba2@896x20", None, "187.8k tok/s", f"mamba_ssm 2.3.2, H200, T = 512, bf16 weights; {COUNTED}"
            ),
            Published("mamba2@896x20", None, "1.40 nats/byte", f"10 min on RTX 6000 Ada, B = 32; {COUNTED}"),
        ),
        accelerated_by={
            "mamba_ssm": INSTALL,
            "causal_conv1d": "pip install causal-conv1d",
        },
    )
