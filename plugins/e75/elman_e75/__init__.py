"""E75: gated delta memory. Each head has a matrix state, and each column of it has its own decay.

    S_t = tanh(S_{t-1} diag(β_t) + k_t (v_t - S_{t-1}ᵀ k_t)ᵀ)        o_t = S_tᵀ q_t, y_t = o_t silu(o_t)

β_t = σ(W_β u_t + b_β); u = silu(W_in x); q, k and v are products with u, k of length 1. The value stored under k_t is read
before the decay and erased completely, for any β. S has keys as rows, so it is the transpose of the published state. The
published rule "n is a multiple of 8" came from kernels that left memory unwritten at other sizes.
"""

import re
from collections.abc import Iterable
from typing import Any

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E75Config, E75Mixer
from .op import e75

SIZES = ((4, 16), (4, 24), (4, 32), (8, 16), (8, 24))
LAST_1000 = "10 min; mean of the last 1000 steps, which includes early training for slow models"
LAST_100 = "10 min; mean of the last 100 logged steps"


def parse_alias(name: str) -> dict[str, Any] | None:
    """Options of `E75h{H}[n{n}]` and `75n{n}`, or None; a missing n is 32."""
    found = re.fullmatch(r"e?75(?:h(?P<n_heads>\d+))?(?:n(?P<n_state>\d+))?", name, re.IGNORECASE)
    return found and {option: int(value) for option, value in found.groupdict().items() if value}


def equation(o: E75Config) -> str:
    new = "S_{t-1} diag(σ(W_β u_t + b_β)) + k_t (v_t - S_{t-1}ᵀ k_t)ᵀ"
    return f"S_t = {f'tanh({new})' if o.form == 'tanh' else new}, o_t = S_tᵀ q_t, y_t = o_t silu(o_t)"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    heads = {f"h{H}n{n}": {"n_heads": H, "n_state": n} for H, n in SIZES}
    single = {f"n{n}e2": {"n_state": n, "expansion": 2.0} for n in (32, 48, 64, 96)}
    yield Variant(
        name="e75",
        summary="gated delta memory: a tanh matrix state with one decay per column",
        equation=equation,
        config=E75Config,
        mixer=E75Mixer,
        presets={**heads, **single, "linear": {"form": "linear"}},
        parse_alias=parse_alias,
        kernels=e75.specs(),
        published=(
            Published("e75:h4n16@2048x20", 97_561_856, "1.724 nats/byte, 75.6k tok/s", LAST_1000),
            Published("e75:h4n24@2048x20", 104_116_096, "1.701 nats/byte, 68.5k tok/s", LAST_1000),
            Published(
                "e75:h4n32@1920x20",
                98_838_400,
                "1.678 nats/byte, 60.8k tok/s",
                f"{LAST_1000}; 1.42 was one logged step",
            ),
            Published("e75:h8n16@1920x20", 98_838_400, "1.679 nats/byte, 75.6k tok/s", LAST_1000),
            Published("e75:h8n24@1792x20", 99_131_904, "1.666 nats/byte, 67.9k tok/s", LAST_1000),
            Published("e75:n32e2@1408x20", 87_799_296, "1.808 nats/byte, 64k tok/s", LAST_100),
            Published("e75:n96e2@1408x20", 104_020_736, "1.952 nats/byte, 24.2k tok/s", LAST_100),
        ),
    )
