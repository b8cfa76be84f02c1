"""{{Name}}: a matrix state with a delta rule and a decay for each column."""

from collections.abc import Iterable

from elman_core import Variant, hookimpl

from .mixer import {{Name}}Config, {{Name}}Mixer
from .op import {{name}}


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="{{name}}",
        summary="matrix state: a delta rule, a decay for each column, tanh",
        equation="x = silu(W_in x̂);  S_t = tanh(S_{t-1} diag(β_t) + k_t (v_t - S_{t-1}ᵀ k_t)ᵀ),  o_t = S_tᵀ q_t,  "
        "y_t = o_t silu(o_t),  β_t = σ(W_β x_t + b_β)",
        config={{Name}}Config,
        mixer={{Name}}Mixer,
        kernels={{name}}.specs(),
    )
