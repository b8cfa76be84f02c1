"""The E71 mixer: its options and parameters."""

from dataclasses import dataclass

from elman_core import option
from elman_core.nn import MatrixForm, MatrixWrapperConfig, MatrixWrapperMixer

from .op import UNIT_KEYS, e71


@dataclass(frozen=True)
class E71Config(MatrixWrapperConfig):
    """The size of E71's state, and the length of its keys."""

    unit_keys: bool = option(False, "keys have length 1: long ones let the published model diverge")


class E71Mixer(MatrixWrapperMixer):
    """x → u → W u: q, k, v, α̂ → S_t = S_{t-1} diag(a) + k ((1 - a) v)ᵀ, a = σ(α̂ + d_α S_{t-1}ᵀ k + b_α) → o silu(o) → out.

    Parameters beside the wrapper's: w_q.weight, w_k.weight, w_v.weight, w_alpha.weight (n, I), d_alpha and b_alpha (n).
    State: S (B, 1, n, n), rows keys and columns values.
    """

    @classmethod
    def form_of(cls, config: E71Config) -> MatrixForm:
        vectors, maps = {"d_alpha": 0.1, "b_alpha": 2.0}, UNIT_KEYS if config.unit_keys else None
        return MatrixForm(e71, ("w_q", "w_k", "w_v", "w_alpha"), vectors=vectors, inputs=maps)
