"""E66: a leaky update whose candidate sees the state through a matrix U V of low rank."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E66Config, E66Mixer
from .op import e66


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e66",
        summary="leaky update towards tanh(U V h + W_x x + b), low rank, y = h silu(h)",
        equation="x = silu(W_in x̂), α = σ(W_α x_t + b_α);  h_t = α h_{t-1} + (1 - α) tanh(U V h_{t-1} + W_x x_t + b),  "
        "y_t = h_t silu(h_t)",
        config=E66Config,
        mixer=E66Mixer,
        presets={"e2": {"expansion": 2.0}, **{f"r{rank}": {"rank": rank} for rank in (16, 64, 128)}},
        aliases={"66": "", "low-rank-h": "", "low_rank_h": ""}
        | {f"{prefix}66r{rank}": f"r{rank}" for prefix in ("", "e") for rank in (16, 64, 128)},
        kernels=e66.specs(),
        published=(
            Published(
                "e66:e2@640x20",
                114_916_480,
                "1.568 and 1.85 nats/byte, 23-28k tok/s",
                "two runs of one setting; padded",
            ),
        ),
    )
