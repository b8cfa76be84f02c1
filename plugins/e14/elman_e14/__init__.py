"""E14: an Elman network whose state is a matrix, written by outer products and linear in itself.

    H_t = diag(a_t) H_{t-1} + κ_t v_tᵀ        y_t = (H_t q_t) silu(z_t)

[u, z] = W_in x, u through SiLU; κ = tanh(W_key u + b), v = W_val u + b, q = W_query u + b, a = σ(W_decay u + b), there b = 3.
H has as many rows as the inner width and `d_state` columns, by default equally many. The published runs kept this default, and
ran out of memory at the size of the others. Here H is stored transposed, in blocks of at most 128 columns.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E14Config, E14Mixer
from .op import e14


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e14",
        summary="Elman network with a matrix state: outer products, one decay per row, output gate",
        equation="H_t = diag(σ(W_decay u_t + b)) H_{t-1} + tanh(W_key u_t + b) v_tᵀ,  y_t = H_t q_t silu(z_t),  v, q = W u + b",
        config=E14Config,
        mixer=E14Mixer,
        presets={"e2": {"expansion": 2.0}, "k16": {"d_state": 16}, "k32": {"d_state": 32}},
        aliases={"14": ""},
        kernels=e14.specs(),
        published=(
            Published(
                "e14@512x11", 20_344_832, "5.7k tok/s, 17.4 GB", "B = 16, T = 512; the size is a guess from its 20.3M"
            ),
            Published("e14:e2@640x20", 180_503_680, "out of memory", "its count is in a log"),
        ),
    )
