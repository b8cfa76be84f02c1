"""GRU, LSTM and sLSTM as mixers: in_proj → recurrence → out_proj.

The predecessor's GRU and LSTM differ in the backbone (LayerNorm with bias, residual in the model's dtype), which here is the
ladder for every variant, and in the settings of the preset "predecessor": expansion 2, weights from N(0, 0.02), an output
projection that starts at zero, and for the GRU the reset gate before the product with a single bias. Its LSTM had one bias,
which equals the sum of torch's two. With `in_proj`, two linear maps follow each other; `in_proj = False` and `out_proj = False`
leave torch.nn.LSTM or GRU between norm and residual stream.

B batch, T time, D model width, d width of the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core import ConfigError, Mixer, State, option
from elman_core.kernels import GatesKernel
from elman_core.nn import compute_dtype, linear, orthogonal_, spare_rows, time_major, with_spare

from .op import gru, gru_before_gates, gru_gates, lstm, lstm_gates, slstm, slstm_exp_gates, slstm_gates


@dataclass(frozen=True)
class RNNConfig:
    expansion: float = option(1.0, "width of the state in units of the model width (rounded down)", gt=0, le=16)
    in_proj: bool = option(True, "a linear map from the model width to the state's width in front of the recurrence")
    out_proj: bool = option(
        True, "a linear map from the state's width back to the model width; without it they must be equal"
    )
    init: Literal["xavier", "normal"] = option("xavier", "input and output maps: Xavier uniform, or N(0, 0.02)")
    zero_out_proj: bool = option(False, "start the output map at zero, so that every layer starts as the identity")


@dataclass(frozen=True)
class GRUConfig(RNNConfig):
    reset_after: bool = option(True, "reset gate after the recurrent product (torch, cuDNN); else before it, one bias")


@dataclass(frozen=True)
class LSTMConfig(RNNConfig):
    forget_bias: float = option(1.0, "initial bias of the forget gate", ge=-10, le=10)


@dataclass(frozen=True)
class SLSTMConfig(RNNConfig):
    heads: int = option(4, "heads of the recurrent product: a head's gates see the h of this head only", ge=1, le=256)
    forget: Literal["sigmoid", "exp"] = option("sigmoid", "the forget gate")
    norm: bool = option(True, "normalise the output of every head (LayerNorm with a weight)")


def _inner(dim: int, config: RNNConfig) -> int:
    return max(1, int(dim * config.expansion))


class RNNMixer(Mixer):
    """The common part. The parameters of GRU and LSTM have the names, shapes and order of torch.nn.GRU and LSTM."""

    gates: ClassVar[int]
    two_biases: ClassVar[bool] = True
    kernel: ClassVar[GatesKernel]
    parts: ClassVar[tuple[str, ...]]

    def __init__(self, dim: int, config: Any, layer_idx: int = 0) -> None:
        super().__init__(dim, config, layer_idx)
        d, heads = _inner(dim, config), getattr(config, "heads", 1)
        if d % heads:
            raise ConfigError(f"heads={heads} does not divide {d}, the width of the state: set heads or expansion")
        if not config.out_proj and (d != dim or config.zero_out_proj):
            raise ConfigError(
                f"out_proj=false needs a state as wide as the model ({dim}, not {d}) and no zero_out_proj"
            )
        self.inner, self.columns = d, d // heads
        self.in_proj = nn.Linear(dim, d, bias=False) if config.in_proj else None
        self.weight_ih = nn.Parameter(torch.empty(self.gates * d, d if config.in_proj else dim))
        self.weight_hh = nn.Parameter(torch.empty(self.gates * d, self.columns))
        self.bias_ih = nn.Parameter(torch.empty(self.gates * d))
        two = getattr(config, "reset_after", self.two_biases)
        self.bias_hh = nn.Parameter(torch.empty(self.gates * d)) if two else None
        self.norm = nn.Parameter(torch.empty(d)) if getattr(config, "norm", False) else None
        self.out_proj = nn.Linear(d, dim, bias=False) if config.out_proj else None
        self.reset_parameters()

    def stacked(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("weight_ih", "weight_hh"), (self.columns,) * (len(self.weight_hh) // self.columns))

    def reset_parameters(self) -> None:
        """Each gate's recurrent block orthogonal (gain 1), biases zero; the other maps by `init`, drawn gate by gate."""
        draw = nn.init.xavier_uniform_ if self.config.init == "xavier" else (lambda w: nn.init.normal_(w, std=0.02))
        with torch.no_grad():
            for w in (*self.weight_ih.split(self.columns), *([self.in_proj.weight] if self.in_proj else [])):
                draw(w)
            for w in self.weight_hh.split(self.columns):
                orthogonal_(w)
            for b in (self.bias_ih, self.bias_hh):
                if b is not None:
                    nn.init.zeros_(b)
            if self.norm is not None:
                nn.init.ones_(self.norm)
            if self.out_proj is not None:
                (nn.init.zeros_ if self.config.zero_out_proj else draw)(self.out_proj.weight)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        given = (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        return tuple(w for w in given if w is not None)

    @classmethod
    def state_spec(cls, dim: int, config: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: ((_inner(dim, config),), torch.float32) for name in cls.parts}

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        x_BTI = x_BTD if self.in_proj is None else linear(self.in_proj, x_BTD)
        spare = spare_rows(rows := x_BTD.shape[0], x_BTD)
        if spare:
            x_BTI, mask_BT, starts_BT = with_spare(spare, 0, x_BTI, mask_BT, starts_BT)
            state = None if state is None else dict(zip(state, with_spare(spare, 0, *state.values()), strict=True))
        x_TBI = time_major(x_BTI)
        if state is None:
            zero = x_TBI.new_zeros(x_TBI.shape[1], self.inner, dtype=compute_dtype(x_TBI))
            state = dict.fromkeys(self.parts, zero)
        y_TBd, end = self.recur(x_TBI, state, *(None if f is None else f.T for f in (mask_BT, starts_BT)))
        y_BTd = y_TBd.transpose(0, 1)[:rows]
        if self.out_proj is not None:
            y_BTd = linear(self.out_proj, y_BTd)
        return y_BTd, {name: s[:rows] for name, s in end.items()}

    def recur(self, x_TBI: Tensor, state: State, *flags_TB: Tensor | None) -> tuple[Tensor, State]:
        """The recurrence: outputs and the new state. `flags_TB`: mask and starts."""
        raise NotImplementedError(f"{type(self).__name__}.recur")

    def backend(self) -> str:
        device, kernel = self.weight_hh.device, self.kernel if self.bias_hh is not None else gru_before_gates
        plain = "reference" if self.bias_hh is None else "cudnn" if device.type == "cuda" else "torch"
        supported = kernel.supports(device, torch.bfloat16, self.inner)
        return kernel.backend(device, self.inner, plain) if supported else plain


class GRUMixer(RNNMixer):
    gates = 3
    kernel = gru_gates
    parts = ("h",)

    def recur(self, x_TBI: Tensor, state: State, *flags_TB: Tensor | None) -> tuple[Tensor, State]:
        y_TBd, h_Bd = gru(x_TBI, self.weights, state["h"], *flags_TB)
        return y_TBd, {"h": h_Bd}


class LSTMMixer(RNNMixer):
    gates = 4
    kernel = lstm_gates
    parts = ("h", "c")

    def reset_parameters(self) -> None:
        """As for the GRU, and the bias of the forget gate is `forget_bias` (its half in b_hh stays zero)."""
        super().reset_parameters()
        with torch.no_grad():
            self.bias_ih[self.inner : 2 * self.inner] = self.config.forget_bias

    def recur(self, x_TBI: Tensor, state: State, *flags_TB: Tensor | None) -> tuple[Tensor, State]:
        y_TBd, h_Bd, c_Bd = lstm(x_TBI, self.weights, state["h"], state["c"], *flags_TB)
        return y_TBd, {"h": h_Bd, "c": c_Bd}


class SLSTMMixer(RNNMixer):
    """sLSTM. The rows of its weights are ordered by head, and in a head by gate (i f z o); norm (d) is the weight of `norm`."""

    gates = 4
    two_biases = False
    parts = ("h", "c", "n", "m")

    def reset_parameters(self) -> None:
        """As for the GRU; the logits of f run from 5 to -7 over the channels of a head, so that memories have many lengths."""
        super().reset_parameters()
        with torch.no_grad():
            logit = torch.linspace(5, -7, self.columns, device=self.bias_ih.device)
            bias = logit if self.config.forget == "sigmoid" else F.logsigmoid(logit)
            self.bias_ih.unflatten(0, (-1, self.gates, self.columns))[:, 1] = bias.to(self.bias_ih.dtype)

    def recur(self, x_TBI: Tensor, state: State, *flags_TB: Tensor | None) -> tuple[Tensor, State]:
        y_TBd, *end = slstm(self._cell(), x_TBI, self.weights, [state[name] for name in self.parts], *flags_TB)
        if self.norm is not None:
            y_TBHc = F.layer_norm(y_TBd.unflatten(-1, (-1, self.columns)).to(self.norm.dtype), (self.columns,))
            y_TBd = (y_TBHc.flatten(-2) * self.norm).to(y_TBd.dtype)
        return y_TBd, dict(zip(self.parts, end, strict=True))

    def backend(self) -> str:
        device, kernel = self.weight_hh.device, self._cell()
        supported = kernel.supports(device, torch.bfloat16, self.inner, self.config.heads)
        return kernel.backend(device, self.inner) if supported else "torch"

    def _cell(self) -> GatesKernel:
        return slstm_gates if self.config.forget == "sigmoid" else slstm_exp_gates
