"""A plain modern decoder: each layer is causal attention with rotary positions, then a SwiGLU.

    a = x + W_o softmax(q kᵀ / sqrt(d_h)) v,   y = a + W_down (silu(W_gate n) · (W_up n))

Best practice, and where it comes from:

* pre-norm with RMSNorm, rotary positions, SwiGLU, no biases: Touvron et al. 2023 (LLaMA); Su et al. 2021; Shazeer 2020. The
  width of the SwiGLU is 8/3 of the model's, rounded up to a multiple of `mlp_multiple`; heads are 64 wide.
* all maps start as N(0, 0.02), as in GPT-2 and in transformers' LLaMA; with `init_depth` the two that write to the residual
  stream are divided by sqrt(2 init_depth), GPT-2's rule (Radford et al. 2019), where it is the number of layers.
* the residual stream and the norms are float32, products bfloat16 under autocast; angles and rotation are float32.
* attention is torch's scaled_dot_product_attention, which is FlashAttention on a GPU. `torch.compile` doubles the speed there.
"""

from __future__ import annotations

from elman_core import Variant
from elman_core.nn import SwiGLU
from elman_core.registry import Published

from .attention import Attention
from .config import TransformerConfig

__all__ = ["Attention", "SwiGLU", "TransformerConfig", "transformer_variant"]


def transformer_variant() -> Variant:
    return Variant(
        name="transformer",
        summary="plain modern decoder: causal attention with rotary positions, then SwiGLU",
        equation="a = x + W_o softmax(q kᵀ / sqrt(d_h)) v\ny = a + W_down (silu(W_gate a) · (W_up a))",
        config=TransformerConfig,
        mixer=(Attention, SwiGLU),
        presets={"x20": {"init_depth": 20}, "narrow_x20": {"init_depth": 20, "mlp_ratio": 2.6, "mlp_multiple": 64}},
        published=(
            Published(
                "transformer:narrow_x20@640x20",
                96_855_680,
                "254.7k tok/s eager, 491.2k tok/s compiled",
                "transformers' LLaMA of this shape on one H200: B = 32, T = 512, bf16 weights, whole training step",
            ),
        ),
    )
