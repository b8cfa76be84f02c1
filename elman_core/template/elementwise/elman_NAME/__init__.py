"""{{Name}}: a gated update without a product in the loop, channel by channel."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.nn import WrapperConfig

from .mixer import {{Name}}Mixer
from .op import {{name}}


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="{{name}}",
        summary="gated update, channel by channel",
        equation="x = silu(W_in x̂);  h_t = f_t h_{t-1} + (1 - f_t) tanh(W_c x_t + r h_{t-1} + b_c),  "
        "f_t = σ(W_f x_t + b_f),  y_t = h_t",
        config=WrapperConfig,
        mixer={{Name}}Mixer,
        kernels={{name}}.specs(),
    )
