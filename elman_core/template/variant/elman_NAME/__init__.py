"""{{Name}}: h_t = tanh(W h_{t-1} + V x_t + b), y_t = h_t."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl

from .mixer import {{Name}}Config, {{Name}}Mixer, param_count
from .op import {{name}}


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="{{name}}",
        summary="Elman network: tanh recurrence, the state is the output",
        equation="h_t = tanh(W h_{t-1} + V x_t + b),  y_t = h_t",
        config={{Name}}Config,
        mixer={{Name}}Mixer,
        param_count=param_count,
        kernels=({{name}}.spec(),),
    )
