"""E42: a linear Elman network with one matrix for input and recurrence, gated by itself.

    h_t = W x_t + W h_{t-1} + b        y_t = h_t silu(h_t)

x = silu of the input projection. W is spectrally normalised to 0.999: no tanh bounds the state.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E42Config, E42Mixer, param_count, validate
from .op import dense, one_step, tied


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e42",
        summary="linear tied self-gated Elman network: one matrix, no tanh, y = h silu(h)",
        equation="h_t = W x_t + W h_{t-1} + b,  y_t = h_t silu(h_t)",
        config=E42Config,
        mixer=E42Mixer,
        presets={
            "demo": {"use_conv": True},
            "radius099": {"spectral_radius": 0.99},
            "mamba2_init": {"mamba2_init": True},
        },
        aliases={"42": "", "linear-tied": "", "linear_tied": ""},
        param_count=param_count,
        validate=validate,
        kernels=(dense.spec(), tied.spec(), one_step.spec()),
        published=(
            Published("1536x6, 42,880,512", "1.59 nats/byte, 137k tok/s", "10 min, batch 32, preset radius099"),
            Published("1280x6, 29,835,520", "1.597 nats/byte, 141k tok/s", "10 min, batch 32, preset radius099"),
            Published("768x20 e2, 94,615,296", "1.485 to 1.670 nats/byte, 45-50k tok/s", "three runs of one setting"),
        ),
    )
