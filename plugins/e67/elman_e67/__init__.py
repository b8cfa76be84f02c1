"""E67: a gated update whose gate sees the state, and whose value does not.

    h_t = alpha_t h_{t-1} + (1 - alpha_t) tanh(W_x x_t + b_v)        y_t = h_t silu(h_t)
    alpha_t = sigmoid(W_alpha x_t + delta h_{t-1} + b_alpha)

x = silu of the input projection; b_alpha starts at 2, so alpha at 0.88, delta at 0.1. |h| stays below 1. alpha and 1 -
alpha have full precision: the published code kept alpha in bfloat16, which rounds values above 0.998 to 1, without a gradient.
e67lr replaces delta h_{t-1} by U V h_{t-1}, of rank d/8: channels see each other, and the loop contains a product.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.nn import WrapperConfig
from elman_core.registry import Published

from .mixer import E67lrConfig, E67lrMixer, E67Mixer
from .op import e67, e67lr


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e67",
        summary="gated update whose gate sees the state: each channel's value decides how long it stays",
        equation="x = silu(W_in x̂);  h_t = α_t h_{t-1} + (1 - α_t) tanh(W_x x_t + b_v),  "
        "α_t = σ(W_α x_t + δ h_{t-1} + b_α),  y_t = h_t silu(h_t)",
        config=WrapperConfig,
        mixer=E67Mixer,
        presets={"e2": {"expansion": 2.0}},
        aliases={"67": "", "67d": "", "e67d": "", "h-gated": "", "h_gated": ""},
        kernels=e67.specs(),
        published=(
            Published("e67:e2@640x20", 98_558_080, "1.362, 1.52 nats/byte, 81-84k tok/s", "10 min, padded: rough"),
        ),
    )
    yield Variant(
        name="e67lr",
        summary="e67 with a low-rank matrix between the state and the gate",
        equation="x = silu(W_in x̂);  h_t = α_t h_{t-1} + (1 - α_t) tanh(W_x x_t + b_v),  "
        "α_t = σ(W_α x_t + U V h_{t-1} + b_α),  y_t = h_t silu(h_t)",
        config=E67lrConfig,
        mixer=E67lrMixer,
        presets={"e2": {"expansion": 2.0}},
        aliases={"67lr": ""},
        kernels=e67lr.specs(),
    )
