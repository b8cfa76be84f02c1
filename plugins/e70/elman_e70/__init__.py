"""E70: a linear matrix memory with one decay, whose output gates itself.

    S_t = λ S_{t-1} + k_t v_tᵀ        o_t = S_tᵀ q_t, y_t = o_t silu(o_t)

u = silu(W_in x); q, k, v are products with u. W_k and W_v are always scaled, also upwards, to a largest singular value of 1/2;
the power iteration runs once per training step, in the published model at every call. λ = 0.9: in the published model, it is a
parameter without a gradient; `train_decay` trains it. S has keys as rows, so it is the transpose of the published state.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E70Config, E70Mixer
from .op import e70


def equation(o: E70Config) -> str:
    decay = "λ learned, 0.9 at the start" if o.train_decay else "λ = 0.9"
    return f"S_t = λ S_{{t-1}} + k_t v_tᵀ, {decay},  o_t = S_tᵀ q_t,  y_t = o_t silu(o_t),  u = silu(W_in x)"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e70",
        summary="linear matrix memory: one decay, outer products, y = o silu(o)",
        equation=equation,
        config=E70Config,
        mixer=E70Mixer,
        presets={
            "n96e2": {"n_state": 96, "expansion": 2.0},
            "n96e2_trained": {"n_state": 96, "expansion": 2.0, "train_decay": True},
        },
        aliases={"70": ""},
        kernels=e70.specs(),
        published=(
            Published(
                "e70:n96e2@1408x20",
                98_612_096,
                "3.68 to 3.79 nats/byte, 3.4k tok/s",
                "10 min, 129 steps: a figure of speed; its own count is 20 higher, for decays that never trained",
            ),
            Published(
                "e70:n96e2_trained@1408x20", 98_612_116, "3.72 nats/byte", "with a faulty schedule of the learning rate"
            ),
        ),
    )
