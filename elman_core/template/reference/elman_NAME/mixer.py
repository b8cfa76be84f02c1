"""The {{Name}} mixer: its parameters and its state. T time, B batch, I inner width."""

import torch
from torch import Tensor, nn

from elman_core.nn import WrapperMixer

from .reference import {{name}}_reference


class {{Name}}Mixer(WrapperMixer):
    """x → u → silu(u) → h_t = a h_{t-1} + (1 - a) u_t, y_t = tanh(h_t) → out. The cell's parameter: lam (I). State: h (B, I)."""

    def build_cell(self, inner):
        self.lam = nn.Parameter(torch.empty(inner))

    def reset_cell(self):
        nn.init.constant_(self.lam, 2.0)

    @classmethod
    def cell_state(cls, inner, config):
        return {"h": ((inner,), torch.float32)}  # without the batch

    def cell(self, x_TBI: Tensor, z_TBI, state, mask_TB, starts_TB):
        y_TBI, h_BI = {{name}}_reference(x_TBI, self.lam, self.vector(state, "h", x_TBI), mask_TB, starts_TB)
        return y_TBI, {"h": h_BI}
