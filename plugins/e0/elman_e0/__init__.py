"""E0: the stock Elman network, gated by its state and its input together; `wgate`: by a projection of the input."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E0Config, E0Mixer
from .op import e0, e0_wgate


def equation(o: E0Config) -> str:
    gate = "W_g x_t + b_g" if o.gate == "projected" else "h_t + x_t + b_g"
    return f"x = W_in x̂;  h_t = tanh(W_x x_t + W_h h_{{t-1}} + b),  y_t = h_t silu({gate})"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e0",
        summary="stock Elman network: tanh recurrence, y = h silu(h + x + b_g)",
        equation=equation,
        config=E0Config,
        mixer=E0Mixer,
        presets={"wgate": {"gate": "projected"}, "wgate_e15": {"gate": "projected", "expansion": 1.5}},
        aliases={"0": "", "stock": "", "stock_elman": "", "e0_wgate": "wgate"},
        kernels=(*e0.specs(), *e0_wgate.specs()),
        published=(
            Published(
                "e0:wgate_e15@512x19",
                48_732_672,
                "1.839, 1.635 and 1.622 nats/byte after 500, 1k and 2k steps, 45-48k tok/s",
                "batch 32; with LayerNorm, 48,742,912 parameters; padding in the loss",
            ),
        ),
    )
