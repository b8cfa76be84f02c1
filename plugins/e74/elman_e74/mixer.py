"""The E74 mixer: its axes. B batch, T time, I inner width, n rows and columns of the state."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core import ConfigError, option
from elman_core.kernels import MatrixKernel
from elman_core.nn import MatrixForm, MatrixWrapperConfig, MatrixWrapperMixer, l2_normalize, linear, linears, self_gate
from elman_core.registry import StateSpec

from . import reference
from .op import KERNELS

MAPS = {
    "full": ("w_q", "w_k", "w_z", "w_v"),
    "no_z": ("w_q", "w_k", "w_v"),
    "tied_kq": ("w_k", "w_v"),
    "tied_kvq": ("w_k",),
}
RULES: dict[str, tuple[Any, tuple[str, ...], dict[str, float]]] = {  # the recurrence, its further maps and vectors
    "delta": (reference.delta, (), {}),
    "read": (reference.read, (), {}),
    "sized": (reference.sized, (), {"d_g": 0.5, "b_g": 0.0}),
    "simple": (reference.simple, (), {}),
    "ema": (reference.ema, ("w_alpha",), {"b_alpha": 2.0}),
    "residual": (reference.residual, (), {"rho": 0.1}),
    "ntm": (reference.ntm, ("w_e", "w_w"), {"b_e": 0.0, "b_w": 0.0}),
    "retrieved_gate": (reference.gated, ("w_g",), {"b_g": 0.0}),
    "surprise_gate": (partial(reference.gated, surprise=True), ("w_g",), {"b_g": 0.0}),
}
NORMS = {"rmsnorm": "rms", "frobnorm": "frob"}


@dataclass(frozen=True)
class E74Config(MatrixWrapperConfig):
    """The axes of the ablation."""

    state: Literal["full", "diagonal"] = option("full", "n x n numbers, or n")
    update: Literal["delta", "simple", "ema", "residual", "ntm", "retrieved_gate", "surprise_gate"] = option(
        "delta", "how S is written; surprise_gate is retrieved_gate with the mean square of δ in the gate"
    )
    gate: Literal["output", "retain", "state", "input"] = option(
        "output",
        "output: o silu(o); input: o silu(W_zg u + b_zg); retain, state: σ of the state's size times what is written",
    )
    proj: Literal["full", "no_z", "tied_kq", "tied_kvq"] = option(
        "no_z", "which of q, k, v have a map of their own; full: and z, which multiplies k where it reads"
    )
    nonlinearity: Literal["tanh", "linear", "rmsnorm", "frobnorm"] = option("tanh", "phi, around the new state")

    @property
    def rule(self) -> str:
        """The name of the recurrence in `RULES`."""
        if self.gate in ("retain", "state"):
            return "sized"
        return "read" if self.proj == "full" else self.update


class E74Mixer(MatrixWrapperMixer):
    """x → u → W u: q, k of length 1, v → S_t = phi(S_{t-1} + k δᵀ), δ = v - S_{t-1}ᵀ k, or another update → o silu(o) → out.

    Parameters beside the wrapper's, where the options ask for them: w_q, w_k, w_v (n, I), w_k serving for the tied ones; w_z;
    w_alpha and b_alpha (n), or log_alpha (1), (n) of a diagonal state; rho; w_e, b_e, w_w, b_w; w_g, b_g; d_g, b_g; w_zg.
    Maps have NAME.weight, w_z and w_zg also NAME.bias. State: S (B, 1, n, n), rows keys and columns values, or (B, n, 1, 1).
    """

    fp32_params = ("log_alpha",)
    w_zg: nn.Linear
    log_alpha: Tensor

    @classmethod
    def form_of(cls, config: E74Config) -> MatrixForm:
        step, maps, vectors = RULES[config.rule]
        kernel: Any = KERNELS.get(config.rule)
        diagonal = config.state == "diagonal"
        if kernel is None or diagonal or config.nonlinearity in NORMS:
            how = {"diagonal": True} if diagonal and config.rule == "sized" else {}
            kernel = partial(step, norm=NORMS.get(config.nonlinearity, ""), **how)
        biases = {"w_z": 1.0} if config.proj == "full" else {}
        if config.gate == "input":
            maps, biases = (*maps, "w_zg"), {**biases, "w_zg": 0.0}
        on = ("linear_state",) if config.nonlinearity == "linear" else ()
        return MatrixForm(kernel, MAPS[config.proj] + maps, biases, vectors, on)

    def build_cell(self, inner: int) -> None:
        super().build_cell(inner)
        if count := self._alphas(self.config):
            self.log_alpha = nn.Parameter(torch.empty(count))

    @staticmethod
    def _alphas(config: E74Config) -> int:
        """Of log_alpha: one, or one for each element of a diagonal state."""
        return (config.n_state if config.state == "diagonal" else 1) if config.update == "simple" else 0

    @classmethod
    def cell_state(cls, inner: int, config: Any) -> StateSpec:
        full = super().cell_state(inner, config)
        return full if config.state == "full" else {"S": ((config.n_state, 1, 1), torch.float32)}

    @classmethod
    def validate(cls, dim: int, config: Any) -> None:
        """Raises `ConfigError` for combinations that nobody defined."""
        super().validate(dim, config)
        diagonal, sized = config.state == "diagonal", config.gate in ("retain", "state")
        for wrong, why in (
            (sized and config.update != "delta", f"gate {config.gate} is of what update delta writes"),
            (
                config.proj == "full" and (config.update != "delta" or sized),
                "proj full changes what update delta reads; elsewhere z would be projected for nothing",
            ),
            (diagonal and config.proj == "full", "a diagonal state never used z"),
            (
                diagonal and config.update not in ("delta", "simple", "ema"),
                f"update {config.update} of a diagonal state was delta under another name",
            ),
            (diagonal and config.nonlinearity in NORMS, "norms of a diagonal state were never run"),
        ):
            if wrong:
                raise ConfigError(f"e74: {why}: choose another combination")

    def inputs(self, x_BTI: Tensor) -> list[Tensor]:
        form = self.form_of(self.config)
        names = [name for name in form.maps if name != "w_zg"]
        made = dict(zip(names, linears([getattr(self, name) for name in names], x_BTI), strict=True))
        q, v = (made.get(name, made["w_k"]) for name in ("w_q", "w_v"))
        k = made["w_k"] if isinstance(form.kernel, MatrixKernel) else l2_normalize(made["w_k"])  # kernels normalise it
        z = [made["w_z"]] if "w_z" in made else []
        each = [q, k, *z, v, *(made[name] for name in RULES[self.config.rule][1])]
        return [x.unsqueeze(-1 if self.config.state == "diagonal" else -2) for x in each]

    def scalars(self, x_BTI: Tensor) -> list[Tensor]:
        simple = self.config.update == "simple"
        return [torch.sigmoid(self.log_alpha).expand(*x_BTI.shape[:2], -1)] if simple else []

    def vectors(self) -> list[Tensor]:
        made = super().vectors()
        return [-p for p in made] if self.config.gate == "retain" else made  # 1 - σ(a) = σ(-a)

    def readout(self, o_BTx: Tensor, x_BTI: Tensor, z_BTI: Tensor | None) -> Tensor:
        return o_BTx * F.silu(linear(self.w_zg, x_BTI)) if self.config.gate == "input" else self_gate(o_BTx)

    def reset_cell(self) -> None:
        super().reset_cell()
        if self._alphas(self.config):
            nn.init.constant_(self.log_alpha, -0.1 if self.config.state == "diagonal" else 0.0)
