"""E62: the input decides how much of the state is overwritten.

    h_t = (1 - k_t) h_{t-1} + k_t tanh(W_v x_t + b)        y_t = h_t silu(h_t)
    k_t = sigmoid(W_k x_t + b_k)

x = silu of the input projection; b_k starts at -2, so k at 0.12. |h| stays below 1. Form b decays the state by
sigmoid(W_alpha x_t + b_alpha) as well; form c, which E61 has too, has one map: 1 - k_t = sigmoid(W x_t + b), value
tanh(W x_t + b). The published code ran every forward twice and kept k in bfloat16; here k and 1 - k have full precision.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E62Config, E62Mixer
from .op import e62, e62b


def equation(o: E62Config) -> str:
    kept = "α_t (1 - k_t)" if o.form == "b" else "(1 - k_t)"
    value, gate = ("W", "W x_t + b") if o.form == "c" else ("W_v", "W_k x_t + b_k")
    decay = ", α_t = σ(W_α x_t + b_α)" if o.form == "b" else ""
    new = f"{kept} h_{{t-1}} + k_t tanh({value} x_t + b)"
    return f"x = silu(W_in x̂);  h_t = {new},  k_t = σ({gate}){decay},  y = h silu(h)"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e62",
        summary="selective write: the input decides how much of the state is overwritten with a bounded value",
        equation=equation,
        config=E62Config,
        mixer=E62Mixer,
        presets={"b": {"form": "b"}, "c": {"form": "c"}, "e2": {"expansion": 2.0}},
        aliases={
            "62": "",
            "62b": "b",
            "62c": "c",
            "e62b": "b",
            "e62c": "c",
            "selective-write": "",
            "selective_write": "",
        },
        kernels=(*e62.specs(), *e62b.specs()),
        published=(Published("e62:e2@640x20", 98_532_480, "1.372, 1.78 nats/byte, 81k tok/s", "10 min, padded"),),
    )
