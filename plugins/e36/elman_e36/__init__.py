"""E36: a linear Elman network, gated by itself."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E36Config, E36Mixer
from .op import e36


def equation(o: E36Config) -> str:
    size = f",  |W_h|₂ = {o.spectral_radius:g}" if o.r_h_mode == "spectral_norm" else ""
    return f"x = silu(W_in x̂);  h_t = W_x x_t + W_h h_{{t-1}} + b,  y_t = h_t silu(h_t){size}"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e36",
        summary="linear self-gated Elman network: no tanh, y = h silu(h)",
        equation=equation,
        config=E36Config,
        mixer=E36Mixer,
        aliases={"36": "", "linear-recurrence": "", "linear_recurrence": ""},
        kernels=e36.specs(),
        published=(
            Published("e36@1280x6", 39_665_920, "1.630 nats/byte, 138k tok/s", "10 min, batch 32; padding in the loss"),
        ),
    )
