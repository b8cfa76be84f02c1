"""E72: an averaging matrix memory in which the retrieved value gates the new value.

    r_t = S_{t-1}ᵀ k_t        g_t = σ(d_g r_t + b_g)        a_t = σ(W_α u_t + b_α)
    S_t = S_{t-1} diag(a_t) + k_t ((1 - a_t) g_t v_t)ᵀ        o_t = S_tᵀ q_t, y_t = o_t silu(o_t)

u = silu(W_in x); q, k and v are products with u. The inverse form has g_t = σ(-d_g |r_t| + b_g). Keys can have any length,
so r and S can grow: two published sweeps ended in NaN. `unit_keys` gives keys length 1. The gradients of the first runs used v
instead of g v. S has keys as rows, so it is the transpose of the published state.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E72Config, E72Mixer
from .op import e72


def equation(o: E72Config) -> str:
    g, keys = "-d_g |r|" if o.inverse else "d_g r", ",  k_t of length 1" if o.unit_keys else ""
    return (
        f"r = S_{{t-1}}ᵀ k_t,  g = σ({g} + b_g),  a = σ(W_α u_t + b_α),  "
        f"S_t = S_{{t-1}} diag(a) + k_t ((1 - a) g v_t)ᵀ{keys}"
    )


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e72",
        summary="averaging matrix memory whose values are gated by the retrieved value",
        equation=equation,
        config=E72Config,
        mixer=E72Mixer,
        presets={
            "n96e2": {"n_state": 96, "expansion": 2.0},
            "inverse": {"inverse": True},
            "unit_keys": {"unit_keys": True},
        },
        recommended="unit_keys",
        aliases={"72": "", "72s": "", "72i": "inverse"},
        kernels=e72.specs(),
        published=(
            Published(
                "e72:n96e2@1408x20",
                104_024_576,
                "2.74 or 2.55 nats/byte, 8.5k tok/s",
                "10 min, about 300 steps, faulty learning rate and perhaps gradients: a figure of speed; later NaN twice",
            ),
        ),
    )
