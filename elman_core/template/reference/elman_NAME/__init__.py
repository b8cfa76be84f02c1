"""{{Name}}: a leaky integrator for each channel, in plain PyTorch."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.nn import WrapperConfig

from .mixer import {{Name}}Mixer


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="{{name}}",
        summary="leaky integrator in plain PyTorch, without a kernel",
        equation="x = silu(W_in x̂);  h_t = a h_{t-1} + (1 - a) x_t,  a = σ(λ),  y_t = tanh(h_t)",
        config=WrapperConfig,
        mixer={{Name}}Mixer,
    )
