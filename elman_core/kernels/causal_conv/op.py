"""`causal_conv`: a causal depthwise convolution over time whose window is state, with one kernel in each direction.

    z_t = bias + sum_j weight_j x_{t-(K-1)+j},   y = z, or silu(z), channel by channel

It is registered with `torch.library` as `elman::causal_conv`, with its backward. On NVIDIA GPUs the kernels of `elman_csrc`
(causal_conv.cuh) run, compiled for each dtype and K at first use. They read x and the gradient of y in place, also as slices of
wider tensors. Elsewhere plain PyTorch runs.

Shapes: T time, B batch, C channels, K taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build, choice, launch, runtime
from elman_core.kernels.build import Extension
from elman_core.kernels.runtime import operator, tensors
from elman_core.kernels.spec import Case, KernelSpec
from elman_core.registry.errors import ConfigError, KernelError

from .reference import reference
from .spec import first_use, make_spec

NAME = "causal_conv"


def causal_conv(
    x_TBC: Tensor, weight_CK: Tensor, bias_C: Tensor | None = None, window_BKC: Tensor | None = None,
    mask_TB: Tensor | None = None, starts_TB: Tensor | None = None, *, silu: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (y in the shape and dtype of x, the new window (B, K - 1, C) in float32 or float64).

    Args:
        x_TBC: float32, bfloat16, float16 or float64; any strides, such as a view of (B, T, C). y has the same layout.
        weight_CK, bias_C: in any floating dtype. window_BKC: the last K - 1 inputs, oldest first; None is zeros.
        mask_TB: bool. Steps where it is False are skipped: the window holds, the next step sees the inputs before them, and y
            is finite but arbitrary.
        starts_TB: bool; True where a document begins, which does not see inputs of the previous document.
        silu: whether y passes SiLU.

    Raises:
        ConfigError: the window is that of another K.
    """
    taps = weight_CK.shape[1]
    if window_BKC is not None and window_BKC.shape[1] != taps - 1:
        raise ConfigError(f"{NAME}: {taps} taps need a window of {taps - 1} inputs, not {window_BKC.shape[1]}")
    fits = choice.launches(x_TBC) and x_TBC.dtype != torch.float64 and x_TBC.numel() > 0 and not runtime.transformed()
    run = _op if fits and choice.runs(NAME, x_TBC, taps) else reference
    wide = runtime.compute_dtype(x_TBC, weight_CK)
    bias_C, window_BKC = (None if p is None else p.to(wide) for p in (bias_C, window_BKC))
    return run(x_TBC, weight_CK.to(wide), bias_C, window_BKC, mask_TB, starts_TB, silu)


class Kernel(choice.Compiled):
    """The convolution, as the chooser of back ends knows it."""

    name = NAME

    def prepare(self, dtype: torch.dtype, taps: int) -> str:
        _module(dtype, taps, torch.cuda.current_device())
        return "a warp for each chunk of time"

    def cases(self, dtype: torch.dtype, taps: int) -> Sequence[Case]:
        return first_use(dtype, taps)

    def spec(self) -> KernelSpec:
        return make_spec(NAME, _op, extension)


choice.register(Kernel())


def extension(dtype: torch.dtype = torch.bfloat16, taps: int = 4) -> Extension:
    """What is compiled for a storage dtype and K.

    Raises:
        KernelError: there is no kernel for these, or the sources are not installed.
    """
    if not 2 <= taps <= 64:
        raise KernelError(f"{NAME}: kernels take 2 to 64 taps, not {taps}")
    name = f"{NAME}_{str(dtype).removeprefix('torch.')}_{taps}"
    return build.shipped(name, "causal_conv_cuda.cu", DTYPE=dtype, TAPS=taps)


_module = launch.opener(NAME, extension)


def _call(x: Tensor, weight: Tensor, *rest: Any) -> Any:
    """A call of the module for the current device, with the arguments of both directions."""
    *tensors, silu = weight, *rest
    names = ("weight", "bias", "window", "mask", "starts")
    whole = {n: launch.whole(v) for n, v in zip(names, tensors, strict=True)}
    module = _module(x.dtype, weight.shape[1], x.get_device())
    return module.call(x=launch.readable(x), silu=silu, cuda_stream=launch.stream(x), **whole)


def _forward(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    y, last = _fake_forward(x, weight)
    with launch.on(x):
        _call(x, weight, *rest).run("forward", y=y, last=last)
    return y, last


def _backward(dy: Tensor, dlast: Tensor | None, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    (bias, window, *_), (channels, taps) = rest, weight.shape
    dx, dwindow = torch.empty_like(x), weight.new_empty(0 if window is None else window.shape)
    with launch.on(x):
        count = _module(x.dtype, taps, x.get_device()).ask("shares", *x.shape)
        shares = weight.new_empty(count, taps + 1, channels)
        _call(x, weight, *rest).run(
            "backward", dy=launch.readable(dy), dx=dx, shares=shares, dlast=launch.whole(dlast),
            dwindow=None if window is None else dwindow,
        )  # fmt: skip
    dweight, dbias = shares.sum(0).flatten().split((taps * channels, channels))
    return dx, dweight.view(channels, taps), weight.new_empty(0) if bias is None else dbias.clone(), dwindow


def _fake_forward(x: Tensor, weight: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), weight.new_empty(x.shape[1], weight.shape[1] - 1, x.shape[2])


def _fake_backward(_dy: Tensor, _dlast: Any, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(x), *(weight.new_empty(0 if p is None else p.shape) for p in (weight, *rest[:2]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG001
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:-1])
    ctx.silu = inputs[-1]


def _differentiate(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    dy = torch.zeros_like(given[0]) if dy is None else dy
    gradients = _backward_op(dy, dlast, *given, ctx.silu)
    return *(None if x is None else d for x, d in zip(given, gradients, strict=False)), None, None, None


_ARGUMENTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? window, Tensor? mask, Tensor? starts, bool silu"
_backward_op = operator(
    f"{NAME}_backward(Tensor dy, Tensor? dlast, {_ARGUMENTS}) -> {tensors(4)}", _backward, _fake_backward
)
_op = operator(f"{NAME}({_ARGUMENTS}) -> {tensors(2)}", _forward, _fake_forward, _save, _differentiate)
