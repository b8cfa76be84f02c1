"""E33: an Elman network whose state gates its own output."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.nn import RecurrentMatrixConfig
from elman_core.registry import Published

from .mixer import E33Mixer
from .op import e33


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e33",
        summary="self-gated Elman network: tanh recurrence, y = h silu(h)",
        equation="x = silu(W_in x̂);  h_t = tanh(W_x x_t + W_h h_{t-1} + b),  y_t = h_t silu(h_t)",
        config=RecurrentMatrixConfig,
        mixer=E33Mixer,
        aliases={"33": "", "self-gate": "", "self_gate": ""},
        kernels=e33.specs(),
        published=(
            Published(
                "e33@1280x6",
                39_665_920,
                "1.600 to 1.665 nats/byte, 116-152k tok/s",
                "three runs of one setting; padded",
            ),
        ),
    )
