"""E63: a leaky update whose candidate is an Elman network's; forms a (the default), b, c and d."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E63Config, E63Mixer
from .op import KERNELS


def equation(o: E63Config) -> str:
    back = {"c": (" + U_α h_{t-1}", " + U_β h_{t-1}")}.get(o.form, ("", ""))
    alpha, beta = f"α = σ(W_α x_t{back[0]} + b_α)", f", β = σ(W_β x_t{back[1]} + b_β)" if o.form in ("b", "c") else ""
    new = {"a": "α h_{t-1} + (1 - α) v", "d": "h_{t-1} + α v"}.get(o.form, "α h_{t-1} + β v")
    v = "v = tanh(W_h h_{t-1} + W_x x_t + b)"
    return f"x = silu(W_in x̂), {alpha}{beta}, {v};  h_t = {new},  y_t = h_t silu(h_t)"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e63",
        summary="nonlinear delta: leaky update towards tanh(W h + W_x x + b), y = h silu(h)",
        equation=equation,
        config=E63Config,
        mixer=E63Mixer,
        presets={**{form: {"form": form} for form in "bcd"}, "e2": {"expansion": 2.0}},
        aliases={"63": "", "63a": "", "e63a": "", "nonlinear-delta": "", "nonlinear_delta": ""}
        | {f"{prefix}63{form}": form for prefix in ("", "e") for form in "bcd"},
        kernels=tuple(spec for kernel in KERNELS.values() for spec in kernel.specs()),
        published=(
            Published(
                "e63:e2@512x20", 84_068_864, "1.440 and 1.77 nats/byte, 53-59k tok/s", "two runs of one setting; padded"
            ),
        ),
    )
