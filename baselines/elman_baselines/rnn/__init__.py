"""GRU, LSTM and sLSTM between two projections.

GRU  (Cho et al. 2014, as in cuDNN and torch.nn.GRU)
    r, z = sigmoid(W x + b + U h' + c);  n = tanh(W x + b + r (U h' + c));  h = (1 - z) n + z h'
LSTM (Hochreiter and Schmidhuber 1997; forget gate of Gers et al. 2000; as in torch.nn.LSTM)
    i, f, o = sigmoid(W x + b + U h' + c);  g = tanh(W x + b + U h' + c);  s = f s' + i g;  h = o tanh(s)
sLSTM (Beck et al. 2024, xLSTM; without its convolution)
    m = max(log f + m', i~);  c = f exp(m' - m) c' + exp(i~ - m) tanh(z~);  n = f exp(m' - m) n' + exp(i~ - m);
    h = sigmoid(o~) c / n;  i~, f~, z~, o~ = W x + b + U h', U block-diagonal;  f = sigmoid(f~) or exp(f~)
"""

from __future__ import annotations

from elman_core import Variant

from .mixer import GRUConfig, GRUMixer, LSTMConfig, LSTMMixer, SLSTMConfig, SLSTMMixer
from .op import gru, gru_before_gates, gru_gates, lstm, lstm_gates, slstm, slstm_exp_gates, slstm_gates
from .reference import gru_reference, lstm_reference

__all__ = [
    "GRUConfig", "GRUMixer", "LSTMConfig", "LSTMMixer", "SLSTMConfig", "SLSTMMixer", "gru", "gru_reference", "gru_variant",
    "lstm", "lstm_reference", "lstm_variant", "slstm", "slstm_variant",
]  # fmt: skip


def gru_variant() -> Variant:
    return Variant(
        name="gru",
        summary="gated recurrent unit, the equations of torch.nn.GRU and cuDNN",
        equation="r, z = sigmoid(W x + b + U h' + c); n = tanh(W x + b + r (U h' + c)); h = (1 - z) n + z h'",
        config=GRUConfig,
        mixer=GRUMixer,
        presets={"predecessor": {"expansion": 2.0, "reset_after": False, "init": "normal", "zero_out_proj": True}},
        kernels=(*gru_gates.specs(), *gru_before_gates.specs()),
    )


def lstm_variant() -> Variant:
    return Variant(
        name="lstm",
        summary="long short-term memory, the equations of torch.nn.LSTM and cuDNN",
        equation="i, f, o = sigmoid(W x + b + U h' + c); g = tanh(W x + b + U h' + c); s = f s' + i g; h = o tanh(s)",
        config=LSTMConfig,
        mixer=LSTMMixer,
        presets={"predecessor": {"expansion": 2.0, "init": "normal", "zero_out_proj": True}},
        kernels=lstm_gates.specs(),
    )


def slstm_variant() -> Variant:
    return Variant(
        name="slstm",
        summary="LSTM with exponential gates, a normaliser and heads: the sLSTM of xLSTM",
        equation="m = max(log f + m', i~); F = exp(log f + m' - m); I = exp(i~ - m); c = F c' + I tanh(z~); n = F n' + I; "
        "h = sigmoid(o~) c / n; i~, f~, z~, o~ = W x + b + U h' with U block-diagonal; f = sigmoid(f~) or exp(f~)",
        config=SLSTMConfig,
        mixer=SLSTMMixer,
        presets={"exponential": {"forget": "exp"}},
        kernels=(*slstm_gates.specs(), *slstm_exp_gates.specs()),
    )
