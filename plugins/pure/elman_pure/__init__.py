"""Pure: an Elman network without an output gate."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl

from .mixer import PureConfig, PureMixer
from .op import pure


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="pure",
        summary="plain Elman network: tanh recurrence, no gate, no spectral norm",
        equation="x = W_in x̂;  h_t = tanh(W_x x_t + W_h h_{t-1} + b),  y_t = h_t",
        config=PureConfig,
        mixer=PureMixer,
        kernels=pure.specs(),
    )
