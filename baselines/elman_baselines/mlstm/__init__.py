"""mLSTM (Beck et al. 2024), as the layer of xLSTM 7B (Beck et al. 2025).

m = max(log f + m', i~);  C = f exp(m' - m) C' + exp(i~ - m) k vᵀ;  n = f exp(m' - m) n' + exp(i~ - m) k
h = Cᵀ q / max(|n·q|, exp(-m));  f = sigmoid(f~), q times N^(-1/2);  y = W_out (sigmoid(W_o x) ⊙ LayerNorm(h))
"""

from __future__ import annotations

from elman_core import Variant

from .mixer import MLSTM, MLSTMConfig
from .op import matrix, mlstm, stabiliser

__all__ = ["MLSTM", "MLSTMConfig", "mlstm", "mlstm_variant"]


def mlstm_variant() -> Variant:
    return Variant(
        name="mlstm",
        summary="a matrix state with exponential gates and a normaliser: the mLSTM of xLSTM",
        equation="m = max(log f + m', i~); C = f exp(m' - m) C' + exp(i~ - m) k vᵀ; n = f exp(m' - m) n' + exp(i~ - m) k; "
        "h = Cᵀ q / max(|n·q|, exp(-m)); f = sigmoid(f~)",
        config=MLSTMConfig,
        mixer=MLSTM,
        kernels=(*matrix.specs(), *stabiliser.specs()),
    )
