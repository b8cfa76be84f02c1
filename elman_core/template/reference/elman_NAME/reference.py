"""{{Name}} in plain PyTorch: all that there is."""

import torch

from elman_core.nn import each_step, full_precision, gate, hold, restart


@full_precision
def {{name}}_reference(x_TBI, lam_I, h_BI, mask_TB=None, starts_TB=None):
    """(y (T, B, I), h_T (B, I)): h_t = a h_{t-1} + (1 - a) x_t, a = σ(lam), y_t = tanh(h_t).

    Where the mask is False the state is held; where a document starts, the state is first set to 0.
    """
    outputs, (a_I, shut_I) = [], gate(lam_I)
    for x_BI, mask_B, start_B in each_step(x_TBI, mask_TB, starts_TB):
        h_BI = restart(h_BI, start_B)
        h_BI = hold(a_I * h_BI + shut_I * x_BI, h_BI, mask_B)
        outputs.append(h_BI.tanh())
    return torch.stack(outputs), h_BI
