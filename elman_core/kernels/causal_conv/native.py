"""Run the causal convolution in its compiled modules (`elman/causal_conv_call.h` of `elman_csrc`): one for each dtype and K."""

from __future__ import annotations

import torch

from elman_core.kernels import build, launch
from elman_core.kernels.build import Extension, Target
from elman_core.kernels.family import Values
from elman_core.kernels.spec import Cell
from elman_core.registry.errors import KernelError

from .spec import FAMILY, NAME


def extension(dtype: torch.dtype = torch.bfloat16, taps: int = 4, target: Target = "cuda") -> Extension:
    """What is compiled for a storage dtype and K. Raises `KernelError`: there is no kernel for these, or no source."""
    if not 2 <= taps <= 64:
        raise KernelError(f"{NAME}: kernels take 2 to 64 taps, not {taps}")
    return build.for_target(NAME, NAME, target, taps, DTYPE=dtype, TAPS=taps)


module = launch.opener(FAMILY, extension)


def run(_cell: Cell, function: str, given: Values, values: Values) -> None:
    """As `Operator` calls it. Raises `KernelError`: the module cannot be built or run."""
    x, weight = given["x"], given["weight"]
    with launch.on(x):
        made = module(x.dtype, weight.shape[1], values["backend"], x.get_device())
        more = {"silu": values["silu"], "cuda_stream": launch.stream(x), "threads": torch.get_num_threads()}
        if function == "forward":
            made.run(function, **given, **more)
            return
        total = given.pop("dparams")
        shares = weight.new_empty(made.ask("shares", *x.shape), weight.shape[1] + 1, weight.shape[0])
        made.run(function, shares=shares, **given, **more)
        torch.sum(shares.flatten(1), 0, out=total)
