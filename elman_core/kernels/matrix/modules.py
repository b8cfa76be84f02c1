"""A matrix-state cell, its recurrence in plain PyTorch (shapes as in op.py), and what is compiled for it: one module for each
size, dtype and maps of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels import build
from elman_core.kernels.build import Extension
from elman_core.kernels.runtime import compute_dtype, without_autocast
from elman_core.kernels.spec import Cell, Target, limit
from elman_core.registry.errors import ConfigError, KernelError

SUPPORTED = "rows N: multiples of 4 from 4 to 128; columns V: 1 to 4096; float32, bfloat16, float16"
CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOST_DTYPES = (torch.float64, torch.float32)
_NORM_EPS = 1e-12
KINDS = {"given": 0, "sigmoid": 1, "mamba": 2}
RESERVED = (
    "q", "k", "packed", "state", "mask", "starts", "a_log", "dt_bias", "maps", "backend", "n_state", "heads", "rows", "form",
    "keep",
)  # fmt: skip


@dataclass(frozen=True)
class Maps:
    """The maps of the inputs before the recurrence.

    Attributes:
        silu: which of q, k, v and the other lines pass SiLU.
        normalised: which of q and k are then scaled to length 1: x (sum x² + 1e-12)^(-1/2).
        scalars: for each scalar in order: "given" (unchanged), "sigmoid", or, for the first only, "mamba", which is
            exp(-exp(A_log) softplus(x + dt_bias)). Scalars beyond the list are given.
    """

    silu: tuple[str, ...] = ()
    normalised: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()

    @property
    def mamba(self) -> bool:
        return self.scalars[:1] == ("mamba",)

    def kind(self, scalar: int) -> str:
        return self.scalars[scalar] if scalar < len(self.scalars) else "given"

    def __str__(self) -> str:
        return "|".join(".".join(names) for names in (self.silu, self.normalised, self.scalars))


@dataclass(frozen=True)
class Form:
    """What decides the module of a call, beside its size and dtype. Operators and problems have it as text.

    Attributes:
        arguments: of the cell's template: the options, then whether the optional scalar is given.
        silu, normalised, shared: which of k, q and the lines these are, as bits. kinds: of the two scalars, from `KINDS`.
    """

    arguments: tuple[bool, ...]
    silu: int
    normalised: int
    shared: int
    kinds: tuple[int, ...]

    def __str__(self) -> str:
        bits, kinds = ("".join(str(int(x)) for x in some) for some in (self.arguments, self.kinds))
        return f"{bits}_{self.silu}_{self.normalised}_{self.shared}_{kinds}"

    @staticmethod
    @cache
    def parse(text: str) -> Form:
        """The form that `str` wrote."""
        bits, silu, normalised, shared, kinds = text.split("_")
        return Form(tuple(x == "1" for x in bits), int(silu), int(normalised), int(shared), tuple(map(int, kinds)))


@dataclass(frozen=True)
class MatrixCell(Cell):
    """A matrix-state cell. `MatrixKernel` describes the attributes; here, v is the first of the lines."""

    vectors: tuple[str, ...] = ()
    lines: tuple[str, ...] = ("v",)
    scalars: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    elementwise: bool = False
    delta: bool = False
    maps: tuple[Maps, ...] = (Maps(),)
    rows: tuple[int, ...] = (16, 24, 32)

    def __post_init__(self) -> None:
        """Raises ConfigError for a declaration that no cell supports."""
        names = (*self.names, *self.options)
        limit(
            self.name,
            vectors=(len(self.vectors), 0, 3), lines_beside_v=(len(self.lines) - 1, 0, 3),
            scalars=(len(self.scalars), 0, 2), params=(len(self.params), 0, 4),
        )  # fmt: skip
        if wrong := set(self.shared) - {"q", "k", *self.lines}:
            raise ConfigError(f"{self.name}: heads can share q, k and lines, not {', '.join(sorted(wrong))}")
        bad = [n for n in names if n in RESERVED or not n.isidentifier() or names.count(n) > 1]
        if bad:
            raise ConfigError(f"{self.name}: the name {bad[0]!r} is reserved or used twice; choose another")
        if self.optional not in ((), self.scalars[-1:]):
            raise ConfigError(f"{self.name}: the last scalar alone can be optional, not {', '.join(self.optional)}")
        for maps in self.maps:
            self.check_maps(maps)

    def check_maps(self, maps: Maps) -> None:
        """Raises ConfigError for maps of inputs that the cell does not have."""
        if not isinstance(maps, Maps):
            raise ConfigError(f"{self.name}: maps are Maps(silu=…, normalised=…, scalars=…), not {maps!r}")
        known = {"silu": ("q", "k", *self.lines), "normalised": ("q", "k")}
        for where, names in known.items():
            if wrong := [n for n in getattr(maps, where) if n not in names]:
                raise ConfigError(f"{self.name}: maps.{where} has {', '.join(names)}, not {wrong[0]!r}")
        kinds = [k for i, k in enumerate(maps.scalars) if k not in KINDS or (k == "mamba" and i > 0)]
        if kinds or len(maps.scalars) > len(self.scalars):
            raise ConfigError(
                f"{self.name}: maps.scalars has one of {', '.join(KINDS)} for each of its {len(self.scalars)} scalars, mamba "
                f"for the first alone, not {maps.scalars}"
            )

    def __hash__(self) -> int:  # of all fields it would take longer than a launch
        return hash(self.name)

    @property
    def packed(self) -> tuple[str, ...]:
        """The inputs that the fused form packs behind q and k."""
        return (*self.vectors, *self.lines)

    @property
    def names(self) -> tuple[str, ...]:
        """All inputs beside q and k, in order."""
        return (*self.packed, *self.scalars, *self.params)

    def tensor(self, rows: int, bits: int, backend: str) -> bool:
        """Whether tensor cores compute the sums, as `Plan::tensor` in `elman/matrix_state_plan.cuh` of `elman_csrc`."""
        return backend == "cuda" and bits == 16 and (rows <= 32 or not (self.vectors or self.elementwise))

    def linear(self, form: str) -> bool:
        """Whether a form has the option linear_state on."""
        return "linear_state" in self.options and Form.parse(form).arguments[self.options.index("linear_state")]

    def takes_blocks(self, form: str) -> bool:
        """Whether the cell of a form says `delta`."""
        return self.delta and (self.linear(form) or "linear_state" not in self.options)

    def interval(self, rows: int, like: Tensor, backend: str, form: str) -> int:
        """Steps between saved states for inputs such as `like`, as `Plan::interval`."""
        if self.tensor(rows, 8 * like.element_size(), backend):
            linear = self.linear(form)
            if rows > 32 and self.takes_blocks(form) and much_shared(like.device):
                return 32
            return 16 if rows <= 32 or (linear and rows <= 64) else 8 if rows <= 64 else 4
        return 8 if backend == "cuda" and rows > 96 else 16

    def form(self, maps: Maps, options: Sequence[bool], given: bool) -> str:
        """The `Form` of a call, as text.

        Args:
            options: the cell's. given: whether the optional scalar is given.
        """
        names = ("k", "q", *self.lines)
        arguments = (*options, given) if self.optional else tuple(options)
        silu, normalised, shared = (
            sum(1 << names.index(n) for n in some) for some in (maps.silu, maps.normalised, self.shared)
        )
        scalars = len(self.scalars) - (not given)
        kinds = tuple(KINDS[maps.kind(i)] if i < scalars else 0 for i in range(2))
        return str(Form(arguments, silu, normalised, shared, kinds))

    def read(self, form: str) -> tuple[Maps, tuple[str, ...]]:
        """The maps of a form, and the names of the options that are on and of the optional scalar if it is given."""
        made, names = Form.parse(form), ("k", "q", *self.lines)
        silu, normalised = (
            tuple(n for i, n in enumerate(names) if bits >> i & 1) for bits in (made.silu, made.normalised)
        )
        scalars = tuple(list(KINDS)[kind] for kind in made.kinds[: len(self.scalars)])
        on = [n for n, is_on in zip((*self.options, *self.optional), made.arguments, strict=True) if is_on]
        return Maps(silu, normalised, scalars), tuple(on)


@cache
def much_shared(device: torch.device) -> bool:
    """Whether a block has 227 KB of shared memory, as `kMuchShared`; the emulated GPU, on a CPU, has."""
    return device.type != "cuda" or 9 <= torch.cuda.get_device_capability(device)[0] < 12


@dataclass(frozen=True)
class Size:
    """What one compiled module serves. form: as `MatrixCell.form`."""

    rows: int
    columns: int
    dtype: torch.dtype
    form: str


def extension(cell: MatrixCell, target: Target, size: Size) -> Extension:
    """What `kernels.build` compiles for a size.

    Raises:
        KernelError: there is no kernel for it (names the sizes that have one), or the sources are not installed.
    """
    fits = size.rows % 4 == 0 and 4 <= size.rows <= 128 and 1 <= size.columns <= 4096
    if not fits or size.dtype not in (CUDA_DTYPES if target == "cuda" else HOST_DTYPES):
        host = "; the host's are float64 and float32" if target == "host" else ""
        raise KernelError(
            f"{cell.name}: no kernel for N={size.rows} V={size.columns} in {size.dtype}. There are: {SUPPORTED}{host}"
        )
    form = Form.parse(size.form)
    absent = bool(cell.optional) and not form.arguments[-1]
    declared = {
        "vectors": len(cell.vectors), "lines (v is one)": len(cell.lines), "scalars": len(cell.scalars) - absent,
        "params": len(cell.params), "elementwise": cell.elementwise, "delta": cell.takes_blocks(size.form),
    }  # fmt: skip
    dtype = str(size.dtype).removeprefix("torch.")
    return build.shipped(
        "_".join([cell.name, "matrix", target, dtype, f"{size.rows}x{size.columns}", size.form]),
        "matrix_state_host.cpp" if target == "host" else "matrix_state_cuda.cu",
        cell.header,
        declared=declared,
        CELL=f"{cell.type}<{','.join(str(int(x)) for x in form.arguments)}>" if form.arguments else cell.type,
        DTYPE=size.dtype,
        ROWS=size.rows,
        LINES=size.columns,
        SILU=form.silu,
        L2=form.normalised,
        SHARED=form.shared,
        LINEAR=int(cell.linear(size.form)),
        KIND0=form.kinds[0],
        KIND1=form.kinds[1],
    )


def usual(cell: MatrixCell, target: Target) -> Extension:
    """The module for N = V = 32."""
    form = cell.form(cell.maps[0], [False] * len(cell.options), not cell.optional)
    return extension(cell, target, Size(32, 32, torch.float64 if target == "host" else torch.bfloat16, form))


def recurrence(
    reference: Callable[..., tuple[Tensor, Tensor]], cell: MatrixCell, maps: Maps, tensors: Mapping[str, Tensor | None],
    sizes: Sequence[int], rest: tuple[Tensor | None, ...], options: Mapping[str, bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence of a `MatrixKernel` by `reference`, in float32 (float64 beside float64), also under autocast.

    Args:
        tensors: the inputs by name, q and k first; packed if k is None. sizes: (H, N). rest: S_0, mask, starts, A_log, dt_bias.

    Returns:
        o (B, T, H, V) in the dtype of q, and S_T as the reference returns it.
    """
    given, (heads, rows), (state, mask, starts, *mamba) = tensors["q"], sizes, rest
    assert given is not None
    dtype = compute_dtype(*tensors.values(), *mamba)
    with without_autocast(given):
        made: dict[str, Any] = {n: None if x is None else x.to(dtype) for n, x in tensors.items()}
        if made["k"] is None:
            names, keys = ("q", "k", *cell.packed), [heads * rows] * (2 + len(cell.vectors))
            values = (given.shape[2] - sum(keys)) // len(cell.lines)
            parts = made["q"].split([*keys, *[values] * len(cell.lines)], -1)
            made |= {n: x.unflatten(-1, (heads, -1)) for n, x in zip(names, parts, strict=True)}
        for name in maps.silu:
            made[name] = F.silu(made[name])
        for name in maps.normalised:
            made[name] = made[name] * torch.rsqrt(made[name].square().sum(-1, keepdim=True) + _NORM_EPS)
        made |= {n: made[n].expand(-1, -1, heads, -1) for n in cell.shared}
        for i, name in enumerate(cell.scalars):
            if made[name] is not None and maps.kind(i) == "sigmoid":
                made[name] = F.logsigmoid(made[name]).exp()  # its bits on a CPU do not depend on the number of rows
            elif made[name] is not None and maps.kind(i) == "mamba":
                a_log, dt_bias = (x.to(dtype) for x in mamba if x is not None)
                made[name] = torch.exp(a_log.exp() * F.logsigmoid(-(made[name] + dt_bias)))
        o_BTHV, last = reference(*made.values(), state, mask, starts, **options)
    return o_BTHV.to(given.dtype), last
