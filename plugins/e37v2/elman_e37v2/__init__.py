"""E37v2: a self-gated Elman network with one matrix for input and recurrence."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.nn import RecurrentMatrixConfig
from elman_core.registry import Published

from .mixer import E37v2Mixer
from .op import e37v2


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e37v2",
        summary="tied self-gated Elman network: one matrix, tanh recurrence, y = h silu(h)",
        equation="x = silu(W_in x̂);  h_t = tanh(W x_t + W h_{t-1} + b),  y_t = h_t silu(h_t)",
        config=RecurrentMatrixConfig,
        mixer=E37v2Mixer,
        aliases={"37v2": "", "37": "", "e37": "", "tied-weights": "", "tied_weights": ""},
        kernels=e37v2.specs(),
        published=(
            Published(
                "e37v2@1280x6", 29_835_520, "1.576 nats/byte, 121k tok/s", "10 min, batch 32; padding in the loss"
            ),
        ),
    )
