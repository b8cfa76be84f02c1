"""The launches of decoding: what checks its tensors, fills in a call and launches it. `op.py` says whether one runs.

Shapes: B rows, K inputs, N outputs, D width, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import Library

from elman_core.kernels.launch import readable, whole
from elman_core.kernels.runtime import implement
from elman_core.registry.errors import KernelError

from .run import run

MOST_LINEARS = 5
_library = Library("elman", "FRAGMENT")


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, activated: int = 0) -> Tensor:
    """x Wᵀ + b, (..., N) in the dtype of x; SiLU of its first `activated` columns, rounded before it as a tensor would be.

    Raises:
        KernelError: not on such a GPU, or too many rows: ask `takes` first.
    """
    y_BN: Tensor = linear_op(x.reshape(-1, x.shape[-1]), weight_NK, bias_N, activated)
    return y_BN.view(*x.shape[:-1], -1)


def linears(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """x Wᵀ for up to five weights (N_i, K), in one launch.

    Raises:
        KernelError: as `linear`.
    """
    flat: list[Tensor] = linears_op(x.reshape(-1, x.shape[-1]), list(weights))
    return [y_BN.view(*x.shape[:-1], -1) for y_BN in flat]


def norm(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `elman_core.nn.add_rms_norm`: (n in the dtype of x, the stream in float32), contiguous.

    Raises:
        KernelError: not on such a GPU: ask `takes_norm` first.
    """
    width = x.shape[-1]
    n, stream = norm_op(x.reshape(-1, width), None if residual is None else residual.reshape(-1, width), weight_D, eps)
    return n.view(x.shape), stream.view(x.shape)


def draw(
    logits_BV: Tensor,
    waits_BV: Tensor | None,
    seen_BV: Tensor,
    drawn_B: Tensor,
    shown_B: Tensor,
    *,
    penalty: float,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    """Draw a class of every row, in place.

    Args:
        waits_BV: float32, draws of a standard exponential; may be None for temperature 0, which takes the largest.
        seen_BV: bool, contiguous: classes that have occurred; changed where a penalty (other than 1) reads them.
        drawn_B: int64, becomes the classes. shown_B: int64, becomes them too, or -1 where logits are not finite.
        top_k: 0 for all. top_p: 1 for all.

    Raises:
        KernelError: not on such a GPU, or tensors that do not fit together: ask `takes_draw` first.
    """
    if waits_BV is None and temperature > 0:
        raise KernelError("draw: a temperature above 0 needs waits")
    x = logits_BV if logits_BV.stride(1) == 1 else logits_BV.contiguous()
    run(
        None, "draw", x, (),
        logits=x, waits=None if waits_BV is None else waits_BV.contiguous(), seen=None if penalty == 1 else seen_BV,
        drawn=drawn_B, shown=shown_B, penalty=penalty, temperature=temperature, top_k=min(top_k, x.shape[1]),
        below=1 - top_p if top_p < 1 else -1,
    )  # fmt: skip


def _run_linear(x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activated: int) -> Tensor:
    x_BK, weight_NK = readable(x_BK), whole(weight_NK)
    y_BN = x_BK.new_empty(len(x_BK), len(weight_NK))
    bias_N = None if bias_N is None else bias_N.contiguous()
    run(None, "linear", x_BK, (weight_NK,), x=x_BK, weight=weight_NK, bias=bias_N, out=y_BN, activated=activated)
    return y_BN


def _run_linears(x_BK: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    x_BK, weights = readable(x_BK), [whole(w) for w in weights]
    made = [x_BK.new_empty(len(x_BK), len(w)) for w in weights]
    first, more, out, more_out = weights[0], weights[1:], made[0], made[1:]
    run(None, "linear", x_BK, weights, x=x_BK, weight=first, out=out, more=more, more_out=more_out)
    return made


def _fake_linears(x_BK: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [x_BK.new_empty(x_BK.shape[0], w.shape[0]) for w in weights]


def _run_norm(x_BD: Tensor, residual_BD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_BD = x_BD if x_BD.stride(1) == 1 else x_BD.contiguous()
    residual_BD, weight_D = None if residual_BD is None else residual_BD.contiguous(), weight_D.contiguous()
    n_BD, stream_BD = x_BD.new_empty(x_BD.shape), x_BD.new_empty(x_BD.shape, dtype=torch.float32)
    run(
        None, "norm", x_BD, (weight_D,),
        x=x_BD, residual=residual_BD, weight=weight_D, out=n_BD, stream_out=stream_BD, eps=eps,
    )  # fmt: skip
    return n_BD, stream_BD


def _fake_norm(x_BD: Tensor, _residual: Tensor | None, _weight: Tensor, _eps: float) -> tuple[Tensor, Tensor]:
    return x_BD.new_empty(x_BD.shape), x_BD.new_empty(x_BD.shape, dtype=torch.float32)


def _fake_linear(x_BK: Tensor, weight_NK: Tensor, _bias: Tensor | None, _activated: int) -> Tensor:
    return x_BK.new_empty(x_BK.shape[0], weight_NK.shape[0])


_library.define("decode_linear(Tensor x, Tensor weight, Tensor? bias, int activated) -> Tensor")
linear_op = implement(_library, "decode_linear", _run_linear, _fake_linear)
_library.define("decode_linears(Tensor x, Tensor[] weights) -> Tensor[]")
linears_op = implement(_library, "decode_linears", _run_linears, _fake_linears)
_library.define("decode_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor)")
norm_op = implement(_library, "decode_norm", _run_norm, _fake_norm)
