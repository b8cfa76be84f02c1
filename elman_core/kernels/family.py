"""A family of kernels as a table: its tensors are stated once, and whatever names them follows from the table.

A family is a skeleton of `elman_csrc` with the Python around it: `dense`, `gates`, `elementwise`, … From its table come the
check of a call, the operators of `torch.library` (operators.py), the random inputs of a verification, and the arguments of its
compiled modules: the launcher gets the table as data, and each module says where its structure has a member of that name. A
family's equations, plans and launches are in its own modules (`op`, `portable`, `native`, `plan`, `spec`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from elman_core.registry.errors import ConfigError

from .runtime import Wanted, compute_dtype
from .spec import Case, Inputs, document_starts, padding_mask

Values = dict[str, Any]
"""Arguments by name: tensors, a tuple of tensors for a row with `names`, and constants."""


class Row(NamedTuple):
    """One tensor of a family, or one for each name that a cell declares.

    Attributes:
        name: of the operator's argument or result, and of the member of the modules' structure.
        shape: a letter for each size; equal letters are equal sizes, "U" is T + 1, "?" is any size.
        dtype: "storage": that of the first tensor. "compute": float32, or float64 beside float64. "kept": "compute" for the
            back end "torch", else "storage". "either": storage or compute.
        optional: whether it may be None.
        given: when the inputs of a verification have it: always, with a flag or option of the case, or "not bare".
        takes: the dtypes that a call takes, as `Wanted.dtype`; by default "first" for storage, "stored" for compute and for the
            first tensor. The operator takes other dtypes of storage as they are.
        names: the attribute of the cell with the names of the tensors in this row, such as "streams".
        stacked: whether these are states, and one tensor for the operator and the modules, along a new first dimension.
        strides: the letters whose strides a kernel is told; the sizes behind them are adjacent.
        like: of a result, the argument whose layout it has; a list's are contiguous, and empty where the argument is None. With
            "?" in its shape, a list's have the first size of their argument there.
        as_is: whether `run` of the operator lays the tensor out as its kernel reads it.
        read: whether the backward reads this input: never, always, or with the back end "torch".
        draw: makes the input of a verification from a standard normal draw.
    """

    name: str
    shape: str | None
    dtype: Literal["storage", "compute", "kept", "either", "bool", "index"] = "storage"
    optional: bool = False
    given: str = ""
    takes: Literal["first", "computed", "stored", "bool"] | None = None
    names: str = ""
    stacked: bool = False
    strides: str = ""
    like: str = ""
    as_is: bool = False
    read: bool | Literal["torch"] = False
    draw: Callable[[Tensor], Tensor] = lambda x: x

    @property
    def listed(self) -> bool:
        """Whether the operator and the modules have a list of tensors here."""
        return bool(self.names) and not self.stacked

    def of(self, cell: Any) -> tuple[str, ...]:
        """The names of these tensors in a call."""
        return getattr(cell, self.names) if self.names else (self.name,)


def flags(shape: str) -> tuple[Row, Row]:
    """The rows of the mask and of the starts of documents."""
    mask = Row("mask", shape, "bool", optional=True, given="masked", read=True)
    return mask, mask._replace(name="starts", given="packed")


@dataclass(frozen=True, eq=False)
class Family:
    """The tensors of a family.

    Attributes:
        name: of the family, in operators and modules.
        sizes: the members of the modules' structure that hold sizes, by letter.
        functions: those of the modules, with the names of the arguments that each needs.
        inputs: of the forward, in the order of a call; flags last. The first one sets the dtype and the device.
        outputs: what a call returns. arriving: their gradients, in the same order, optional ones last.
        kept: further results of the forward, for the backward.
        gradients: results of the backward.
        members: further tensors in the modules' structure. numbers, reals: its whole numbers and floats, in words.
        constants: arguments of the operators that are no tensors, as a schema writes them. The forward alone has "keep":
            whether a backward will follow.
        derive: `derive(cell, sizes, values)` adds to `sizes` those of results and of drawn inputs that no input shows.
    """

    name: str
    sizes: Mapping[str, str]
    functions: Mapping[str, str]
    inputs: Sequence[Row] = ()
    outputs: Sequence[Row] = ()
    arriving: Sequence[Row] = ()
    kept: Sequence[Row] = ()
    gradients: Sequence[Row] = ()
    members: Sequence[Row] = ()
    numbers: str = "stream"
    reals: str = ""
    constants: Sequence[str] = ("bool keep", "str backend")
    derive: Callable[[Any, Values, Values], None] = lambda _cell, _sizes, _values: None

    @cached_property
    def fields(self) -> tuple[tuple[Any, ...], ...]:
        """What the launcher reads: (name, dtype, shape, first dimension with a stride, strides, whether a list)."""
        made: list[tuple[Any, ...]] = []
        for row in (*self.inputs, *self.outputs, *self.arriving, *self.kept, *self.gradients, *self.members):
            dtype = "storage" if row.dtype == "kept" else row.dtype
            first = (row.shape or "").find(row.strides[:1])
            made.append((row.name, dtype, row.shape, first, len(row.strides), row.listed))
        made += [(name, "int", None, 0, 0, False) for name in self.numbers.split()]
        return (*made, *((name, "float", None, 0, 0, False) for name in self.reals.split()))

    def wanted(self, cell: Any) -> dict[str, Wanted]:
        """What a call of this cell is given, for `runtime.check`."""
        found: dict[str, Wanted] = {}
        kinds: Any = {"storage": "first", "compute": "stored", "bool": "bool"}
        for row in self.inputs:
            for name in row.of(cell):
                if name in found:
                    raise ConfigError(f"{cell.name}: the name {name!r} is reserved or used twice; choose another")
                kind = row.takes or (kinds[row.dtype] if found else "stored")
                found[name] = Wanted((row.shape or "")[row.stacked :], kind, row.optional)
        return found

    def draw(self, cell: Any, case: Case, generator: torch.Generator) -> Inputs:
        """Random inputs of a verification by the names of a call, in the dtypes of the table. h0 is 0 in a bare case."""
        made: Inputs = {}
        wide = compute_dtype(case.dtype)
        sizes = dict(case.sizes)
        self.derive(cell, sizes, {"keep": False, "backend": "host", **case.options})
        for row in self.inputs:
            shape = [sizes[letter] for letter in (row.shape or "")[row.stacked :]]
            for name in row.of(cell):
                if not case.has(row.given):
                    made[name] = None
                elif name in ("mask", "starts"):
                    flag = (padding_mask if name == "mask" else document_starts)(sizes["T"], sizes["B"], generator)
                    made[name] = flag if row.shape == "TB" else flag.t().contiguous()
                elif row.dtype == "bool":
                    made[name] = torch.rand(shape, generator=generator) < 0.2
                else:
                    drawn = row.draw(torch.randn(shape, generator=generator))
                    if row.name == "h0" and case.bare:
                        drawn = torch.zeros_like(drawn)
                    made[name] = drawn.to(wide if row.dtype in ("compute", "either") else case.dtype)
        return cell.adjusted(made, case)
