"""{{Name}}: h_t = tanh(W_x x_t + W_h h_{t-1} + b), y_t = h_t."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.nn import RecurrentMatrixConfig

from .mixer import {{Name}}Mixer
from .op import {{name}}


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="{{name}}",
        summary="Elman network: tanh recurrence, the state is the output",
        equation="x = silu(W_in x̂);  h_t = tanh(W_x x_t + W_h h_{t-1} + b),  y_t = h_t",
        config=RecurrentMatrixConfig,
        mixer={{Name}}Mixer,
        kernels={{name}}.specs(),
    )
