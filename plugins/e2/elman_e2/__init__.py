"""E2: independent Elman networks side by side, the slots, behind one output gate.

    h_t^s = tanh(W_x^s x_t + W_h^s h_{t-1}^s + b^s)        y_t = (sum_s C_s h_t^s) silu(z_t)

x is silu of the first half of the input projection; z is the second half. Each slot has its own weights. The predecessor's
slots shared W_h and b and started from zero, so they never differed: n slots were one cell with n times the work.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E2Config, E2Mixer
from .op import e2


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e2",
        summary="independent Elman slots, mixed linearly, behind a split output gate",
        equation="x = silu(u), [u, z] = W_in x̂;  h_t^s = tanh(W_x^s x_t + W_h^s h_{t-1}^s + b^s),  "
        "y_t = (Σ_s C_s h_t^s) silu(z_t)",
        config=E2Config,
        mixer=E2Mixer,
        kernels=e2.specs(),
        aliases={"2": "", "slot": "", "slot_elman": ""},
        published=(
            Published(
                "e2@512x21",
                None,
                "1.870 and 1.668 nats/byte after 500 and 2,000 steps, 20-21k tok/s",
                "of slots that shared their weights, and so one cell; expansion 1.5, 49.7M parameters",
            ),
        ),
    )
