"""E73: a matrix state under tanh, multiplied elementwise by a factor from the input.

    S_t = tanh(diag(z_t) S_{t-1} + k_t v_tᵀ)        z_t = tanh(W_z u_t + b_z)        o_t = S_tᵀ q_t, y_t = o_t silu(o_t)

u = silu(W_in x); q, k, v are products with u. z multiplies by key (column), by value (row, S diag(z)), or by both (full). It is
not a delta rule, although it was called one. The code published as "73cp, with checkpoints" was another model,

    S_t = tanh(S_{t-1} + k_t (v_t - S_{t-1}ᵀ (z_t k_t))ᵀ)        z_t = W_z u_t + b_z, k of length 1

with wrong gradients for lengths that are not a multiple of its segments. It is the form `delta` (73d). Here 73cp means E73,
because all kernels keep segment checkpoints. S has keys as rows, so it is the transpose of the published state.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from . import op
from .mixer import E73Config, E73Mixer


def equation(o: E73Config) -> str:
    new = {
        "column": "diag(z_t) S_{t-1} + k_t v_tᵀ",
        "row": "S_{t-1} diag(z_t) + k_t v_tᵀ",
        "full": "diag(z_t) S_{t-1} diag(z_t) + k_t v_tᵀ",
        "delta": "S_{t-1} + k_t (v_t - S_{t-1}ᵀ (z_t k_t))ᵀ",
    }[o.form]
    z = "W_z u_t + b_z, k_t of length 1" if o.form == "delta" else "tanh(W_z u_t + b_z)"
    return f"S_t = tanh({new}),  z_t = {z},  o_t = S_tᵀ q_t,  y_t = o_t silu(o_t)"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e73",
        summary="tanh matrix state multiplied elementwise by the input, without retrieval",
        equation=equation,
        config=E73Config,
        mixer=E73Mixer,
        presets={
            "n96e2": {"n_state": 96, "expansion": 2.0},
            "row": {"form": "row"},
            "full": {"form": "full"},
            "delta": {"form": "delta"},
        },
        aliases={"73": "", "73c": "", "73cp": "", "73r": "row", "73f": "full", "73d": "delta"},
        kernels=tuple(spec for kernel in (op.column, op.row, op.full, op.delta) for spec in kernel.specs()),
        published=(
            Published(
                "e73:n96e2@1408x20",
                104_020_736,
                "2.14 to 2.20 nats/byte, 15.2k tok/s",
                "10 min, about 560 steps: a figure of speed more than of the model",
            ),
        ),
    )
