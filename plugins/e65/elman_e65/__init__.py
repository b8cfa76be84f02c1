"""E65: a gated update whose value sees the state through one learned factor per channel.

    h_t = alpha_t h_{t-1} + (1 - alpha_t) tanh(W_x x_t + delta h_{t-1} + b)        y_t = h_t silu(h_t)
    alpha_t = sigmoid(W_alpha x_t + b_alpha)

x = silu of the input projection; b_alpha starts at 2, so alpha at 0.88, delta at 0.5. |h| stays below 1. alpha and 1 -
alpha have full precision: the published code kept alpha in bfloat16, which rounds values above 0.998 to 1, without a gradient.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.nn import WrapperConfig
from elman_core.registry import Published

from .mixer import E65Mixer
from .op import e65


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e65",
        summary="gated update whose value scales the state channel by channel before its tanh",
        equation="x = silu(W_in x̂);  h_t = α_t h_{t-1} + (1 - α_t) tanh(W_x x_t + δ h_{t-1} + b),  "
        "α_t = σ(W_α x_t + b_α),  y_t = h_t silu(h_t)",
        config=WrapperConfig,
        mixer=E65Mixer,
        presets={"e2": {"expansion": 2.0}},
        aliases={"65": "", "diagonal-h": "", "diagonal_h": ""},
        kernels=e65.specs(),
        published=(
            Published("e65:e2@640x20", 98_558_080, "1.409, 1.63 nats/byte, 88-90k tok/s", "10 min, padded: rough"),
        ),
    )
