"""The {{Name}} mixer: its parameters. B batch, I inner width, H heads, n rows and columns of a state."""

from dataclasses import dataclass

from elman_core import option
from elman_core.nn import MatrixForm, MatrixWrapperConfig, MatrixWrapperMixer

from .op import {{name}}


@dataclass(frozen=True)
class {{Name}}Config(MatrixWrapperConfig):
    n_heads: int = option(1, "number H of heads, each with its own state", ge=1, le=1024)


class {{Name}}Mixer(MatrixWrapperMixer):
    """x → u → W u: q, k of length 1, v, β̂ → S_t = tanh(S_{t-1} diag(σ(β̂)) + k (v - S_{t-1}ᵀ k)ᵀ) → o silu(o) → out.

    The cell's parameters, head after head: w_q.weight, w_k.weight, w_v.weight, w_beta.weight (H n, I), w_beta.bias (H n).
    State: S (B, H, n, n), rows keys and columns values.
    """

    form = MatrixForm({{name}}, ("w_q", "w_k", "w_v", "w_beta"), biases={"w_beta": 2.0})
