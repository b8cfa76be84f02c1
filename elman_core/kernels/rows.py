"""`RowsKernel`: a matrix state whose rows share one matrix, with one kernel in each direction.

    S_t = f_t S_{t-1} + (1 - f_t) tanh(S_{t-1} W + k_t v_tᵀ),   o_t = S_tᵀ q_t

for every head, registered with `torch.library` as `elman::rows_NAME` and its backward. On NVIDIA GPUs, in 16-bit storage, the
kernels of `elman_csrc` (rows.cuh) run, compiled for each dtype, K and V at first use; elsewhere the reference runs.

Shapes: B batch, T time, H heads, G = H or 1 heads of q and k, K rows (keys), V columns (values).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.registry.errors import ConfigError, KernelError

from . import build, launch
from .build import Extension
from .choice import Compiled, choose, in_words, register
from .runtime import Wanted, check, compute_dtype, operator, tensors
from .spec import Backend, Case, Cell, Grid, Inputs, KernelSpec, Outputs, padding_mask

DTYPES = (torch.bfloat16, torch.float16)
case = partial(Case.of, "BTHKV")
_SEGMENT = 16  # steps between saved states, as in rows.cuh
_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor f, Tensor w"
_FLAGS = "Tensor? mask, Tensor? starts"
_WANTED = {
    "q": Wanted("BTGK", "stored"), "k": Wanted("BTGK"), "v": Wanted("BTHV"), "f": Wanted("BTH", "stored"),
    "w": Wanted("HVV", "stored"), "S0": Wanted("BHKV", "stored", True), "mask": Wanted("BT", "bool", True),
    "starts": Wanted("BT", "bool", True),
}  # fmt: skip


class RowsKernel(Compiled):
    """The op of one variant. Make one at module level and call it.

    Args:
        name: of the variant; lower case. reference: `reference(q, k, v, f, w, state, mask, starts) -> (o, S_T)`, the truth.
        adjust: `adjust(inputs, options)` changes the random inputs of a verification in place (`Cell`).
    """

    def __init__(
        self,
        name: str,
        *,
        reference: Callable[..., tuple[Tensor, Tensor]],
        adjust: Callable[[Inputs, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.name, self.reference = name, reference
        self.cell = Cell(name, Path(), "", reference, adjust=adjust)
        self._backward = operator(
            f"rows_{name}_backward(Tensor dy, Tensor? ds1, {_ARGUMENTS}, Tensor saved, {_FLAGS}) -> {tensors(6)}",
            partial(_run_backward, name),
            _fake_backward,
        )
        self.op = operator(
            f"rows_{name}({_ARGUMENTS}, Tensor? state, {_FLAGS}, bool keep) -> {tensors(3)}",
            partial(_run_forward, name),
            _fake_forward,
            _save,
            self._differentiate,
        )
        register(self)

    def __call__(
        self, q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, f_BTH: Tensor, w_HVV: Tensor,
        state_BHKV: Tensor | None = None, mask_BT: Tensor | None = None, starts_BT: Tensor | None = None,
        backend: Backend = "auto",
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The recurrence over all time steps.

        Args:
            q_BTGK, k_BTGK, v_BTHV: float32, bfloat16, float16 or float64, of one dtype; any strides.
            f_BTH: from 0 to 1. w_HVV: W; a kernel reads it in the dtype of q. Both in any floating dtype.
            state_BHKV: S_0; None is zeros. mask_BT: bool; where False the state is held and o is arbitrary.
            starts_BT: bool; where True the state is set to 0 before the step, masked or not.
            backend: "auto", "cuda" or "reference".

        Returns:
            o (B, T, H, V) in the dtype of q, S_T (B, H, K, V) in float32 (float64 for float64).

        Raises:
            ConfigError: shapes, dtypes or devices do not fit together.
            KernelError: the named back end cannot run this call.
            NotImplementedError: a back end other than "reference" was named under torch.func.
        """
        given = (q_BTGK, k_BTGK, v_BTHV, f_BTH, w_HVV, state_BHKV, mask_BT, starts_BT)
        sizes = check(self.name, _WANTED, given)
        if sizes["G"] not in (1, sizes["H"]):
            raise ConfigError(
                f"{self.name}: q and k have {sizes['G']} heads beside v with {sizes['H']}; give as many, or one"
            )
        wide = compute_dtype(q_BTGK)
        asked: Backend = "reference" if backend == "auto" and wide == torch.float64 else backend
        if choose(self.name, asked, q_BTGK, lambda: (sizes["K"], sizes["V"]), "reference") == "reference":
            return self.reference(*given)
        state = None if state_BHKV is None else state_BHKV.to(wide)
        inputs = (q_BTGK, k_BTGK, v_BTHV, f_BTH.to(wide), w_HVV.to(q_BTGK.dtype))
        keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, state))
        o, last, _ = self.op(*inputs, state, mask_BT, starts_BT, keep)
        return o, last

    def spec(self) -> KernelSpec:
        """What `elman verify` checks. Options of a case: packed: documents start in its rows; shared: one head of q and k."""
        kernel: Any = self

        def call(backend: str, inputs: Inputs, _options: Mapping[str, Any]) -> Outputs:
            o, state = kernel(*inputs.values(), backend=backend)
            return {"o": o, "S": state}

        def builds(_target: Any, _arch: str, rows: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Extension]:
            return [extension(self.name, dtype, K, 16) for dtype in dtypes or DTYPES[:1] for K in rows or (16, 64)]

        home = Path(inspect.getfile(inspect.unwrap(self.reference)))
        return KernelSpec(
            name=self.name,
            cases=lambda _target, grid: list(_cases(grid)),
            make_inputs=lambda case, generator: kernel.cell.adjusted(_make_inputs(case, generator), case),
            call=call,
            states=("S",),
            extension=lambda _target: extension(self.name, torch.bfloat16, 16, 16),
            op=lambda _backend, inputs, _options: (self.op, (*inputs.values(), True)),
            targets=("cuda",) if build.targets() else (),
            builds=builds,
            module=lambda _target, c: extension(self.name, c.dtype, c.sizes["K"], c.sizes["V"]),
            emulated=(case((2, 20, 3, 16, 16), torch.bfloat16, masked=True, packed=True),),
            visible=lambda inputs: {"o": mask[..., None, None]} if (mask := inputs["mask"]) is not None else {},
            record=home.with_name("errors.json"),
            python=(home, Path(__file__)),
        )

    def backend(self, device: torch.device | str, rows: int, columns: int) -> str:
        """What "auto" runs at this size, in words. Compiles nothing: before the first use, it says what will be tried."""
        return in_words(self.name, device, "reference", lambda *size: size == (rows, columns))

    def prepare(self, dtype: torch.dtype, rows: int, columns: int) -> str:
        _module(self.name, dtype, rows, columns, torch.cuda.current_device())
        return "a block for each head and row of the batch, a warp for 16 rows of the state"

    def cases(self, dtype: torch.dtype, rows: int, columns: int) -> Sequence[Case]:
        return [case((2, 49, 3, rows, columns), dtype, masked=True, packed=True)]

    def _differentiate(self, ctx: Any, dy: Tensor | None, ds1: Tensor | None, _saved: Any) -> tuple[Tensor | None, ...]:
        *inputs, saved, mask, starts = ctx.saved_tensors
        dy = torch.zeros_like(inputs[2]) if dy is None else dy
        *gradients, ds0 = self._backward(dy, ds1, *inputs, saved, mask, starts)
        return *gradients, ds0 if ctx.has_state else None, None, None, None


def extension(name: str, dtype: torch.dtype, rows: int, columns: int) -> Extension:
    """What is compiled for a storage dtype, K and V.

    Raises:
        KernelError: there is no kernel for these, or the sources are not installed.
    """
    if dtype not in DTYPES or rows % 16 or columns not in (16, 32) or not 0 < rows * columns <= 1024:
        raise KernelError(
            f"{name}: no kernel for K={rows} V={columns} in {dtype}. There are: V 16 or 32, K a multiple of 16, K V up to "
            "1024; bfloat16, float16"
        )
    title = f"{name}_rows_{str(dtype).removeprefix('torch.')}_{rows}x{columns}"
    return build.shipped(title, "rows_cuda.cu", DTYPE=dtype, ROWS=rows, COLUMNS=columns)


_module = launch.opener("rows", extension)


def _run(name: str, function: str, q: Tensor, k: Tensor, v: Tensor, mask: Any, starts: Any, **given: Any) -> None:
    shared = int(q.shape[2] < v.shape[2])
    q, k, v = (launch.aligned(x, launch.ALIGNMENT) for x in (q, k, v))
    given = {n: launch.whole(x) for n, x in (given | {"mask": mask, "starts": starts}).items()}
    with launch.on(q):
        module = _module(name, q.dtype, q.shape[3], v.shape[3], q.get_device())
        module.run(function, q=q, k=k, v=v, shared=shared, stream=launch.stream(q), **given)


def _run_forward(
    name: str, q: Tensor, k: Tensor, v: Tensor, f: Tensor, w: Tensor, state: Any, mask: Any, starts: Any, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    o, last, saved = _fake_forward(q, k, v, f, w, state, mask, starts, keep)
    _run(name, "forward", q, k, v, mask, starts, f=f, w=w, s0=state, s1=last, o=o, saved=saved if keep else None)
    return o, last, saved


def _run_backward(
    name: str, dy: Tensor, ds1: Tensor | None, q: Tensor, k: Tensor, v: Tensor, f: Tensor, w: Tensor, saved: Tensor,
    mask: Any, starts: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    (B, T, H, V), K = v.shape, q.shape[3]
    dq, dk = (q.new_empty(B, T, H, K) for _ in range(2))
    dv, df, ds0 = v.new_empty(v.shape), f.new_empty(f.shape), f.new_empty(B, H, K, V)
    dw = f.new_empty(B, H, K // 16, V, V)  # of each row of the batch, and of 16 rows of the state
    made = {"ds0": ds0, "dq": dq, "dk": dk, "dv": dv, "df": df, "dw": dw}
    _run(name, "backward", q, k, v, mask, starts, f=f, w=w, saved=saved, dy=dy.to(q.dtype), ds1=ds1, **made)
    if q.shape[2] < H:  # the heads' shares
        dq, dk = dq.sum(2, keepdim=True), dk.sum(2, keepdim=True)
    return dq, dk, dv, df, dw.sum((0, 2)).to(w.dtype), ds0


def _fake_forward(q: Tensor, _k: Any, v: Tensor, f: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    (B, T, H, V), K = v.shape, q.shape[3]
    saved = f.new_empty((B, H, (T + _SEGMENT - 1) // _SEGMENT, K, V) if rest[-1] else (0,))
    return v.new_empty(v.shape), f.new_empty(B, H, K, V), saved


def _fake_backward(_dy: Any, _ds1: Any, *rest: Any) -> tuple[Tensor, ...]:
    q, _, v, f, *_ = rest
    return *(x.new_empty(x.shape) for x in rest[:5]), f.new_empty(v.shape[0], v.shape[2], q.shape[3], v.shape[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *given, state, mask, starts, _keep = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*given, output[2], mask, starts)
    ctx.has_state = state is not None


def _make_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """W about orthogonal, q and k of length 1, so that the state neither dies nor explodes."""
    B, T, H, K, V = (case.sizes[letter] for letter in "BTHKV")
    heads, wide = 1 if case.options.get("shared") else H, compute_dtype(case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        **{n: F.normalize(normal(B, T, heads, K), dim=-1).to(case.dtype) for n in ("q", "k")},
        "v": normal(B, T, H, V).to(case.dtype),
        "f": (1 - 0.5 * torch.rand(B, T, H, generator=generator) ** 2).to(wide),
        "w": (0.9 * torch.linalg.qr(normal(H, V, V))[0]).to(case.dtype),
        "S0": None if case.bare else (0.4 * normal(B, H, K, V)).to(wide),
        "mask": padding_mask(T, B, generator).t().contiguous() if case.masked else None,
        "starts": torch.rand(B, T, generator=generator) < 0.1 if case.options.get("packed") else None,
    }


def _cases(grid: Grid) -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float16):
        for size in ((16, 16), (64, 16), (32, 32)):
            yield case((2, 37, 3, *size), dtype)
            yield case((2, 49, 3, *size), dtype, masked=True, packed=True)
        yield case((3, 1, 2, 16, 16), dtype)
        yield case((2, 33, 5, 64, 16), dtype, shared=True)
        yield case((2, 40, 2, 16, 32), dtype, strided=True)
        yield case((2, 48, 2, 32, 16), dtype, bare=True)
        yield case((1, 2049, 4, 16, 16), dtype)
        if grid == "full":
            for K, V in ((16, 16), (32, 16), (48, 16), (64, 16), (16, 32), (32, 32)):
                for steps in (1, 2, 15, 16, 17, 63):
                    yield case((2, steps, 3, K, V), dtype, masked=steps % 2 == 1, packed=steps > 16)
                yield case((3, 31, 7, K, V), dtype, shared=True, masked=True)
            yield case((4, 512, 370, 16, 16), dtype)
            yield case((1, 16384, 2, 64, 16), dtype, shared=True)
