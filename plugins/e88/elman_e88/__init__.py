"""E88: multi-head nonlinear delta memory. Each head keeps a matrix S, rows keys, columns values.

    S_t = tanh(decay_t S_{t-1} + k_t (v_t - S_{t-1}ᵀ k_t)ᵀ)        o_t = S_tᵀ q_t

q, k, v = silu of projections of x, q and k of length 1; decay_t = exp(-exp(A_log) softplus(a_t + dt_bias)), one a head.
What is retrieved for k_t is read before the decay, and only its difference from v_t is written.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .config import E88Config, param_count, validate
from .levels import ALIASES, PRESETS, parse_alias
from .mixer import E88Mixer
from .op import matrix


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="e88",
        summary="multi-head nonlinear delta memory: a tanh matrix state for each head",
        equation="S_t = tanh(decay_t S_{t-1} + k_t (v_t - S_{t-1}ᵀ k_t)ᵀ),  o_t = S_tᵀ q_t",
        config=E88Config,
        mixer=E88Mixer,
        presets=PRESETS,
        aliases=ALIASES,
        parse_alias=parse_alias,
        param_count=param_count,
        validate=validate,
        kernels=(matrix.spec(),),
        published=(
            Published(
                "h32n16, 1536x20, 64,324,352", "1.53 nats/byte, 74.2k tok/s", "10 min; mean of the last 1000 steps"
            ),
            Published(
                "h24n24, 1536x20, 71,942,592", "1.52 nats/byte, 65.0k tok/s", "10 min; mean of the last 1000 steps"
            ),
            Published(
                "h8n32, 1920x20, 40,160,960", "1.55 nats/byte, 104k tok/s", "10 min; mean of the last 1000 steps"
            ),
        ),
    )
