"""E88: multi-head nonlinear delta memory. Each head keeps a matrix S, rows keys, columns values.

    S_t = tanh(decay_t S_{t-1} + k_t (v_t - S_{t-1}ᵀ k_t)ᵀ)        o_t = S_tᵀ q_t

q, k, v = silu of projections of x, q and k of length 1; decay_t = exp(-exp(A_log) softplus(a_t + dt_bias)), one per head.
The value stored under k_t is read before the decay, and only its difference from v_t is written.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.nn import MatrixConfig
from elman_core.registry import Published

from .levels import ALIASES, PRESETS, parse_alias
from .mixer import E88Mixer
from .op import e88

LAST_1000 = (
    "10 min; mean of the last 1000 steps; the published count is V a layer higher, for a norm that was never used"
)


def equation(o: MatrixConfig) -> str:
    decay = {"none": "", "constant": "decay "}.get(o.decay, "decay_t ")
    write = f"{o.write_scale:g} β_t " if o.write_scale != 1 else "β_t "
    new = f"{decay}S_{{t-1}} + {write if o.use_write_gate else ''}k_t (v_t - S_{{t-1}}ᵀ k_t)ᵀ"
    gate = ",  β = σ(W_β x)" if o.use_write_gate else ""
    return f"S_t = {new if o.linear_state else f'tanh({new})'},  o_t = S_tᵀ q_t{gate}"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e88",
        summary="multi-head nonlinear delta memory: a tanh matrix state for each head",
        equation=equation,
        config=MatrixConfig,
        mixer=E88Mixer,
        presets=PRESETS,
        recommended="conv_h5n128v256",
        aliases=ALIASES,
        parse_alias=parse_alias,
        kernels=e88.specs(),
        published=(
            Published("e88:h32n16@1536x20", 64_324_352, "1.53 nats/byte, 74.2k tok/s", LAST_1000),
            Published("e88:h24n24@1536x20", 71_942_592, "1.52 nats/byte, 65.0k tok/s", LAST_1000),
            Published("e88:h8n32@1920x20", 40_160_960, "1.55 nats/byte, 104k tok/s", LAST_1000),
        ),
    )
