"""`x_gated`: an Elman network gated by the input of its cell; `x_gated_proj` projects that input once more."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl

from .mixer import XGatedConfig, XGatedMixer
from .op import x_gated


def equation(o: XGatedConfig) -> str:
    gate = "W_g x_t + b_g" if o.gate == "projected" else "x_t + b_g"
    return f"x = W_in x̂;  h_t = tanh(W_x x_t + W_h h_{{t-1}} + b),  y_t = h_t silu({gate})"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="x_gated",
        summary="Elman network gated by its input: tanh recurrence, y = h silu(x + b_g)",
        equation=equation,
        config=XGatedConfig,
        mixer=XGatedMixer,
        presets={"proj": {"gate": "projected"}},
        aliases={"x_gated_proj": "proj"},
        kernels=x_gated.specs(),
    )
