"""E34: an Elman network whose recurrent matrix is diagonal, gated by itself.

    h_t = tanh(W_x x_t + clamp(delta, -0.99, 0.99) h_{t-1} + b)        y_t = h_t silu(h_t)

x = silu of the input projection; delta starts in [0.9, 0.99]. A channel whose delta passes 0.99 gets no gradient and stays
there. `bound=tanh` (preset tanh) uses tanh(delta) instead of the clamp; it starts at the same values and always has a gradient.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E34Config, E34Mixer
from .op import e34


def equation(o: E34Config) -> str:
    delta = "tanh(δ)" if o.bound == "tanh" else "clamp(δ, ±0.99)"
    return f"x = silu(W_in x̂);  h_t = tanh(W_x x_t + {delta} h_{{t-1}} + b),  y_t = h_t silu(h_t)"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e34",
        summary="self-gated Elman network with a diagonal recurrence: tanh, y = h silu(h)",
        equation=equation,
        config=E34Config,
        mixer=E34Mixer,
        presets={"tanh": {"bound": "tanh"}, "e2": {"expansion": 2.0}, "mamba2_init": {"mamba2_init": True}},
        aliases={"34": "", "diagonal-w_h": "", "diagonal_w_h": ""},
        kernels=e34.specs(),
        published=(Published("e34@1280x6", 29_843_200, "1.769 nats/byte, 253k tok/s", "10 min; padding in the loss"),),
    )
