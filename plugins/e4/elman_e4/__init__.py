"""E4: a gated Elman network whose recurrent matrix is a product U V of low rank."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E4Config, E4Mixer
from .op import e4


def equation(o: E4Config) -> str:
    size = f",  |U V|₂ = {o.spectral_radius:g}" if o.r_h_mode == "spectral_norm" else ""
    return f"x = silu(u), [u, z] = W_in x̂;  h_t = tanh(W_x x_t + U V h_{{t-1}} + b),  y_t = h_t silu(z_t){size}"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e4",
        summary="low-rank Elman network: tanh recurrence with U V, y = h silu(z)",
        equation=equation,
        config=E4Config,
        mixer=E4Mixer,
        presets={"e15": {"expansion": 1.5, "rank": 64}, "e2": {"expansion": 2.0}, "e4": {"expansion": 4.0}},
        aliases={"4": "", "low-rank": "", "low_rank": ""},
        kernels=e4.specs(),
        published=(
            Published("e4:e15@512x27", 50_596_096, "2.14 nats/byte after 2k steps, 16k tok/s", "gradients were wrong"),
            Published("e4:e2@512x17", 49_178_624, "1.65 nats/byte after 2k steps, 3.5k tok/s", "PyTorch; padded"),
            Published("e4:e4@512x7", 53_364_736, "1.67 nats/byte after 2k steps, 6k tok/s", "PyTorch; padded"),
        ),
    )
