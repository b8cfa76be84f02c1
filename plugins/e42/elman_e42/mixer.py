"""The E42 mixer: its options and parameters. B batch, D model width, I inner width, K width of the convolution."""

from dataclasses import dataclass

from elman_core import option
from elman_core.nn import DenseMixer, RecurrentMatrixConfig

from .op import e42


@dataclass(frozen=True)
class E42Config(RecurrentMatrixConfig):
    """Only the bound of W keeps the linear state from growing without limit."""

    spectral_radius: float = option(0.999, "largest singular value of W under spectral_norm", gt=0.0, le=2.0)


class E42Mixer(DenseMixer):
    """x → u → silu(u) → h_t = W u_t + W h_{t-1} + b → h_t silu(h_t) → out. Both products share one matrix.

    Parameters: in_proj.weight (I, D), w (I, I), b (I), out_proj.weight (D, I), and conv.weight (I, 1, K), conv.bias (I) with
    `use_conv`. State: h (B, I) and, with `use_conv`, conv (B, K - 1, I).
    """

    kernel = e42
    matrix = "w"
    input = "tied"
