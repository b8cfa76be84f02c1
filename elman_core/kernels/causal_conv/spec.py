"""The tensors of the causal convolution, and the problems of a first use. T time, B batch, C channels, K taps.

Options of a case: bias; silu; packed: documents start inside its rows; sliced: x is a slice of a wider tensor (B, T, C).
"""

from __future__ import annotations

from functools import partial

import torch

from elman_core.kernels.family import Family, Row, Values, flags
from elman_core.kernels.spec import Case, Cell

NAME = "causal_conv"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_case = partial(Case.of, "TBCK")


def _derive(_cell: Cell, sizes: Values, values: Values) -> None:
    """W: steps of the window, V: if it is given. P: parameters, K taps and a bias for each channel."""
    sizes["W"], sizes["P"] = sizes["K"] - 1, sizes["C"] * (sizes["K"] + 1)
    sizes["V"] = sizes["W"] if values.get("window") is not None else 0


FAMILY = Family(
    NAME,
    sizes={"T": "steps", "B": "batch", "C": "width"},
    functions={"forward": "x weight y", "backward": "x weight dy dx shares"},
    inputs=(
        Row("x", "TBC", strides="TB", read=True),
        Row("weight", "CK", "compute", read=True),
        Row("bias", "C", "compute", optional=True, given="bias", read=True),
        Row("window", "BWC", "compute", optional=True, given="not bare", read=True),
        *flags("TB"),
    ),
    outputs=(Row("y", "TBC", strides="TB", like="x"), Row("last", "BWC", "compute")),
    arriving=(Row("dy", "TBC", strides="TB"), Row("dlast", "BWC", "compute", optional=True)),
    gradients=(
        Row("dx", "TBC", strides="TB", like="x"),
        Row("dparams", "P", "compute"),
        Row("dwindow", "BVC", "compute"),
    ),
    members=(Row("shares", "??C", "compute"),),
    numbers="silu early cuda_stream threads",
    constants=("bool silu", "str backend"),
    derive=_derive,
)


def first_use(dtype: torch.dtype, taps: int) -> list[Case]:
    """The cases that verify a dtype and K at their first use."""
    return [
        _case((131, 5, 264, taps), dtype, silu=True, sliced=True),
        _case((67, 9, 136, taps), dtype, masked=True, packed=True, bias=True),
        _case((131, 3, 37, taps), dtype, silu=True, bias=True),  # no row starts aligned
    ]
