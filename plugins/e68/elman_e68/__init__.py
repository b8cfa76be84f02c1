"""E68: a gated update whose value is gated by the state.

    h_t = alpha_t h_{t-1} + (1 - alpha_t) tanh(W_x x_t + b_v) q_t        y_t = h_t silu(h_t)
    alpha_t = sigmoid(W_alpha x_t + b_alpha)        q_t = sigmoid(delta h_{t-1} + b_g)

x = silu of the input projection; b_alpha starts at 2, delta at 0.5, b_g at 0. |h| stays below 1. The inverse form i closes the
gate of a full channel: q_t = sigmoid(b_g - delta |h_{t-1}|), b_g from 0.5. The oldest texts have q_t = sigmoid(h_{t-1}), which
no published code ran. That code kept alpha in bfloat16, which rounds values above 0.998 to 1, without a gradient; here the
logit is kept, and alpha and 1 - alpha have full precision.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E68Config, E68Mixer
from .op import e68, e68i


def equation(o: E68Config) -> str:
    gate = "b_g - δ |h_{t-1}|" if o.form == "i" else "δ h_{t-1} + b_g"
    return (
        f"x = silu(W_in x̂);  h_t = α_t h_{{t-1}} + (1 - α_t) tanh(W_x x_t + b_v) σ({gate}),  "
        "α_t = σ(W_α x_t + b_α),  y_t = h_t silu(h_t)"
    )


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e68",
        summary="gated update whose value is gated by the state, channel by channel",
        equation=equation,
        config=E68Config,
        mixer=E68Mixer,
        presets={"i": {"form": "i"}, "e2": {"expansion": 2.0}},
        aliases={"68": "", "68s": "", "e68s": "", "68i": "i", "e68i": "i", "self-gating": "", "self_gating": ""},
        kernels=(*e68.specs(), *e68i.specs()),
        published=(
            Published("e68:e2@640x20", 98_583_680, "1.366, 1.44, 1.992 nats/byte, 83-88k tok/s", "10 min, padded"),
        ),
    )
