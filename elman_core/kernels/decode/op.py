"""The steps of decoding with few rows, one launch each: products as fast as weights can be read, and the steps between them.

    linear   y = x Wᵀ + b, with SiLU of the first columns if asked; `linears` computes several of one x
    norm     R' = R + x,  n = w R' (mean R'² + eps)^(-1/2)
    draw     a class from logits: penalty, temperature, top-k, top-p, and a race of exponentials

The `decode…` sources of `elman_csrc` run on NVIDIA GPUs (sm_80 and newer), for up to 64 rows and without gradients: products in
bfloat16 or float16, the others in float32 too. `takes…` tells whether a call fits; if not, the caller uses plain PyTorch. A
launch that does not fit raises a `KernelError`. The first two are operators known to FakeTensor, `torch.compile` and CUDA
graphs; `draw` is called outside of models.

Shapes: B rows, K inputs, N outputs, D width, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elman_core.kernels.dispatch import runs
from elman_core.kernels.launch import readable, whole
from elman_core.kernels.runtime import operator
from elman_core.registry.errors import KernelError

from . import run
from .run import MOST_ROWS, NARROW, most_rows

NAME = "decode"
MOST_LINEARS = 5
MOST_CLASSES = 256
WIDEST_NORM = 8192


def takes(x: Tensor, *weights: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `linear` runs here, or `linears` of several weights. Compiles and verifies it at the first use of a size.

    Args:
        x: (..., K). weights: (N, K) each. bias: (N,), of the one weight.

    Raises:
        KernelError: verification found the kernel wrong.
    """
    width, fits = x.shape[-1], run.alone(x) and x.dtype in NARROW
    for tensor in (*weights, *(() if bias is None else (bias,))):
        fits = fits and tensor.dtype == x.dtype and tensor.device == x.device
    if not fits or width % 8 or not 0 < x.numel() <= MOST_ROWS * width or not 1 <= len(weights) <= MOST_LINEARS:
        return False
    if any(weight.shape[1] != width for weight in weights) or (bias is not None and bias.shape != weights[0].shape[:1]):
        return False  # plain PyTorch then says what is wrong
    outputs = tuple(int(weight.shape[0]) for weight in weights)
    return runs(NAME, x, "linear", most_rows(x.numel() // width), int(weights[0].shape[1]), outputs)


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, activated: int = 0) -> Tensor:
    """x Wᵀ + b, (..., N) in the dtype of x; its first `activated` columns are rounded to that dtype and pass SiLU."""
    return linears(x, [weight_NK], bias_N, activated)[0]


def linears(x: Tensor, weights: Sequence[Tensor], bias_N: Tensor | None = None, activated: int = 0) -> list[Tensor]:
    """x Wᵀ for up to five weights (N_i, K), in one launch. `bias_N` and `activated` need a single weight."""
    flat: list[Tensor] = linear_op(x.reshape(-1, x.shape[-1]), list(weights), bias_N, activated)
    return [y_BN.view(*x.shape[:-1], -1) for y_BN in flat]


def _run_linear(x_BK: Tensor, weights: Sequence[Tensor], bias_N: Tensor | None, activated: int) -> list[Tensor]:
    x_BK, weights = readable(x_BK), [whole(w) for w in weights]
    made = [x_BK.new_empty(len(x_BK), len(w)) for w in weights]
    bias_N = None if bias_N is None else bias_N.contiguous()
    run.run(
        None, "linear", x_BK, weights,
        x=x_BK, weight=weights[0], bias=bias_N, out=made[0], activated=activated, map=weights[1:], map_out=made[1:],
    )  # fmt: skip
    return made


def _fake_linear(x_BK: Tensor, weights: Sequence[Tensor], _bias: Tensor | None, _activated: int) -> list[Tensor]:
    return [x_BK.new_empty(x_BK.shape[0], w.shape[0]) for w in weights]


linear_op = operator(
    "decode_linear(Tensor x, Tensor[] weights, Tensor? bias, int activated) -> Tensor[]", _run_linear, _fake_linear
)


def takes_norm(x: Tensor, residual: Tensor | None, weight: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether `norm` runs here. Compiles, verifies and raises as `takes`, for each width."""
    width = x.shape[-1]
    return (
        run.alone(x)
        and x.dtype == weight.dtype == out_dtype
        and weight.device == x.device
        and weight.shape == x.shape[-1:]
        and (residual is None or (residual.dtype == torch.float32 and residual.shape == x.shape))
        and (residual is None or residual.device == x.device)
        and width <= WIDEST_NORM
        and 0 < x.numel() <= MOST_ROWS * width
        and runs(NAME, x, "norm", int(weight.shape[0]))
    )


def norm(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `elman_core.nn.add_rms_norm`: (n in the dtype of x, the stream in float32), contiguous."""
    width = x.shape[-1]
    n, stream = norm_op(x.reshape(-1, width), None if residual is None else residual.reshape(-1, width), weight_D, eps)
    return n.view(x.shape), stream.view(x.shape)


def _run_norm(x_BD: Tensor, residual_BD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_BD = x_BD if x_BD.stride(1) == 1 else x_BD.contiguous()
    residual_BD, weight_D = None if residual_BD is None else residual_BD.contiguous(), weight_D.contiguous()
    n_BD, stream_BD = _fake_norm(x_BD)
    run.run(
        None, "norm", x_BD, (weight_D,),
        x=x_BD, residual=residual_BD, weight=weight_D, out=n_BD, stream_out=stream_BD, eps=eps,
    )  # fmt: skip
    return n_BD, stream_BD


def _fake_norm(x_BD: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    return x_BD.new_empty(x_BD.shape), x_BD.new_empty(x_BD.shape, dtype=torch.float32)


norm_op = operator(
    "decode_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor)", _run_norm, _fake_norm
)


def takes_draw(logits_BV: Tensor) -> bool:
    """Whether `draw` runs here, for any number of rows. Compiles, verifies and raises as `takes`, for each V."""
    classes = logits_BV.shape[1]
    return run.alone(logits_BV) and 0 < classes <= MOST_CLASSES and runs(NAME, logits_BV, "draw", int(classes))


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
    """Draw a class for every row, in place.

    Args:
        waits_BV: float32, draws of a standard exponential; may be None for temperature 0, which takes the largest score.
        seen_BV: bool, contiguous: classes that have occurred. With a penalty other than 1, the drawn classes are added.
        drawn_B: int64, receives the classes. shown_B: int64, likewise, but -1 for a row with logits that are not finite.
        top_k: 0 for all. top_p: 1 for all.

    Raises:
        KernelError: a temperature above 0 without waits, or tensors that do not fit together.
    """
    if waits_BV is None and temperature > 0:
        raise KernelError("draw: a temperature above 0 needs waits")
    x = logits_BV if logits_BV.stride(1) == 1 else logits_BV.contiguous()
    run.run(
        None, "draw", x, (),
        logits=x, waits=None if waits_BV is None else waits_BV.contiguous(), seen=None if penalty == 1 else seen_BV,
        drawn=drawn_B, shown=shown_B, penalty=penalty, temperature=temperature, top_k=min(top_k, x.shape[1]),
        below=1 - top_p if top_p < 1 else -1,
    )  # fmt: skip


# The draw in plain PyTorch: the truth for `draw`, and its replacement where it does not run.


def kept_scores(
    logits_BV: Tensor,
    seen_BV: Tensor | None,
    *,
    penalty: float,
    temperature: float,
    top_k: int,
    top_p: float,
) -> Tensor:
    """Scores after penalty, temperature, top-k and top-p, -inf for classes not to be drawn; float64 for float64, else float32.

    Args:
        seen_BV: bool: classes that have occurred in each row; None without a penalty. temperature: 0 keeps the scores.
        top_k: 0 for all. top_p: 1 for all.
    """
    scores_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
    if penalty != 1.0 and seen_BV is not None:
        punished_BV = torch.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty)
        scores_BV = torch.where(seen_BV, punished_BV, scores_BV)
    if temperature == 0:
        return scores_BV
    scores_BV = scores_BV / temperature
    if 0 < top_k < scores_BV.shape[-1]:
        least_B1 = scores_BV.topk(top_k, dim=-1).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < least_B1, -torch.inf)
    if top_p < 1:
        ordered_BV, order_BV = scores_BV.sort(dim=-1, stable=True)
        drop_BV = ordered_BV.softmax(-1).cumsum(-1) <= 1 - top_p
        drop_BV[:, -1] = False  # the most likely always stays
        scores_BV = scores_BV.masked_fill(drop_BV.scatter(1, order_BV, drop_BV), -torch.inf)
    return scores_BV


def race(scores_BV: Tensor, waits_BV: Tensor | None) -> Tensor:
    """The values whose largest is the drawn class: a race of exponentials, as torch.multinomial draws one sample, but without
    reading values on the host. For temperature 0, without `waits_BV`, they are the scores."""
    return scores_BV if waits_BV is None else scores_BV.softmax(-1) / waits_BV
