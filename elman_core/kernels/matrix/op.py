"""`MatrixKernel`: one object turns a matrix-state cell into a differentiable op.

The op is the recurrence of H heads, each with a matrix S of N rows (keys) and V independent columns (lines, in C++),

    r = Sᵀ k,   S = phi(keep(r) S + k write(r, v)ᵀ),   o = Sᵀ q

registered with `torch.library` as `elman::matrix_NAME` (and `_backward`), so that FakeTensor, `torch.compile` and CUDA
graphs know it. Back ends:

    cuda       the skeleton of `elman_csrc` (matrix_state.cuh), compiled for each size and dtype at first use: sm_80 and newer
    host       the same cell in C++ loops, in float64 or float32: an instrument of the tests, taken only when asked for
    reference  the variant's own slow function, differentiated by autograd: the truth, the CPU's, and the fallback of a GPU

Two forms share the op. Called, it takes q, k, v, decay and write as the recurrence uses them. `fused` takes projections as they
leave their product (one tensor, sliced by address) and does SiLU, L2 norm and the decay's map inside the kernel.

Shapes: B batch, T time, H heads, N rows, V columns, C = 2 H N + H V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build
from elman_core.kernels.build import Extension, Target
from elman_core.kernels.cell import Cell
from elman_core.kernels.choice import in_words, register, runs
from elman_core.kernels.runtime import compute_dtype, refuse_transforms, transformed, warn_of_packed_rows
from elman_core.kernels.spec import Backend, Case, KernelSpec
from elman_core.registry.errors import ConfigError, KernelError

from . import modules, native, portable, schema, spec
from .check import check_tensors
from .modules import Maps, Size

Reference = Callable[..., tuple[Tensor, Tensor]]


class MatrixKernel:
    """The op of one matrix-state cell with a decay and an optional write strength for each head. Make one at module level.

    Args:
        name: of the variant; lower case.
        header: the cell header, as in `elman/matrix_state_cell.h` of `elman_csrc`.
        reference: `reference(q, k, v, decay, write, state, mask, starts, *, linear_state) -> (o, state)`.
        cell: the C++ template of the cell, instantiated with <linear state, write gate>; "elman::NAME::Cell" unless given.
    """

    def __init__(self, name: str, *, header: Path, reference: Reference, cell: str | None = None) -> None:
        self.name, self.reference = name, reference
        self.cell = Cell(name, Path(header), cell or f"elman::{name}::Cell", reference)
        self.op = schema.register(name, self.load)
        register(self)

    def __call__(
        self,
        q_BTHN: Tensor,
        k_BTHN: Tensor,
        v_BTHV: Tensor,
        decay_BTH: Tensor,
        write_BTH: Tensor | None = None,
        state_BHNV: Tensor | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
        *,
        linear_state: bool = False,
        backend: Backend = "auto",
    ) -> tuple[Tensor, Tensor]:
        """The recurrence, as `reference`.

        Args:
            q_BTHN, k_BTHN, v_BTHV: float32, bfloat16, float16 or float64; any strides.
            decay_BTH, write_BTH: computed with in float32 (float64 for float64). write None is 1.
            state_BHNV: S_0, None is zeros. mask_BT: bool; where False the state is held and o means nothing.
            starts_BT: bool; where True the state is set to 0 before the step. The reference alone does that so far: on a GPU
                one warning says so.
            backend: "auto" or one of the module's docstring.

        Returns:
            o (B, T, H, V) in the dtype of q, S_T (B, H, N, V) in float32 (float64 for float64).

        Raises:
            ConfigError: shapes or dtypes that do not fit together.
            KernelError: a back end asked for that cannot run this.
            NotImplementedError: under torch.func, a back end asked for that it cannot differentiate.
        """
        if q_BTHN.dim() != 4 or q_BTHN.numel() == 0:
            raise ConfigError(
                f"{self.name}: q must be (B, T, H, N) with every size at least 1, not {tuple(q_BTHN.shape)}"
            )
        B, T, H, N = q_BTHN.shape
        V = v_BTHV.shape[-1]
        check_tensors(
            self.name, q_BTHN, (B, T, H), (B, H, N, V), state_BHNV, mask_BT, starts_BT,
            k=(k_BTHN, (B, T, H, N)), v=(v_BTHV, (B, T, H, V)), decay=(decay_BTH, (B, T, H)), write=(write_BTH, (B, T, H)),
        )  # fmt: skip
        wanted = Size(N, V, q_BTHN.dtype, linear_state, write_BTH is not None, str(Maps()))
        if self._backend(backend, q_BTHN, wanted, starts_BT) == "reference":
            return self.reference(
                q_BTHN, k_BTHN, v_BTHV, decay_BTH, write_BTH, state_BHNV, mask_BT, starts_BT, linear_state=linear_state
            )
        full = compute_dtype(q_BTHN)
        given = [None if x is None else x.to(full) for x in (decay_BTH, write_BTH, state_BHNV)]
        inputs = (q_BTHN, k_BTHN.to(q_BTHN.dtype), v_BTHV.to(q_BTHN.dtype), *given, mask_BT, None, None)
        return self._run(inputs, wanted)

    def fused(
        self,
        qkv_BTC: Tensor,
        decay_BTH: Tensor,
        write_BTH: Tensor | None = None,
        state_BHNV: Tensor | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
        *,
        n_state: int,
        silu: bool = True,
        l2_norm: bool = True,
        a_log_H: Tensor | None = None,
        dt_bias_H: Tensor | None = None,
        decay: str = "mamba",
        linear_state: bool = False,
        backend: Backend = "auto",
    ) -> tuple[Tensor, Tensor]:
        """The recurrence from raw projections.

        Args:
            qkv_BTC: q, k (H n_state each) and v (H V), head-major, side by side.
            decay_BTH: for "mamba" a in exp(-exp(A_log) softplus(a + dt_bias)); for "sigmoid" its logit; for "given" the decay.
            write_BTH: the logit of the write strength; None is strength 1.
            silu: of q, k and v. l2_norm: of q and k, after it, as x (sum x² + 1e-12)^(-1/2).

        Returns, raises: as a call.
        """
        if qkv_BTC.dim() != 3 or qkv_BTC.numel() == 0:
            raise ConfigError(
                f"{self.name}: qkv must be (B, T, C) with every size at least 1, not {tuple(qkv_BTC.shape)}"
            )
        (B, T, C), H = qkv_BTC.shape, decay_BTH.shape[-1]
        V = C // H - 2 * n_state
        if decay not in modules.KINDS:
            raise ConfigError(f"{self.name}: decay must be {', '.join(modules.KINDS)}, not {decay!r}")
        if n_state < 1 or V < 1 or H * (2 * n_state + V) != C:
            raise ConfigError(
                f"{self.name}: qkv has {C} columns, which {H} heads of 2 x {n_state} keys and V values do not fill"
            )
        if (decay == "mamba") != (a_log_H is not None and dt_bias_H is not None):
            raise ConfigError(f"{self.name}: A_log and dt_bias belong to decay='mamba', and to it alone")
        maps = Maps(silu, l2_norm, decay, "given" if write_BTH is None else "sigmoid")
        check_tensors(
            self.name, qkv_BTC, (B, T, H), (B, H, n_state, V), state_BHNV, mask_BT, starts_BT,
            decay=(decay_BTH, (B, T, H)), write=(write_BTH, (B, T, H)), a_log=(a_log_H, (H,)), dt_bias=(dt_bias_H, (H,)),
        )  # fmt: skip
        wanted = Size(n_state, V, qkv_BTC.dtype, linear_state, write_BTH is not None, str(maps))
        if self._backend(backend, qkv_BTC, wanted, starts_BT) == "reference":
            return portable.fused_reference(
                self.reference, qkv_BTC, decay_BTH, write_BTH, state_BHNV, mask_BT, starts_BT, n_state=n_state, maps=maps,
                a_log_H=a_log_H, dt_bias_H=dt_bias_H, linear_state=linear_state,
            )  # fmt: skip
        narrow, full = qkv_BTC.dtype, compute_dtype(qkv_BTC)
        scalars = (
            decay_BTH.to(full if decay == "given" else narrow),
            None if write_BTH is None else write_BTH.to(narrow),
        )
        heads = [None if x is None else x.to(full) for x in (state_BHNV, a_log_H, dt_bias_H)]
        inputs = (qkv_BTC, None, None, *scalars, heads[0], mask_BT, heads[1], heads[2])
        return self._run(inputs, wanted)

    def backend(self, device: torch.device | str, rows: int, columns: int) -> str:
        """What "auto" runs at this size, in words; compiles nothing, so before the first use it is what will be tried."""
        return in_words(self.name, device, "reference", lambda *size: size[:2] == (rows, columns))

    def extension(self, target: Target) -> Extension:
        """What `kernels.build` compiles where no size is named.

        Raises:
            KernelError: the sources are not installed.
        """
        return modules.usual(self.cell, target)

    def spec(self) -> KernelSpec:
        """What `elman verify` checks of the recurrence."""
        return spec.make_spec(self.cell, self, self.fused, self.op)

    def specs(self) -> tuple[KernelSpec, ...]:
        """What `elman verify` checks: give it as `Variant(kernels=….specs())`."""
        return (self.spec(),)

    def load(self, target: Target, size: Size) -> Any:
        """The compiled module, built if need be.

        Raises:
            KernelError: the size or dtype is not supported (the message names what is), or it cannot be built or loaded.
        """
        modules.check(self.name, target, size)
        return _load(self.cell, target, size)

    def prepare(self, dtype: torch.dtype, rows: int, columns: int, *form: Any) -> str:
        """As `choice.Compiled`."""
        self.load("cuda", Size(rows, columns, dtype, *form))
        return "cuda"

    def cases(self, dtype: torch.dtype, rows: int, columns: int, *form: Any) -> Sequence[Case]:
        """As `choice.Compiled`."""
        return [spec.first_use_case(Size(rows, columns, dtype, *form))]

    def _backend(self, asked: Backend, like: Tensor, size: Size, starts: Tensor | None) -> Backend:
        if asked == "auto":
            if starts is not None:
                warn_of_packed_rows(self.name, like)
                return "reference"
            if not like.is_cuda or size.dtype == torch.float64 or transformed():
                return "reference"
            form = (size.linear, size.write, size.maps)
            return "cuda" if runs(self.name, like, size.rows, size.columns, *form) else "reference"
        if asked not in ("cuda", "host", "reference"):
            raise ConfigError(f"{self.name}: backend must be auto, cuda, host or reference, not {asked!r}")
        if asked != "reference" and like.device.type != ("cpu" if asked == "host" else "cuda"):
            raise KernelError(f"{self.name}: backend {asked!r} cannot run on tensors on {like.device}")
        if asked != "reference" and starts is not None:
            raise KernelError(f"{self.name}: backend {asked!r} takes no starts of documents; use backend='reference'")
        if asked != "reference":
            refuse_transforms(self.name, "backend='auto' or 'reference'")
        return asked

    def _run(self, inputs: tuple[Any, ...], size: Size) -> tuple[Tensor, Tensor]:
        keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        backend = "cuda" if inputs[0].is_cuda else "host"
        o, last, _ = self.op(*inputs, size.rows, size.linear, size.maps, keep, backend)
        return o, last


def _load(cell: Cell, target: Target, size: Size) -> Any:
    return _module(cell, target, size, torch.cuda.current_device() if target == "cuda" else None)


@cache
def _module(cell: Cell, target: Target, size: Size, index: int | None) -> Any:
    """For the current device, which is the one of that number: a host may have GPUs of several architectures."""
    extension = modules.extension(cell, target, size)
    library = native.open_library(build.build(extension, build.local_arch(extension)))
    if index is not None:
        most: Any = torch.cuda.get_device_properties(index)
        need = max(native.info(library)[1:3])
        if need > most.shared_memory_per_block_optin:
            raise KernelError(
                f"{cell.name}: N={size.rows} V={size.columns} in {size.dtype} needs {need} bytes of shared memory a block, "
                f"this GPU has {most.shared_memory_per_block_optin}; smaller N or 16-bit storage need less"
            )
    return library
