"""`causal_conv`: a causal depthwise convolution over time whose window is state, with one kernel in each direction.

    z_t = bias + sum_j weight_j x_{t-(K-1)+j},   y = z, or silu(z), channel by channel

It is registered with `torch.library` as `elman::causal_conv`, with its backward. On NVIDIA GPUs the kernels of `elman_csrc`
(causal_conv.cuh) run, compiled for each dtype and K at first use. They read x and the gradient of y in place, also as slices of
wider tensors. On a CPU those of causal_conv_cpu.h run where that pays; elsewhere plain PyTorch.

Shapes: T time, B batch, C channels, K taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels import dispatch, runtime
from elman_core.kernels.family import Values
from elman_core.kernels.operators import Operator
from elman_core.kernels.spec import Case, Cell, Inputs, KernelSpec, Outputs
from elman_core.registry.errors import ConfigError

from . import native
from .portable import reference
from .spec import FAMILY, NAME, first_use


def causal_conv(
    x_TBC: Tensor, weight_CK: Tensor, bias_C: Tensor | None = None, window_BKC: Tensor | None = None,
    mask_TB: Tensor | None = None, starts_TB: Tensor | None = None, *, silu: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (y in the shape and dtype of x, the new window (B, K - 1, C) in float32 or float64).

    Args:
        x_TBC: float32, bfloat16, float16 or float64; any strides, such as a view of (B, T, C). y has the same layout, with
            adjacent channels.
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
    wide = runtime.compute_dtype(x_TBC, weight_CK)
    bias_C, window_BKC = (None if p is None else p.to(wide) for p in (bias_C, window_BKC))
    given = (x_TBC, weight_CK.to(wide), bias_C, window_BKC, mask_TB, starts_TB, silu)
    cpu = dispatch.pays(x_TBC, x_TBC.shape[0], taps * x_TBC.shape[2])
    fits = (cpu or dispatch.launches(x_TBC)) and wide != torch.float64 and x_TBC.numel() > 0
    if fits and not runtime.transformed() and dispatch.runs(NAME, x_TBC, taps, cpu=cpu):
        return _op(*given, "cpu" if cpu else "cuda")
    return reference(*given)


class Kernel(dispatch.Compiled):
    """The convolution, as the chooser of back ends knows it."""

    name = NAME
    cpu = True

    def prepare(self, dtype: torch.dtype, taps: int) -> str:
        native.module(dtype, taps, "cuda", torch.cuda.current_device())
        return "a warp for each chunk of time"

    def cases(self, dtype: torch.dtype, taps: int) -> Sequence[Case]:
        return first_use(dtype, taps)

    def spec(self) -> KernelSpec:
        def given(inputs: Inputs, options: Mapping[str, Any]) -> tuple[Any, ...]:
            x, *rest = inputs.values()
            if options.get("sliced"):
                x = F.pad(x, (8, 8)).transpose(0, 1).contiguous()[..., 8:-8].transpose(0, 1)
            return x, *rest, options.get("silu", False)

        def call(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
            made = given(inputs, options)
            backend = "cuda" if backend == "emulated" else backend
            y, window = reference(*made) if backend == "reference" else _op(*made, backend)
            return {"y": y, "window": window}

        return _operator.spec(
            causal_conv,
            ("y", "window"),
            call=call,
            op=lambda backend, inputs, options: (_op, (*given(inputs, options), backend)),
            extension=lambda target: native.extension(target=target),
            module=lambda target, case: native.extension(case.dtype, case.sizes["K"], target),
            targets=("cuda", "cpu"),
            emulated=tuple(first_use(torch.bfloat16, 4)[1:]),
            visible=lambda inputs: {"y": mask[..., None]} if (mask := inputs["mask"]) is not None else {},
        )


def _gradients(_cell: Cell, values: Values) -> Values:
    channels, taps = values["weight"].shape
    dweight, dbias = values["dparams"].split((taps * channels, channels))
    found = {"x": values["dx"], "weight": dweight.view(channels, taps)}
    if values["needs"]["bias"]:
        found["bias"] = dbias.clone()
    if values["needs"]["window"]:
        found["window"] = values["dwindow"]
    return found


_operator = Operator(FAMILY, Cell(NAME, Path(), "", reference), native.run, (), _gradients)
_op = _operator.op
dispatch.register(Kernel())
