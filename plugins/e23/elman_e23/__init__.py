"""E23: an Elman network beside a tape, which it reads and writes by dot-product attention.

    r_t = softmax(M_{t-1} h_{t-1} / √I)       h_t = tanh(W_x x_t + W_h h_{t-1} + rᵀ M_{t-1} + b)
    a_t = softmax(M_{t-1} h_t / √I)           M_t[n] = (1 - a_n) M_{t-1}[n] + a_n W_w h_t       y_t = h_t silu(z_t)

x is silu of the first half of the input projection, z its second half as it is. From a tape of zeros the slots never differ:
every weight of the attention is 1 / N for ever, and the tape is one leaky vector. `tape_init="learned"` starts from a learned
tape instead.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E23Config, E23Mixer
from .op import KERNEL


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e23",
        summary="Elman network that reads and writes a tape by attention, with a split output gate",
        equation="x = silu(u), [u, z] = W_in x̂;  h_t = tanh(W_x x_t + W_h h_{t-1} + softmax(M h_{t-1} / √I)ᵀ M + b),  "
        "a = softmax(M h_t / √I),  M ← (1 - a) M + a W_w h_t,  y_t = h_t silu(z_t)",
        config=E23Config,
        mixer=E23Mixer,
        kernels=KERNEL.specs(),
        presets={
            "published": {"expansion": 1.5},
            "learned": {"tape_init": "learned"},
            **{f"n{n}": {"slots": n} for n in (32, 128)},
        },
        recommended="learned",
        aliases={"23": "", "dual-memory": "", "dual_memory": ""}
        | {f"{prefix}23n{n}": f"n{n}" for prefix in ("", "e") for n in (32, 128)},
        published=(
            Published(
                "e23:published@512x17",
                50_288_384,
                "1.84 nats/byte, 31.5k tok/s",
                "10 min, 577 steps; W_h and W_w followed transposed gradients, and the slots never differed",
            ),
        ),
    )
