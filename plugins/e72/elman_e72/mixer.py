"""The E72 mixer: its options and parameters."""

from dataclasses import dataclass

from elman_core import option
from elman_core.nn import MatrixForm, MatrixWrapperConfig, MatrixWrapperMixer

from .op import UNIT_KEYS, e72


@dataclass(frozen=True)
class E72Config(MatrixWrapperConfig):
    """The size of E72's state, the direction of its gate, and the length of its keys."""

    inverse: bool = option(False, "what is known already is let in less: g = σ(-d_g |r| + b_g)")
    unit_keys: bool = option(False, "keys have length 1: long ones let the published model diverge")


class E72Mixer(MatrixWrapperMixer):
    """x → u → W u: q, k, v, α̂ → S_t = S_{t-1} diag(a) + k ((1 - a) g v)ᵀ, a = σ(α̂ + b_α), g = σ(d_g r + b_g), r = S_{t-1}ᵀ k
    → o silu(o) → out.

    Parameters beside the wrapper's: w_q.weight, w_k.weight, w_v.weight, w_alpha.weight (n, I), b_alpha, d_g and b_g (n).
    State: S (B, 1, n, n), rows keys and columns values.
    """

    @classmethod
    def form_of(cls, config: E72Config) -> MatrixForm:
        vectors, maps = {"d_g": 0.5, "b_g": 0.0, "b_alpha": 2.0}, UNIT_KEYS if config.unit_keys else None
        on = ("inverse",) * config.inverse
        return MatrixForm(e72, ("w_q", "w_k", "w_v", "w_alpha"), vectors=vectors, options=on, inputs=maps)
