"""`MatrixKernel`: one object turns a matrix-state cell into a differentiable op.

The op is the recurrence of H heads, each with a matrix S of N rows (keys) and V independent columns (lines, in C++),

    r = Sᵀ k,   S = phi(keep S + k writeᵀ),   o = Sᵀ q,   (keep, write) of a column = cell(r, its lines, scalars, params)

It is the operator `elman::matrix_NAME`. Every `Backend` but "torch" computes it; the reference runs where no kernel does.

There are two forms. A call takes q, k and the cell's inputs as separate tensors. `fused` (`elman::matrix_packed_NAME`) takes q,
k and the lines in one tensor, as their product leaves them. In both, the kernel computes SiLU, the L2 norm and the maps of
scalars (`Maps`).

Shapes: B batch, T time, H heads, N rows, V columns, L lines, C = 2 H N + L H V.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from elman_core.kernels.dispatch import Compiled, choose, in_words, pays, register
from elman_core.kernels.operators import Operator
from elman_core.kernels.runtime import check, compute_dtype
from elman_core.kernels.spec import Backend, Case, KernelSpec, limit
from elman_core.registry.errors import ConfigError

from . import native, problems
from .portable import recurrence
from .spec import FAMILY, PACKED, Form, Maps, MatrixCell, Size
from .step import Step

Reference = Callable[..., tuple[Tensor, Tensor]]


class MatrixKernel(Compiled):
    """The op of one matrix-state cell. Make one at module level.

    Args:
        name: of the variant; lower case.
        header: the cell header, as in `elman/matrix_state_cell.h` of `elman_csrc`.
        reference: `reference(q, k, *vectors, v, *lines, *scalars, *params, state, mask, starts, **options) -> (o, state)`,
            called with the inputs after `maps`.
        vectors: names of the inputs (B, T, H, N) beside q and k, at most 3.
        lines: names of the inputs (B, T, H, V) beside v, at most 3. scalars: names of the inputs (B, T, H), at most 3.
            params: names of the learned constants (H, V), at most 4. All in the order of the cell's.
        optional: the last scalar, if it may be None. options: names of bools, which are also keywords of the reference. The
            cell's template arguments are the options, then whether the optional scalar is given.
        shared: which of q, k and the lines all heads share; these are (B, T, 1, N) or (B, T, 1, V).
        elementwise, delta: whether the header says so: the first also for `energy`, the second with linear_state on.
        maps: the maps of the inputs before the recurrence that the variant uses. A call without maps uses the first, and
            `elman build` compiles it.
        rows: the sizes N = V that `elman build` compiles by default.
        cell: the C++ type of the cell, or the name of the template; "elman::NAME::Cell" unless given. adjust: as in `Cell`.

    Raises:
        ConfigError: inputs that no cell can have.
    """

    cpu = True

    def __init__(
        self,
        name: str,
        *,
        header: Path,
        reference: Reference,
        vectors: Sequence[str] = (),
        lines: Sequence[str] = (),
        scalars: Sequence[str] = (),
        params: Sequence[str] = (),
        optional: Sequence[str] = (),
        options: Sequence[str] = (),
        shared: Sequence[str] = (),
        elementwise: bool = False,
        delta: bool = False,
        maps: Sequence[Maps] = (Maps(),),
        rows: Sequence[int] = (16, 24, 32),
        adjust: Callable[[dict[str, Any], Mapping[str, Any]], None] | None = None,
        cell: str | None = None,
    ) -> None:
        limit(name, vectors=(vectors, 0, 3), lines_beside_v=(lines, 0, 3), scalars=(scalars, 0, 3 - delta))
        limit(name, params=(params, 0, 4))
        self.name = name
        self.cell = MatrixCell(
            name, Path(header), cell or f"elman::{name}::Cell", reference, vectors=tuple(vectors), lines=("v", *lines),
            scalars=tuple(scalars), params=tuple(params), optional=tuple(optional), options=tuple(options),
            shared=tuple(shared), elementwise=elementwise, delta=delta, maps=tuple(maps), rows=tuple(rows), adjust=adjust,
        )  # fmt: skip
        wanted = FAMILY.wanted(self.cell) | PACKED.wanted(self.cell)
        heads = {name: "1" if name in shared else "H" for name in wanted}
        self._wanted = {n: x._replace(shape=x.shape.replace("?", heads[n])) for n, x in wanted.items()}
        how = (self.cell, native.run, (), native.gradients)
        self._apart, self._packed = Operator(FAMILY, *how), Operator(PACKED, *how)
        register(self)
        self._step = Step(self.cell, lambda: problems.make_step_spec(self.cell, self.spec(), self._apart, self._packed))

    def __call__(
        self,
        q_BTHN: Tensor,
        k_BTHN: Tensor,
        *inputs: Tensor | None,
        state_BHNV: Tensor | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
        a_log_H: Tensor | None = None,
        dt_bias_H: Tensor | None = None,
        maps: Maps | None = None,
        backend: Backend = "auto",
        **more: Any,
    ) -> tuple[Tensor, Tensor]:
        """The recurrence, as `reference`.

        Args:
            q_BTHN, k_BTHN: float32, bfloat16, float16 or float64; any strides. (B, T, 1, N) where shared.
            inputs: vectors (B, T, H, N), v and the other lines (B, T, H, V), scalars (B, T, H) and params (H, V), in the order
                of the cell's, or by name. Params and scalars with the map "given" are computed in float32 (float64 for
                float64). A vector in float32 beside 16 bits is not rounded, and nor is its gradient.
            state_BHNV: S_0; None is zeros. mask_BT: bool; where False the state is held and o is arbitrary.
            starts_BT: bool; where True the state is set to 0 before the step, masked or not.
            a_log_H, dt_bias_H: needed by the map "mamba", and allowed only with it.
            backend: as `Backend` in kernels/spec.py says, with what a call raises.
            more: the cell's options; False by default.

        Returns:
            o (B, T, H, V) in the dtype of q, S_T (B, H, N, V) in float32 (float64 for float64).
        """
        given = self._bind(self.cell.names, inputs, more)
        return self._recur(
            {"q": q_BTHN, "k": k_BTHN, **given}, {}, state_BHNV, mask_BT, starts_BT, a_log_H, dt_bias_H, maps, backend, **more
        )  # fmt: skip

    def fused(
        self, packed_BTC: Tensor, *inputs: Tensor | None, n_state: int, heads: int | None = None, **more: Any
    ) -> tuple[Tensor, Tensor]:
        """The recurrence of q, k and lines that are side by side in one tensor, as one product leaves them.

        Args:
            packed_BTC: q, k and the vectors (H n_state each), v and the other lines (H V each), head-major.
            inputs: scalars and params. heads: H; needed without scalars. more: as in a call.

        Returns, raises: as a call.
        """
        lines = self.cell.lines
        names = self.cell.names[len(self.cell.packed) :]
        keys = 2 + len(self.cell.vectors)
        given = self._bind(names, inputs, more)
        if self.cell.shared:
            raise ConfigError(f"{self.name}: {self.cell.shared[0]} is shared by all heads; pass q, k and lines apart")
        C = check(self.name, {"packed": self._wanted["packed"]}, [packed_BTC])["C"]
        first = given[names[0]] if self.cell.scalars else None
        H = heads or (0 if first is None else first.shape[-1])
        V = (C // H - keys * n_state) // len(lines) if H else 0
        if n_state < 1 or V < 1 or H * (keys * n_state + len(lines) * V) != C:
            raise ConfigError(
                f"{self.name}: packed has {C} columns, which {H} heads of {keys} x {n_state} keys and {len(lines)} x V values "
                "do not fill"
            )
        return self._recur({"packed": packed_BTC, **given}, {"H": H, "N": n_state, "V": V}, **more)

    def _bind(
        self, names: Sequence[str], inputs: Sequence[Tensor | None], more: dict[str, Any]
    ) -> dict[str, Tensor | None]:
        """The cell's inputs by name. Takes those that were given by name out of `more`. Raises `ConfigError`."""
        given = dict.fromkeys(names) | dict(zip(names, inputs, strict=False))
        given |= {n: more.pop(n) for n in names if n in more}
        missing = [n for n, x in given.items() if x is None and n not in self.cell.optional]
        if missing or len(inputs) > len(names):
            wanted = ", ".join(f"{n} ({', '.join(self._wanted[n].shape)})" for n in names) or "no input"
            got = ", ".join(str(x if x is None else tuple(x.shape)) for x in inputs)
            wrong = f"it got {got}" if inputs else f"{missing[0]} is missing"
            raise ConfigError(f"{self.name} takes {wanted} beside its keys; {wrong}")
        return given

    def _recur(
        self, tensors: dict[str, Any], sizes: dict[str, int], state_BHNV: Tensor | None = None,
        mask_BT: Tensor | None = None, starts_BT: Tensor | None = None, a_log_H: Tensor | None = None,
        dt_bias_H: Tensor | None = None, maps: Maps | None = None, backend: Backend | Literal["step"] = "auto",
        **options: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Either form. tensors: by name, q and k or packed first. sizes: those that no tensor shows. backend: "step" is the
        kernel of one step, for its verification."""
        cell = self.cell
        maps = cell.maps[0] if maps is None else maps
        cell.check_maps(maps)
        if unknown := [n for n in options if n not in cell.options]:
            raise ConfigError(f"{self.name} has the options {', '.join(cell.options) or '(none)'}, not {unknown[0]!r}")
        if maps.mamba != (a_log_H is not None and dt_bias_H is not None):
            raise ConfigError(f"{self.name}: A_log and dt_bias belong to the map 'mamba', and to it alone")
        tensors |= {"S0": state_BHNV, "A_log": a_log_H, "dt_bias": dt_bias_H, "mask": mask_BT, "starts": starts_BT}
        sizes = check(self.name, {n: self._wanted[n] for n in tensors}, tuple(tensors.values()), sizes)
        H, N, V = (sizes[letter] for letter in "HNV")
        first = next(iter(tensors.values()))
        full = compute_dtype(first)
        on = {n: bool(options.get(n, False)) for n in cell.options}
        exact = {n for n in cell.vectors if first.dtype != full and n in tensors and tensors[n].dtype == full}
        wide = sum(1 << i for i, n in enumerate(cell.vectors) if n in exact)
        complete = all(tensors[n] is not None for n in cell.optional)
        flags = list(on.values())
        form = cell.form(maps, flags, complete, starts_BT is not None, wide)
        if backend == "auto" and self._step.takes(first, lambda: (N, V, cell.form(maps, flags, complete, wide=wide))):
            backend = "step"
        if backend != "step":
            asked: Backend = "reference" if backend == "auto" and first.dtype == torch.float64 else backend
            cpu = pays(first, first.shape[1], H * N * V)
            backend = choose(self.name, asked, first, lambda: (N, V, form), "reference", cpu=cpu)
        if backend == "reference":
            return recurrence(cell, maps, tensors, (H, N), on)
        given = {n for i, n in enumerate(cell.scalars) if maps.kind(i) == "given"}
        dtypes = dict.fromkeys(exact | given, full)
        for n in (*cell.packed, "k", *cell.scalars):
            if tensors.get(n) is not None:
                tensors[n] = tensors[n].to(dtypes.get(n, first.dtype))
        operator = self._packed if "packed" in tensors else self._apart
        o, last = operator.call(*tensors.values(), heads=H, rows=N, form=form, backend=backend)
        return o, last

    def backend(self, device: torch.device | str, rows: int, columns: int) -> str:
        """What "auto" runs at this size, in words. Compiles nothing: before the first use, it says what will be tried."""
        return in_words(self.name, device, "reference", lambda *size: size[:2] == (rows, columns))

    def spec(self) -> KernelSpec:
        return problems.make_spec(self.cell, self, self.fused, self._apart, self._packed)

    def specs(self) -> tuple[KernelSpec, ...]:
        return self.spec(), self._step.spec()

    def prepare(self, dtype: torch.dtype, rows: int, columns: int, form: str) -> str:
        native.load(self.cell, "cuda", Size(rows, columns, dtype, form), torch.cuda.current_device())
        return "cuda"

    def cases(self, dtype: torch.dtype, rows: int, columns: int, form: str) -> Sequence[Case]:
        maps, on = self.cell.read(form)
        made = Form.parse(form)
        steps = 101 if self.cell.delta and rows > 32 else 49
        batches = (2, 70) if self.cell.vectors and rows > 64 else (2,)  # a GPU divides few heads among more blocks
        return [
            problems.case((batch, steps, 3, rows, columns), dtype, maps=maps, on=on, packed=made.packed, wide=made.wide)
            for batch in batches
        ]
