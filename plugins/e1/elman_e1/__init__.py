"""E1: an Elman network with an output gate that the input drives.

    h_t = tanh(W_x x_t + W_h h_{t-1} + b)        y_t = h_t silu(z_t)

x is silu of the first half of the input projection; z is the second half. W_h is spectrally normalised to 0.99.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.nn import RecurrentMatrixConfig
from elman_core.registry import Published

from .mixer import E1Mixer
from .op import e1


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e1",
        summary="Elman network with a split output gate: tanh recurrence, y = h silu(z)",
        equation="x = silu(u), [u, z] = W_in x̂;  h_t = tanh(W_x x_t + W_h h_{t-1} + b),  y_t = h_t silu(z_t)",
        config=RecurrentMatrixConfig,
        mixer=E1Mixer,
        presets={"demo": {"use_conv": True}, "e2": {"expansion": 2.0}, "mamba2_init": {"mamba2_init": True}},
        aliases={"1": "", "mamba-gated": "", "mamba_gated": "", "gated_elman": ""},
        kernels=e1.specs(),
        published=(
            Published("e1@1280x6", 49_496_320, "1.41 nats/byte, 201.6k tok/s", "10 min, batch 64, random offsets"),
            Published("e1@1280x6", 49_496_320, "1.614 nats/byte, 142k tok/s", "10 min, batch 32; padding in the loss"),
            Published("e1:e2@640x20", 114_890_880, "1.466 and 1.58 nats/byte, 45k tok/s", "two runs of one setting"),
        ),
    )
