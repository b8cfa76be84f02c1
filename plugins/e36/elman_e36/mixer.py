"""The E36 mixer: its options and parameters. B batch, I inner width."""

from dataclasses import dataclass

from elman_core import option
from elman_core.nn import DenseMixer, RecurrentMatrixConfig

from .op import e36


@dataclass(frozen=True)
class E36Config(RecurrentMatrixConfig):
    """Only the bound of W_h keeps the linear state from growing without limit. `mamba2_init` also starts it at 0.95."""

    spectral_radius: float = option(0.95, "largest singular value of W_h under spectral_norm", gt=0.0, le=2.0)


class E36Mixer(DenseMixer):
    """x → silu(u) → h_t = W_x u_t + W_h h_{t-1} + b → h_t silu(h_t) → out.

    The cell's parameters: w_x.weight (I, I) is W_x, w_x.bias (I) is b, w_h (I, I) is W_h. State: h (B, I).
    """

    kernel = e36
    orthogonal = 0.95
    s4d = (0.95, 0.99)
