"""E71: an averaging matrix memory. The retrieved value moves the gate between the old column and the new one.

    r_t = S_{t-1}ᵀ k_t        a_t = σ(W_α u_t + d_α r_t + b_α)
    S_t = S_{t-1} diag(a_t) + k_t ((1 - a_t) v_t)ᵀ        o_t = S_tᵀ q_t, y_t = o_t silu(o_t)

u = silu(W_in x); q, k and v are products with u. It is not a delta rule, although it was called one. Keys can have any
length, so r and S can grow: two published sweeps ended in NaN. `unit_keys` gives keys length 1. S has keys as rows, so it is
the transpose of the published state.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E71Config, E71Mixer
from .op import e71


def equation(o: E71Config) -> str:
    keys = ",  k_t of length 1" if o.unit_keys else ""
    return f"r = S_{{t-1}}ᵀ k_t,  a = σ(W_α u_t + d_α r + b_α),  S_t = S_{{t-1}} diag(a) + k_t ((1 - a) v_t)ᵀ{keys}"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e71",
        summary="averaging matrix memory with one gate per column, moved by the retrieved value",
        equation=equation,
        config=E71Config,
        mixer=E71Mixer,
        presets={"n96e2": {"n_state": 96, "expansion": 2.0}, "unit_keys": {"unit_keys": True}},
        aliases={"71": ""},
        kernels=e71.specs(),
        published=(
            Published(
                "e71:n96e2@1408x20",
                104_022_656,
                "2.51 nats/byte, 8.6k tok/s",
                "10 min, about 300 steps and a faulty learning rate: a figure of speed; NaN in two later sweeps",
            ),
        ),
    )
