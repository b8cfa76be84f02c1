"""E64: a gated update whose value sees the state by plain addition.

    h_t = alpha_t h_{t-1} + (1 - alpha_t) tanh(W_x x_t + h_{t-1} + b)        y_t = h_t silu(h_t)

alpha = sigmoid(W_alpha x + b_alpha), x = silu of the input projection; b_alpha starts at 2, so alpha at 0.88. |h| stays below
1. This is the cheapest nonlinear dependence of the value on the state: it needs no parameter. alpha and 1 - alpha have full
precision, which the published code lost in bfloat16.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.nn import WrapperConfig
from elman_core.registry import Published

from .mixer import E64Mixer
from .op import e64


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e64",
        summary="gated update whose value adds the state to the input before its tanh",
        equation="x = silu(W_in x̂);  h_t = α h_{t-1} + (1-α) tanh(W_x x_t + h_{t-1} + b), α = σ(W_α x_t + b_α),  y = h silu(h)",
        config=WrapperConfig,
        mixer=E64Mixer,
        presets={"e2": {"expansion": 2.0}},
        aliases={"64": "", "additive-h": "", "additive_h": ""},
        kernels=e64.specs(),
        published=(Published("e64:e2@640x20", 98_532_480, "1.492, 1.69 nats/byte, 85-87k tok/s", "10 min, padded"),),
    )
