"""E61: an input-driven gate decays the state, and a value fills in what the gate removes.

    h_t = alpha_t h_{t-1} + (1 - alpha_t) v_t        y_t = h_t silu(h_t)
    alpha_t = sigmoid(W_alpha x_t + b_alpha)         v_t = W_v x_t + b

x = silu of the input projection; b_alpha starts at 2, so alpha at 0.88. It is linear in the state, and v is unbounded; form
tanh bounds it. Form b adds the whole v, so the state is unbounded too; form c has one map for alpha and a bounded v. The
published code kept alpha in bfloat16, which rounds values above 0.998 to 1, without a gradient; here alpha and 1 - alpha have
full precision.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E61Config, E61Mixer
from .op import e61, e61_tanh, e61b


def equation(o: E61Config) -> str:
    value = "W x_t + b" if o.form == "c" else "W_v x_t + b"
    value = f"tanh({value})" if o.form in ("c", "tanh") else f"({value})"
    new = "α h_{t-1} + W_v x_t + b" if o.form == "b" else f"α h_{{t-1}} + (1 - α) {value}"
    gate = "W x_t + b" if o.form == "c" else "W_α x_t + b_α"
    return f"x = silu(W_in x̂);  h_t = {new},  α = σ({gate}),  y_t = h_t silu(h_t)"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e61",
        summary="decay gate: the input decides how much of the state is kept; a linear value fills the rest",
        equation=equation,
        config=E61Config,
        mixer=E61Mixer,
        presets={
            "b": {"form": "b"},
            "c": {"form": "c"},
            "tanh": {"form": "tanh"},
            "e2": {"expansion": 2.0},
        },
        aliases={"61": "", "61b": "b", "61c": "c", "e61b": "b", "e61c": "c", "decay-gated": "", "decay_gated": ""},
        kernels=(*e61.specs(), *e61b.specs(), *e61_tanh.specs()),
        published=(
            Published(
                "e61:e2@640x20", 98_532_480, "1.351, 1.706, 1.76 nats/byte, 81-88k tok/s", "10 min, padded: rough"
            ),
        ),
    )
