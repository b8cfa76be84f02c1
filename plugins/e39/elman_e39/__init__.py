"""E39: a self-gated Elman network whose only parameter is its recurrent matrix; E38 is E39 with a bias."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E39Config, E39Mixer
from .op import e39


def equation(o: E39Config) -> str:
    return f"x = silu(W_in x̂);  h_t = tanh(x_t + W_h h_{{t-1}}{' + b' if o.bias else ''}),  y_t = h_t silu(h_t)"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e39",
        summary="self-gated Elman network without input matrix and bias: y = h silu(h)",
        equation=equation,
        config=E39Config,
        mixer=E39Mixer,
        presets={"e38": {"bias": True}},
        aliases={"39": "", "no-bias": "", "no_bias": "", "38": "e38"},
        kernels=e39.specs(),
        published=(
            Published("e39@1280x6", 29_827_840, "1.667 nats/byte, 145k tok/s", "10 min, batch 32; padding in the loss"),
        ),
    )
