"""E97: E88 with separate gates for erasing and writing ("split edit").

    S_t = tanh(λ_t S_{t-1} + k_t (w_t v_t - S_{t-1}ᵀ (b_t k_t))ᵀ)        o_t = S_tᵀ q_t

q, k, v = silu of projections of x, q and k of length 1; b = σ(W_b x) for each element of a key, w = σ(W_w x) for each element
of a value; λ one per head. Along k a step multiplies the state by λ - Σ b_i k_i², between -1 and 1, about λ - 1/2 at the start,
where E88's λ - 1 is never positive. `raw_write` writes w v itself. Parameters are named as published.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E97Config, E97Mixer
from .op import e97, e97_raw

SEARCH = "1.3B, best of a search of 15 min runs, training loss over the run; a repeat differs by as much as these do"


def equation(o: E97Config) -> str:
    write = f"{o.write_scale:g} β_t " if o.write_scale != 1 else "β_t "
    erased = "" if o.raw_write else " - S_{t-1}ᵀ (b_t k_t)"
    new = f"λ_t S_{{t-1}} + {write if o.use_write_gate else ''}k_t (w_t v_t{erased})ᵀ"
    gates = (
        (",  β = σ(W_β x)" if o.use_write_gate else "") + ("" if o.raw_write else ",  b = σ(W_b x)") + ",  w = σ(W_w x)"
    )
    return f"S_t = {new if o.linear_state else f'tanh({new})'},  o_t = S_tᵀ q_t{gates}"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e97",
        summary="nonlinear delta memory with separate gates for erasing and writing",
        equation=equation,
        config=E97Config,
        mixer=E97Mixer,
        presets={
            "linear": {"linear_state": True},
            "raw": {"raw_write": True},
            "h216n32": {"n_heads": 216},
            "h32n16": {"n_heads": 32, "n_state": 16},
            "conv_h5v256": {"n_heads": 5, "expansion": 8.0, "use_conv": True, "use_output_norm": True, "init": "zero"},
        },
        recommended="conv_h5v256",
        aliases={"97": "", "e97-linear": "linear", "e97-raw": "raw"},
        kernels=(*e97.specs(), *e97_raw.specs()),
        published=(
            Published("e97", None, "5.973 nats/token", SEARCH),
            Published("e97:linear", None, "6.052 nats/token", SEARCH),
            Published("e97:raw", None, "5.951 nats/token", SEARCH),
        ),
    )
