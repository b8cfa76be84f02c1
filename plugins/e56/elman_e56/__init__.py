"""E56: a gated Elman network with one matrix for input and state side by side; E1's function without its spectral norm."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E56Config, E56Mixer
from .op import e56


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e56",
        summary="concatenated Elman network: tanh recurrence of W [x; h], y = h silu(z)",
        equation="x = silu(u), [u, z] = W_in x̂;  h_t = tanh(W [x_t; h_{t-1}] + b),  y_t = h_t silu(z_t)",
        config=E56Config,
        mixer=E56Mixer,
        presets={"e2": {"expansion": 2.0}},
        aliases={"56": "", "concat": "", "concat_elman": ""},
        kernels=e56.specs(),
        published=(
            Published(
                "e56:e2@640x20", 114_890_880, "1.450, 1.575 and 1.63 nats/byte, 39-41k tok/s", "three runs; padded"
            ),
        ),
    )
