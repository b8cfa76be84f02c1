"""The E75 mixer: its forms and options."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from elman_core import option
from elman_core.nn import MatrixForm, MatrixWrapperConfig, MatrixWrapperMixer

from .op import e75

MAPS, VECTORS = ("w_q", "w_k", "w_v", "w_beta"), {"b_beta": 2.0}


@dataclass(frozen=True)
class E75Config(MatrixWrapperConfig):
    """Options of E75: the number of heads, and whether a tanh bounds the state."""

    n_heads: int = option(1, "number H of heads, each with its own state", ge=1, le=1024)
    form: Literal["tanh", "linear"] = option("tanh", "linear: no tanh around the new state")


class E75Mixer(MatrixWrapperMixer):
    """x → u → W u: q, k of length 1, v, β̂ → S_t = tanh(S_{t-1} diag(σ(β̂ + b_β)) + k (v - S_{t-1}ᵀ k)ᵀ) → o silu(o) → out.

    Parameters beside the wrapper's, head after head: w_q.weight, w_k.weight, w_v.weight, w_beta.weight (H n, I), b_beta (H n).
    State: S (B, H, n, n), rows keys and columns values.
    """

    forms: ClassVar[Mapping[str, MatrixForm]] = {
        "tanh": MatrixForm(e75, MAPS, vectors=VECTORS),
        "linear": MatrixForm(e75, MAPS, vectors=VECTORS, options=("linear_state",)),
    }
