"""E42: a linear Elman network with one matrix for input and recurrence, gated by itself.

    h_t = W x_t + W h_{t-1} + b        y_t = h_t silu(h_t)

x = silu of the input projection. W is spectrally normalised to 0.999: no tanh bounds the state.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E42Config, E42Mixer
from .op import e42


def equation(o: E42Config) -> str:
    size = f",  |W|₂ = {o.spectral_radius:g}" if o.r_h_mode == "spectral_norm" else ""
    return f"x = silu(W_in x̂);  h_t = W x_t + W h_{{t-1}} + b,  y_t = h_t silu(h_t){size}"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e42",
        summary="linear tied self-gated Elman network: one matrix, no tanh, y = h silu(h)",
        equation=equation,
        config=E42Config,
        mixer=E42Mixer,
        presets={
            "demo": {"use_conv": True},
            "radius099": {"spectral_radius": 0.99},
            "e2": {"expansion": 2.0},
            "mamba2_init": {"mamba2_init": True},
        },
        aliases={"42": "", "linear-tied": "", "linear_tied": ""},
        kernels=e42.specs(),
        published=(
            Published("e42:radius099@1536x6", 42_880_512, "1.59 nats/byte, 137k tok/s", "10 min, batch 32"),
            Published("e42:radius099@1280x6", 29_835_520, "1.597 nats/byte, 141k tok/s", "10 min, batch 32"),
            Published(
                "e42:e2@768x20", 94_615_296, "1.485 to 1.670 nats/byte, 45-50k tok/s", "three runs of one setting"
            ),
        ),
    )
