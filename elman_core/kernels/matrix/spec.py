"""A matrix-state cell, the maps of its inputs, and the tensors of its family.

B batch, T time, H heads, N rows (keys), V columns (values), C: of packed inputs. "?" is H, or 1 for what all heads share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.family import Family, Row, Values, flags
from elman_core.kernels.runtime import compute_dtype
from elman_core.kernels.spec import Case, Cell, Inputs
from elman_core.registry.errors import ConfigError

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
        silu, normalised, shared: which of k, q and the lines these are, as bits. kinds: of two or three scalars, in `KINDS`.
        packed: whether documents start inside rows, which a GPU's modules are compiled for.
        wide: which vectors are float32 beside 16 bits, as bits.
    """

    arguments: tuple[bool, ...]
    silu: int
    normalised: int
    shared: int
    kinds: tuple[int, ...]
    packed: bool = False
    wide: int = 0

    def __str__(self) -> str:
        bits, kinds = ("".join(str(int(x)) for x in some) for some in (self.arguments, self.kinds))
        special = "_packed" * self.packed + f"_wide{self.wide}" * bool(self.wide)
        return f"{bits}_{self.silu}_{self.normalised}_{self.shared}_{kinds}{special}"

    @staticmethod
    @cache
    def parse(text: str) -> Form:
        """The form that `str` wrote."""
        bits, silu, normalised, shared, kinds, *special = text.split("_")
        arguments = tuple(x == "1" for x in bits)
        packed = "packed" in special
        wide = next((int(word.removeprefix("wide")) for word in special if word != "packed"), 0)
        return Form(arguments, int(silu), int(normalised), int(shared), tuple(map(int, kinds)), packed, wide)


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
        if wrong := set(self.shared) - {"q", "k", *self.lines}:
            raise ConfigError(f"{self.name}: heads can share q, k and lines, not {', '.join(sorted(wrong))}")
        if bad := [n for n in names if n in RESERVED or not n.isidentifier() or names.count(n) > 1]:
            raise ConfigError(f"{self.name}: the name {bad[0]!r} is reserved or used twice; choose another")
        if self.optional not in ((), self.scalars[-1:]):
            raise ConfigError(f"{self.name}: the last scalar alone can be optional, not {', '.join(self.optional)}")
        for maps in self.maps:
            self.check_maps(maps)

    def check_maps(self, maps: Maps) -> None:
        """Raises ConfigError for maps of inputs that the cell does not have."""
        if not isinstance(maps, Maps):
            raise ConfigError(f"{self.name}: maps are Maps(silu=…, normalised=…, scalars=…), not {maps!r}")
        for where, names in (("silu", ("q", "k", *self.lines)), ("normalised", ("q", "k"))):
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

    def adjusted(self, inputs: Inputs, case: Case) -> Inputs:
        """Keys of length 1 and decays from 0.5 to 1, unless the maps make them so; all that is packed in one, if asked.

        Of vectors, those in the option `wide`, as bits, are in the dtype of computation, the same at all times and from 0.98
        to 1, where rounding to 16 bits would show.
        """
        maps, wide = case.options.get("maps", Maps()), compute_dtype(case.dtype)
        for name in {"q", "k"} - set(maps.normalised):
            inputs[name] = F.normalize(inputs[name].to(wide), dim=-1).to(case.dtype)
        inputs |= {name: inputs[name][:, :, :1].contiguous() for name in self.shared}
        for i, name in enumerate(self.vectors):
            if case.options.get("wide", 0) >> i & 1:
                inputs[name] = (1 - 0.04 * (1 - inputs[name][:, :1])).expand_as(inputs[name])
            else:
                inputs[name] = inputs[name].to(case.dtype)
        for i, name in enumerate(self.scalars):
            given = maps.kind(i) == "given"
            inputs[name] = _share(inputs[name]) if given else inputs[name].to(case.dtype)
        inputs |= {name: None for name in self.optional if not case.has(name)}
        if not maps.mamba:
            inputs |= {"A_log": None, "dt_bias": None}
        super().adjusted(inputs, case)
        if case.has("n_state"):
            parts = [inputs.pop(name).flatten(2) for name in ("q", "k", *self.packed)]
            return {"packed": torch.cat(parts, -1)} | inputs
        return inputs

    def tensor(self, rows: int, like: Tensor, backend: str) -> bool:
        """Whether tensor cores compute the sums, as `Plan::tensor` in `elman/matrix_state_plan.cuh` of `elman_csrc`."""
        if backend != "cuda" or like.element_size() != 2:
            return False
        return rows <= 32 or not (self.elementwise or (self.vectors and not much_shared(like.device)))

    def linear(self, form: str) -> bool:
        """Whether a form has the option linear_state on."""
        return "linear_state" in self.options and Form.parse(form).arguments[self.options.index("linear_state")]

    def takes_blocks(self, form: str) -> bool:
        """Whether the cell of a form says `delta`."""
        return self.delta and (self.linear(form) or "linear_state" not in self.options)

    def interval(self, rows: int, like: Tensor, backend: str, form: str) -> int:
        """Steps between saved states for inputs such as `like`, as `Plan::interval`."""
        if self.tensor(rows, like, backend):
            linear = self.linear(form) and not self.vectors
            if rows > 32 and self.takes_blocks(form) and much_shared(like.device):
                return 32
            if rows <= 32 or (linear and rows <= 64):
                return 16
            return 8 if rows <= 64 else 4
        return 8 if backend == "cuda" and rows > 96 else 16

    def form(self, maps: Maps, options: Sequence[bool], given: bool, packed: bool = False, wide: int = 0) -> str:
        """The `Form` of a call, as text.

        Args:
            options: the cell's. given: whether the optional scalar is given. packed, wide: as in `Form`.
        """
        names = ("k", "q", *self.lines)
        arguments = (*options, given) if self.optional else tuple(options)

        def bits(some: Sequence[str]) -> int:
            return sum(1 << names.index(n) for n in some)

        scalars = len(self.scalars) - (not given)
        kinds = tuple(KINDS[maps.kind(i)] if i < scalars else 0 for i in range(max(2, len(self.scalars))))
        return str(Form(arguments, bits(maps.silu), bits(maps.normalised), bits(self.shared), kinds, packed, wide))

    def read(self, form: str) -> tuple[Maps, tuple[str, ...]]:
        """The maps of a form, and the names of the options that are on and of the optional scalar if it is given."""
        made = Form.parse(form)
        names = list(enumerate(("k", "q", *self.lines)))
        silu = tuple(n for i, n in names if made.silu >> i & 1)
        normalised = tuple(n for i, n in names if made.normalised >> i & 1)
        scalars = tuple(list(KINDS)[kind] for kind in made.kinds[: len(self.scalars)])
        on = [n for n, is_on in zip((*self.options, *self.optional), made.arguments, strict=True) if is_on]
        return Maps(silu, normalised, scalars), tuple(on)


@cache
def much_shared(device: torch.device) -> bool:
    """Whether a block has 227 KB of shared memory, as `kMuchShared`; the emulated GPU, on a CPU, has."""
    return device.type != "cuda" or 9 <= torch.cuda.get_device_capability(device)[0] < 12


@dataclass(frozen=True)
class Size:
    """What one compiled module serves. form: as `MatrixCell.form`. step: whether calls have one step and no gradients."""

    rows: int
    columns: int
    dtype: torch.dtype
    form: str
    step: bool = False


def _share(x: Tensor) -> Tensor:
    """Numbers from 0.5 to 1, so that the state neither dies nor explodes, from a standard normal draw."""
    return 1 - 0.5 * torch.special.ndtr(x) ** 2


def beside(packed: Tensor, scalars: Sequence[Tensor | None]) -> bool:
    """Whether the gradient of the first scalar (B, T, H) is in the same rows as that of the packed inputs, behind it."""
    first = scalars[0] if scalars else None
    return first is not None and first.dtype == packed.dtype and first.shape[2] % 8 == 0


def _derive(cell: MatrixCell, sizes: Values, values: Values) -> None:
    """K, W: numbers that a row of the batch saves, of storage and of compute dtype. F: C, and H for a gradient `beside`.

    Saved are the states before every segment of `interval` steps, (H, segments, V, N); with N > 24 and tensor cores in the
    storage dtype, with the retrieved values of every step (T, H, V) behind them, up to a multiple of 8.

    P: params. G: shares of their gradients, which the host adds up over the batch. M: 2 beside the map "mamba".
    """
    packed = values["packed"] if "C" in sizes else None
    H = values.get("heads") or sizes["H"]
    N = values.get("rows") or sizes["N"]
    sizes |= {"?": H, "H": H, "N": N}
    if packed is not None:
        keys = 2 + len(cell.vectors)
        sizes["V"] = (sizes["C"] // H - keys * N) // len(cell.lines)
        sizes["F"] = sizes["C"] + H * beside(packed, values["scalar"])
    sizes["K"] = sizes["W"] = 0
    if values.get("keep"):
        like = values["q"] if packed is None else packed
        backend = values["backend"]
        T, V = sizes["T"], sizes["V"]
        states = H * V * N * -(-T // cell.interval(N, like, backend, values["form"]))
        if N > 24 and cell.tensor(N, like, backend):
            sizes["K"] = (states + H * V * T + 7) // 8 * 8
        else:
            sizes["W"] = states
    sizes["P"], sizes["M"] = len(cell.params), 2 * (values.get("A_log") is not None)
    sizes["G"] = 1 if values["backend"] == "host" else sizes["B"]


def _row(name: str, shape: str, dtype: Any = "storage", **more: Any) -> Row:
    """An input in any layout, of which the modules say what they can read."""
    return Row(name, shape, dtype, takes="stored", strides="T", read=True, as_is=True, **more)


_REST = (
    _row("scalar", "BTH", "either", names="scalars", optional=True),
    Row("param", "HV", "compute", names="params", read=True, draw=_share),
    Row("S0", "BHNV", "compute", optional=True, given="not bare", draw=lambda x: 0.4 * x),
    Row("A_log", "H", "compute", optional=True, read=True, draw=lambda x: 0.5 * x),
    Row("dt_bias", "H", "compute", optional=True, read=True, draw=lambda x: x - 2),
    *flags("BT"),
)
_REST_BACK = (
    Row("dscalar", "BTH", "either", names="scalars", strides="T", like="scalar"), Row("dparams", "PGHV", "compute"),
    Row("ds0", "BHNV", "compute"), Row("dmamba", "MH", "compute"),
)  # fmt: skip
FAMILY = Family(
    "matrix",
    sizes={"B": "batch", "T": "steps", "H": "heads"},
    functions={"forward": "q k line s1 o", "backward": "q k line saved dy ds0 dq dk dline"},
    inputs=(
        _row("q", "BT?N"), _row("k", "BT?N"), _row("vector", "BTHN", "either", names="vectors", draw=_share),
        _row("line", "BT?V", names="lines"), *_REST,
    ),
    outputs=(Row("o", "BTHV"), Row("s1", "BHNV", "compute")),
    arriving=(Row("dy", "BTHV"), Row("ds1", "BHNV", "compute", optional=True)),
    kept=(Row("kept", "BK"), Row("states", "BW", "compute")),
    gradients=(
        Row("dq", "BTHN", strides="T"), Row("dk", "BTHN", strides="T"),
        Row("dvector", "BTHN", "either", names="vectors", strides="T", like="vector"),
        Row("dline", "BTHV", names="lines", strides="T"), *_REST_BACK,
    ),
    members=(
        Row("saved", None, "either"), Row("dparam", "?HV", "compute", names="params"), Row("dhead", None, "compute"),
        Row("da_log", None, "compute"), Row("ddt_bias", None, "compute"), Row("parts", None, "compute"),
    ),
    numbers="shared interval state_line state_row stream threads",
    constants=("int heads", "int rows", "str form", "bool keep", "str backend"),
    derive=_derive,
)  # fmt: skip
PACKED = replace(
    FAMILY, name="matrix_packed", inputs=(_row("packed", "BTC"), *_REST), gradients=(Row("dpacked", "BTF"), *_REST_BACK)
)
