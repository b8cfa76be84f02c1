"""Initial values as a test: a plugin states what every parameter starts as, and many draws are compared with it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal, Uniform

from elman_core.extension import config_to_dict

from .harness import Harness, Options

DRAWS, SIGMAS, EDGE = 256, 6.0, 40.0  # a true statement fails once in 1e8 comparisons
NORMAL = Normal(0.0, 0.02)


def xavier(w: Tensor, gain: float = 1.0) -> Uniform:
    """U(-a, a), a = gain sqrt(6 / (rows + columns))."""
    a = gain * math.sqrt(6 / sum(w.shape[-2:]))
    return Uniform(-a, a)


def linear(w: Tensor) -> Uniform:
    """U(-a, a), a = 1 / sqrt(columns), as `nn.Linear` and `nn.Conv1d` start."""
    return Uniform(-(w.shape[-1] ** -0.5), w.shape[-1] ** -0.5)


def blocks(rows: int) -> Any:
    """A stack of maps of so many rows, each Xavier uniform by itself."""
    return (lambda w: w.unflatten(-2, (-1, rows))), xavier


def orthogonal(size: float) -> Any:
    """Every singular value is `size`."""
    return torch.linalg.svdvals, size


def wrapper(o: Options) -> dict[str, Any]:
    """Return the laws of the parameters that `elman_core.nn.WrapperMixer` has around a cell."""
    projection, a = NORMAL if o["mamba2_init"] else xavier, o["d_conv"] ** -0.5
    conv = dict.fromkeys(("conv.weight", "conv.bias"), Uniform(-a, a))
    return {"in_proj.weight": projection, "out_proj.weight": projection, **conv}


def dense(o: Options, w: str, size: float = 0.999, s4d: tuple[float, float] = (0.99, 0.9999)) -> dict[str, Any]:
    """The matrix `w` and the input projection of `elman_core.nn.DenseMixer`; `size`, `s4d` as its attributes."""
    matrix: Any = orthogonal(size) if o["mamba2_init"] else lambda drawn: xavier(drawn, o["r_h_init_gain"])
    if o["mamba2_init"] == "s4d":
        matrix = torch.linalg.eigvalsh, lambda eigenvalues: torch.linspace(*s4d, eigenvalues.shape[-1])
    return {w: matrix, "w_x.weight": NORMAL if o["mamba2_init"] else xavier, "w_x.bias": 0.0, "b": 0.0}


def decays(a_min: float = 0.0) -> dict[str, Any]:
    """Laws of A_log and dt_bias after `elman_core.nn.mamba_decay_`: A ~ U(a_min, 16), the step exp(U(log 0.001, log 0.1))."""
    step = (lambda b: torch.nn.functional.softplus(b).log(), Uniform(math.log(1e-3), math.log(1e-1)))
    return {"A_log": (torch.exp, Uniform(a_min, 16.0)), "dt_bias": step}


class InitialContract(Harness):
    """A plugin's test class defines `initial_values(o)`: `{parameter: law}` for the options `o`.

    A law is a number or a tensor; a `Uniform` or `Normal` of independent elements; a function of the parameter that gives one
    of these, as `xavier`; a pair (function, law) of what the function makes of the draws, as `orthogonal`; or a list of laws.
    """

    def test_initial_values_are_as_stated(self, branch: int) -> None:
        assert hasattr(self, "initial_values"), "write initial_values(o): what each parameter starts as"
        for opts in (*self.options, *getattr(self, "equations", ())):
            mixer = self.make(opts, branch, torch.float32, stir=False)
            laws = self.initial_values(config_to_dict(mixer.config))
            drawn: dict[str, list[Tensor]] = {name: [] for name, _ in mixer.named_parameters()}
            for _ in range(DRAWS):
                mixer.reset_parameters()
                for name, parameter in mixer.named_parameters():
                    drawn[name].append(parameter.detach().double())
            for name, draws in drawn.items():
                assert name in laws, f"initial_values says nothing of {name} ({dict(opts)})"
                _compare(f"{name} ({dict(opts)})", torch.stack(draws), laws[name])


def _compare(name: str, drawn: Tensor, law: Any) -> None:
    if isinstance(law, list):
        for part in law:
            _compare(name, drawn, part)
    elif isinstance(law, tuple):
        _compare(name, law[0](drawn), law[1])
    elif callable(law):
        _compare(name, drawn, law(drawn[0]))
    else:
        message = f"{name} starts with mean {drawn.mean():.3g} and deviation {drawn.std():.3g}, not as {law}"
        if not isinstance(law, Normal | Uniform):
            assert (drawn - law).abs().max() <= 1e-5, message
            return
        z, sure = (drawn - law.mean) / law.stddev, SIGMAS / math.sqrt(drawn.numel())
        assert abs(z.mean()) <= sure, message
        assert abs(z.std() - 1) <= sure, message
        for reach in (z.max(), -z.min()) if isinstance(law, Uniform) else ():
            right = 1 - EDGE / drawn.numel() <= reach / math.sqrt(3) <= 1 + 1e-5
            assert right, f"{message}: it starts between {drawn.min():.4g} and {drawn.max():.4g}"
