"""E1: an Elman network with an output gate that the input drives.

    h_t = tanh(W_x x_t + W_h h_{t-1} + b)        y_t = h_t silu(z_t)

x = silu of the first half of the input projection, z the second half as it is. W_h is spectrally normalised to 0.99.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E1Config, E1Mixer, param_count, validate
from .op import dense, one_step


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e1",
        summary="Elman network with a split output gate: tanh recurrence, y = h silu(z)",
        equation="h_t = tanh(W_x x_t + W_h h_{t-1} + b),  y_t = h_t silu(z_t)",
        config=E1Config,
        mixer=E1Mixer,
        presets={"demo": {"use_conv": True}, "e2": {"expansion": 2.0}, "mamba2_init": {"mamba2_init": True}},
        aliases={"1": "", "mamba-gated": "", "mamba_gated": "", "gated_elman": ""},
        param_count=param_count,
        validate=validate,
        kernels=(dense.spec(), one_step.spec()),
        published=(
            Published(
                "1280x6, 49,496,320", "1.41 nats/byte, 201.6k tok/s", "10 min, batch 64, random offsets, 50M class"
            ),
            Published(
                "1280x6, 49,496,320", "1.614 nats/byte, 142k tok/s", "10 min, batch 32; padding in the mean loss"
            ),
            Published("640x20 e2, 114,890,880", "1.466 and 1.58 nats/byte, 45k tok/s", "two runs of one setting"),
        ),
    )
