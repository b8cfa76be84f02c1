"""{{Name}}: a forget gate and a candidate, two products of the state in every step."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.nn import WrapperConfig

from .mixer import {{Name}}Mixer
from .op import {{name}}


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="{{name}}",
        summary="gated unit: two products of the same state in every step",
        equation="x = silu(W_in x̂);  h_t = f_t h_{t-1} + (1 - f_t) c_t,  f_t = σ(W_f x_t + U_f h_{t-1} + b_f),  "
        "c_t = tanh(W_c x_t + U_c h_{t-1} + b_c),  y_t = h_t",
        config=WrapperConfig,
        mixer={{Name}}Mixer,
        kernels={{name}}.specs(),
    )
