"""What decoding does with few rows, one launch each: products at the speed at which weights are read, and what lies between.

    linear   y = x Wᵀ + b, of which the first columns may pass through SiLU; `linears` several of them of one x
    Step     a = x Vᵀ + b + h Wᵀ,  (h, y) = cell(a, h, e): a dense cell's time step with the projection in front of it
    norm     R' = R + x,  n = w R' (mean R'² + eps)^(-1/2)
    draw     a class from logits: penalty, temperature, top-k, top-p, and a race of exponentials

All run what the `few_rows…` sources of `elman_csrc` compile to, on NVIDIA GPUs (sm_80 and newer), for up to 64 rows and
without gradients: products in bfloat16 or float16, the others in float32 too. `takes…` says whether that is so; whoever asks
has another way at hand. The first three are operators known to FakeTensor, `torch.compile` and CUDA graphs; `draw` is called
outside of models.

Shapes: B rows, K inputs, N outputs; T time, d width of a cell; V classes.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from elman_core.registry.errors import KernelError

from . import build
from .build import Extension
from .few_rows_native import make_call, open_library, rows, whole
from .policy import load_or_warn, mode

if TYPE_CHECKING:
    from .dense import DenseKernel

MOST_ROWS = 64
EARLY = True
"""Whether a kernel may load its weights while the one in front still runs (compute capability 9.0 and newer)."""

MOST_LINEARS = 5
MOST_CLASSES = 256
WIDEST_NORM = 8192

_DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_NARROW = (torch.bfloat16, torch.float16)
_library = Library("elman", "FRAGMENT")
_steps: dict[str, Step] = {}


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` runs here. Compiles it at the first use of a dtype.

    Args:
        x: (..., K). weight: (N, K).
    """
    return _fits(x, weight) and _ready("", x.device.index, x.dtype, mode())


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, activated: int = 0) -> Tensor:
    """x Wᵀ + b, (..., N) in the dtype of x; SiLU of its first `activated` columns, rounded before it as a tensor would be.

    Raises:
        KernelError: not on such a GPU, or too many rows: ask `takes` first.
    """
    y_BN: Tensor = _linear(x.reshape(-1, x.shape[-1]), weight_NK, bias_N, activated)
    return y_BN.view(*x.shape[:-1], -1)


def linears(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """x Wᵀ for up to five weights (N_i, K), in one launch.

    Raises:
        KernelError: as `linear`.
    """
    flat: list[Tensor] = _linears(x.reshape(-1, x.shape[-1]), list(weights))
    return [y_BN.view(*x.shape[:-1], -1) for y_BN in flat]


def takes_norm(x: Tensor, residual: Tensor | None, weight: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether `norm` runs here."""
    return (
        _alone(x)
        and x.dtype == weight.dtype == out_dtype
        and (residual is None or residual.dtype == torch.float32)
        and x.shape[-1] <= WIDEST_NORM
        and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        and _ready("", x.device.index, x.dtype, mode())
    )


def norm(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `elman_core.nn.add_rms_norm`: (n in the dtype of x, the stream in float32), contiguous.

    Raises:
        KernelError: not on such a GPU: ask `takes_norm` first.
    """
    width = x.shape[-1]
    n, stream = _norm(x.reshape(-1, width), None if residual is None else residual.reshape(-1, width), weight_D, eps)
    return n.view(x.shape), stream.view(x.shape)


def takes_draw(logits_BV: Tensor) -> bool:
    """Whether `draw` runs here, for any number of rows."""
    return (
        _alone(logits_BV)
        and logits_BV.shape[1] <= MOST_CLASSES
        and _ready("", logits_BV.device.index, logits_BV.dtype, mode())
    )


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
        KernelError: not on such a GPU: ask `takes_draw` first.
    """
    x = logits_BV if logits_BV.stride(1) == 1 else logits_BV.contiguous()
    call = make_call(x, x.shape[1], None, waits_BV, drawn_B)
    call.w, call.last, call.activated = seen_BV.data_ptr(), shown_B.data_ptr(), top_k
    call.value[0], call.value[1], call.value[2] = penalty, temperature, 1 - top_p if top_p < 1 else -1
    _launch("", "draw", call, x)


class Step:
    """One time step of a dense cell and the projection in front of it. Make one at module level, beside the kernel.

    Args:
        kernel: whose cell it runs; its W has one factor.
    """

    def __init__(self, kernel: DenseKernel) -> None:
        self.kernel = kernel
        name, count = f"dense_{kernel.name}_step", len(kernel.extras)
        extras = "".join(f", Tensor e{i}" for i in range(count))
        _library.define(f"{name}(Tensor x, Tensor v, Tensor? bias{extras}, Tensor w, Tensor h) -> (Tensor, Tensor)")
        _library.impl(name, self._run, "CompositeExplicitAutograd")
        register_fake(f"elman::{name}", _fake_step, lib=_library)
        self.op: Callable[..., tuple[Tensor, Tensor]] = getattr(torch.ops.elman, name).default
        _steps[kernel.name] = self

    def takes(self, x_TBK: Tensor, w_dd: Tensor, mask_TB: Tensor | None = None) -> bool:
        """Whether this is a single step that runs here. Compiles it at the first use of a dtype."""
        if x_TBK.shape[0] != 1 or mask_TB is not None or w_dd.shape[0] % 8 or not _fits(x_TBK, w_dd):
            return False
        return _ready(self.kernel.name, x_TBK.device.index, x_TBK.dtype, mode())

    def __call__(self, x_1BK: Tensor, v_dK: Tensor, bias_d: Tensor | None, *rest: Tensor) -> tuple[Tensor, Tensor]:
        """`step(x, v, bias, *extras, w, h) -> (y (1, B, d) in the dtype of x, h (B, d) in float32)`.

        Args:
            x_1BK: the cell's input before its projection. v_dK, bias_d: that projection; v may be w itself, which is then
                read once. extras: (1, B, d) each. w: (d, d), rows are outputs. h: (B, d), float32.

        Raises:
            KernelError: not on such a GPU, or too many rows: ask `takes` first.
        """
        *extras, w_dd, h_Bd = rest
        y_Bd, last_Bd = self.op(x_1BK[0], v_dK, bias_d, *(e[0] for e in extras), w_dd, h_Bd)
        return y_Bd[None], last_Bd

    def _run(self, x: Tensor, v: Tensor, bias: Tensor | None, *rest: Tensor) -> tuple[Tensor, Tensor]:
        *extras, w, h = rest
        tied = v.data_ptr() == w.data_ptr()
        x, w, h = rows(x), whole(w), whole(h.float())
        v = w if tied else whole(v)
        extras = [e if e.stride(1) == 1 else e.contiguous() for e in extras]
        y, last = x.new_empty(len(x), len(w)), torch.empty_like(h)
        call = make_call(x, len(w), v, bias, y)
        call.w, call.h, call.last, call.extras = w.data_ptr(), h.data_ptr(), last.data_ptr(), len(extras)
        for i, e in enumerate(extras):
            call.extra[i], call.extra_step[i] = e.data_ptr(), e.stride(0)
        _launch(self.kernel.name, "step", call, x)
        return y, last


def extension(dtype: torch.dtype, kernel: DenseKernel | None = None) -> Extension:
    """What is compiled for a storage type: the step of a kernel's cell, or the linear map.

    Raises:
        KernelError: the sources are not installed.
    """
    if importlib.util.find_spec("elman_csrc") is None:
        raise KernelError("the kernel sources are not installed: type `pip install elman-csrc`")
    import elman_csrc

    cell = () if kernel is None else (("ELMAN_CELL", kernel.cell),)
    return Extension(
        name=f"{'linear' if kernel is None else kernel.name + '_step'}_few_rows_{str(dtype).removeprefix('torch.')}",
        binding=elman_csrc.get_bindings() / "few_rows_cuda.cu",
        include=(elman_csrc.get_include(),),
        header=None if kernel is None else kernel.header,
        defines=(*cell, ("ELMAN_DTYPE", str(_DTYPES[dtype]))),
        python=False,
    )


def _alone(x: Tensor) -> bool:
    """Whether nobody else has a say in it: neither autograd nor autocast."""
    return x.is_cuda and x.dtype in _DTYPES and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cuda")


def _fits(x: Tensor, weight: Tensor) -> bool:
    width = x.shape[-1]
    return (
        _alone(x)
        and x.dtype in _NARROW
        and weight.dtype == x.dtype
        and weight.device == x.device
        and width % 8 == 0
        and 0 < x.numel() <= MOST_ROWS * width
    )


@torch.compiler.assume_constant_result
def _ready(name: str, index: int, dtype: torch.dtype, _mode: str) -> bool:
    """Whether the module is there, by the name of its kernel; `torch.compile` evaluates this while it traces."""
    if _mode == "off":
        return False
    with torch.cuda.device(index):
        return load_or_warn(f"{name or 'linear maps'} of few rows", lambda: _module(name, dtype)) is not None


@cache
def _module(name: str, dtype: torch.dtype) -> Any:
    what = extension(dtype, _steps[name].kernel if name else None)
    return open_library(build.build(what, build.local_arch(what)))


@cache
def _may_begin_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _launch(name: str, function: str, call: Any, x: Tensor) -> None:
    if function in ("linear", "step") and (len(x) > MOST_ROWS or x.dtype not in _NARROW):
        raise KernelError(
            f"{function}: few rows are up to {MOST_ROWS} in bfloat16 or float16, not {len(x)} in {x.dtype}"
        )
    call.early = EARLY and _may_begin_early(x.device)
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        said = getattr(_module(name, x.dtype), f"elman_few_rows_{function}")(ctypes.byref(call))
    if said is not None:
        raise KernelError(f"kernel {f'{name} {function}'.strip()} of few rows: {said.decode()}")


def _run_linear(x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activated: int) -> Tensor:
    x_BK, weight_NK = rows(x_BK), whole(weight_NK)
    y_BN = x_BK.new_empty(len(x_BK), len(weight_NK))
    call = make_call(x_BK, len(weight_NK), weight_NK, bias_N, y_BN)
    call.activated = activated
    _launch("", "linear", call, x_BK)
    return y_BN


def _run_linears(x_BK: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    x_BK, weights = rows(x_BK), [whole(w) for w in weights]
    if not 1 <= len(weights) <= MOST_LINEARS:
        raise KernelError(f"few rows go through up to {MOST_LINEARS} linear maps at once, not {len(weights)}")
    made = [x_BK.new_empty(len(x_BK), len(w)) for w in weights]
    call = make_call(x_BK, len(weights[0]), weights[0], None, made[0])
    call.extras = len(weights) - 1
    for i, (w, y) in enumerate(zip(weights[1:], made[1:], strict=True)):
        call.extra[i], call.extra_step[i], call.extra_out[i] = w.data_ptr(), len(w), y.data_ptr()
    _launch("", "linear", call, x_BK)
    return made


def _fake_linears(x_BK: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [x_BK.new_empty(x_BK.shape[0], w.shape[0]) for w in weights]


def _run_norm(x_BD: Tensor, residual_BD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_BD = x_BD if x_BD.stride(1) == 1 else x_BD.contiguous()
    residual_BD, weight_D = None if residual_BD is None else residual_BD.contiguous(), weight_D.contiguous()
    n_BD, stream_BD = x_BD.new_empty(x_BD.shape), x_BD.new_empty(x_BD.shape, dtype=torch.float32)
    call = make_call(x_BD, x_BD.shape[1], weight_D, None, n_BD)
    call.h, call.last = 0 if residual_BD is None else residual_BD.data_ptr(), stream_BD.data_ptr()
    call.value[0] = eps
    _launch("", "norm", call, x_BD)
    return n_BD, stream_BD


def _fake_norm(x_BD: Tensor, _residual: Tensor | None, _weight: Tensor, _eps: float) -> tuple[Tensor, Tensor]:
    return x_BD.new_empty(x_BD.shape), x_BD.new_empty(x_BD.shape, dtype=torch.float32)


def _fake_linear(x_BK: Tensor, weight_NK: Tensor, _bias: Tensor | None, _activated: int) -> Tensor:
    return x_BK.new_empty(x_BK.shape[0], weight_NK.shape[0])


def _fake_step(x_BK: Tensor, _v: Tensor, _bias: Tensor | None, *rest: Tensor) -> tuple[Tensor, Tensor]:
    w, h = rest[-2:]
    return x_BK.new_empty(x_BK.shape[0], w.shape[0]), h.new_empty(h.shape, dtype=torch.float32)


_library.define("few_rows_linear(Tensor x, Tensor weight, Tensor? bias, int activated) -> Tensor")
_library.impl("few_rows_linear", _run_linear, "CompositeExplicitAutograd")
register_fake("elman::few_rows_linear", _fake_linear, lib=_library)
_linear = torch.ops.elman.few_rows_linear.default
_library.define("few_rows_linears(Tensor x, Tensor[] weights) -> Tensor[]")
_library.impl("few_rows_linears", _run_linears, "CompositeExplicitAutograd")
register_fake("elman::few_rows_linears", _fake_linears, lib=_library)
_linears = torch.ops.elman.few_rows_linears.default
_library.define("few_rows_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor)")
_library.impl("few_rows_norm", _run_norm, "CompositeExplicitAutograd")
register_fake("elman::few_rows_norm", _fake_norm, lib=_library)
_norm = torch.ops.elman.few_rows_norm.default
