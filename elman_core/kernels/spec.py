"""`Cell`: what plans, bindings and builds need to know about a cell. `KernelSpec`: what `verify` and the contract's tests need
to know about a kernel of any family.

A plugin yields its kernels' specs as `Variant(kernels=(…,))`. The kernel classes make their own (`DenseKernel.specs()`); for
any other kernel, fill in the fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from elman_core.registry.errors import ConfigError, KernelError
from elman_core.registry.installing import moved

from .build import Extension
from .build import Target as Target

Backend = Literal["auto", "torch", "cuda", "cpu", "host", "emulated", "reference"]
"""What computes a call.

    auto       the kernel of the device where one runs (on a CPU: where it pays), else plain PyTorch
    torch      plain PyTorch with a hand-written backward, on every device; rows and matrix states have none
    cuda       the kernel of `elman_csrc`, compiled with the cell header at first use: NVIDIA GPUs, sm_80 and newer
    cpu        the same cell header in vectors and threads, in float32 or bfloat16
    host       the same cell header in C++ loops, for tests: runs only if asked for by name
    emulated   the source of "cuda" on emulated threads of a CPU, for tests: runs only if asked for by name
    reference  the variant's own slow, obvious function, differentiated by autograd: the truth for all of them

A call raises ConfigError for inputs that are not the cell's or whose shapes, dtypes or devices do not fit together, KernelError
where the named back end cannot run it, and NotImplementedError for any but "reference" named under torch.func.
"""
Inputs = dict[str, Any]  # tensors by name, None for those not given
Outputs = dict[str, Tensor]


def limit(name: str, **counts: tuple[int | Sequence[str], int, int]) -> None:
    """Raise `ConfigError` for a count, or names, beyond what the skeletons take: `what=(given, least, most)`."""
    for what, (given, least, most) in counts.items():
        words = what.replace("_", " ")
        count = given if isinstance(given, int) else len(given)
        if isinstance(given, str):
            raise ConfigError(f"{name}: {words} are a tuple of names, not a string: write ({given!r},)")
        if not least <= count <= most:
            raise ConfigError(f"{name}: a kernel takes {least} to {most} {words}, not {count}")


@dataclass(frozen=True, eq=False)
class Cell:
    """A cell in C++ and in PyTorch. Compiled modules are cached by cell, so a cell is equal only to itself.

    Attributes:
        name: of the kernel; lower case.
        header: the cell header, compiled together with a binding of `elman_csrc`.
        type: the C++ name of the cell.
        reference: the truth: the variant's own slow, obvious function; for an elementwise or gated cell, its step.
        adjust: `adjust(inputs, options)` changes the random inputs of a verification in place, by name: for a cell that takes
            only some (a normaliser above 0), or with a kink that rounding could cross.
    """

    name: str
    header: Path
    type: str
    reference: Callable[..., Any]
    adjust: Callable[[Inputs, Mapping[str, Any]], None] | None = None

    def adjusted(self, inputs: Inputs, case: Case) -> Inputs:
        """Random inputs of a verification, changed in place to what the cell takes."""
        if self.adjust is not None:
            self.adjust(inputs, case.options)
        return inputs

    @property
    def record(self) -> Path:
        """The file of recorded errors: beside the header, or without one beside the reference."""
        return (self.header if self.header.name else self._source).with_name("errors.json")

    def python(self, module: str) -> tuple[Path, ...]:
        """The Python that a stamp covers: the reference's file, and all files in the folder of `module`."""
        own = (self._source,) if self._source.is_file() else ()
        return tuple(dict.fromkeys((*own, *sorted(Path(module).parent.glob("*.py")))))

    @property
    def _source(self) -> Path:
        return Path(inspect.getsourcefile(inspect.unwrap(self.reference)) or "unknown")


@dataclass(frozen=True)
class Case:
    """One problem of a grid.

    Attributes:
        sizes: by their letters: {"T": 33, "B": 3, "d": 64}.
        dtype: of storage. States are float32, or float64 beside float64.
        masked: some positions are masked, including the first ones of a row (left padding).
        strided: every input and incoming gradient has gaps in memory, and its first two dimensions are swapped there.
        bare: the initial state is zero and no gradient arrives at the final state. Otherwise both are random.
        options: further arguments of the op: {"linear_state": True}.
    """

    sizes: Mapping[str, int]
    dtype: torch.dtype
    masked: bool = False
    strided: bool = False
    bare: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, letters: str, sizes: Sequence[int], dtype: torch.dtype, **special: Any) -> Case:
        """A case with sizes in the order of their letters. Keywords other than masked, strided and bare are options,
        if they are on."""
        flags = {name: special.pop(name, False) for name in ("masked", "strided", "bare")}
        options = {name: value for name, value in special.items() if value}
        return cls(dict(zip(letters, sizes, strict=True)), dtype, options=options, **flags)

    def has(self, what: str) -> bool:
        """Whether it has a flag or an option on; "not bare" and "" are conditions, too."""
        if what.startswith("not "):
            return not self.has(what.removeprefix("not "))
        return not what or bool(getattr(self, what, False) or self.options.get(what, False))

    def __str__(self) -> str:
        words = [*(f"{k}={v}" for k, v in self.sizes.items()), str(self.dtype).removeprefix("torch.")]
        words += [word for word in ("masked", "strided", "bare") if getattr(self, word)]
        return " ".join([*words, *(f"{k}={v}" for k, v in self.options.items())])


def _of_a_grid(_target: Target, _grid: str) -> Sequence[Case]:
    raise KernelError(moved("KernelSpec.cases of this family", "verify", "grids.cases"))


@dataclass(frozen=True)
class KernelSpec:
    """A kernel, its reference, and the problems on which they are compared.

    Attributes:
        name: the variant's, followed by a word if the variant has several kernels: "e99", "e99_step".
        make_inputs: `make_inputs(case, generator)` draws the inputs on the CPU, each in the dtype in which the op takes it.
            Scale them so that the recurrence neither dies nor explodes.
        call: `call(backend, inputs, options) -> outputs`, by name. `backend` is "auto", a target, one of `portable`, or
            "reference", which must take float64 and compute 16-bit inputs in float32.
        states: names of the outputs that are final states.
        rounded: the back end of `call` whose error in the storage dtype sets the limits. It is not "reference" if the reference
            keeps in float32 what separate ops would store in between: a sum whose terms cancel then has an error of many eps,
            which no kernel of 16-bit operands can avoid.
        differentiable: False for a kernel that only decoding runs: its outputs are compared, and it has no gradient.
        extension: `extension(target)`: what is compiled; the stamp covers its sources.
        op: `op(backend, inputs, options) -> (operator, arguments)` for `torch.library.opcheck`; None without an operator.
        targets: where the kernel exists.
        family: the name of the table in `elman_authors.grids` that has the cases of a verification; cell: what it asks.
        cases: of a kernel of no family, `cases(target, grid)`: about 20 for "quick", about 200 for "full"; fixed lists.
        builds: `builds(target, arch, widths, dtypes)`: what `elman build` compiles; without it, `extension(target)` alone.
            `widths` are the sizes that have a compiled kernel each; empty means the usual sizes.
        module: `module(target, case)`: what a case compiles on this machine, so that `verify` can compile it all at once.
        portable: further back ends in plain PyTorch. They run anywhere and are checked like a kernel.
        emulated: small problems for the back end "emulated": the source of "cuda" on emulated threads of a CPU. Empty without.
        visible: `visible(inputs)`: for outputs that are arbitrary at some positions, a bool tensor that broadcasts.
        after: `after(device)` is called when the device is idle, and raises `KernelError` if a launch failed there.
        python: further files that the stamp covers: the reference, and the Python that calls the kernel.
        record: the file of recorded errors in the kernel's package (see verify_cache.py); None without one.
    """

    name: str
    make_inputs: Callable[[Case, torch.Generator], Inputs]
    call: Callable[[str, Inputs, Mapping[str, Any]], Outputs]
    states: tuple[str, ...]
    extension: Callable[[Target], Extension]
    op: Callable[[str, Inputs, Mapping[str, Any]], tuple[Any, tuple[Any, ...]] | None]
    targets: tuple[Target, ...] = ("host",)
    family: str = ""
    cell: Any = None
    cases: Callable[[Any, Any], Sequence[Case]] = _of_a_grid
    portable: tuple[str, ...] = ()
    emulated: tuple[Case, ...] = ()
    builds: Callable[[Target, str, Sequence[int], Sequence[torch.dtype]], Sequence[Extension]] | None = None
    module: Callable[[Target, Case], Extension] | None = None
    visible: Callable[[Inputs], Outputs] = lambda _inputs: {}
    after: Callable[[torch.device], None] = lambda _device: None
    python: tuple[Path, ...] = ()
    record: Path | None = None
    rounded: str = "reference"
    differentiable: bool = True

    @property
    def backends(self) -> tuple[str, ...]:
        """All that `verify` can check."""
        return (*self.targets, *self.portable, *(("emulated",) if self.emulated else ()))


def first_steps(rows: int, width: int) -> int:
    """The time steps of the problem that verifies a first use: 64; fewer, but 2 at least, where a tensor would have more than
    2^25 elements, since the verification needs tens of them in float64."""
    return max(2, min(64, 2**25 // (rows * width)))


def padding_mask(steps: int, rows: int, generator: torch.Generator) -> Tensor:
    """bool (T, B): row 0 is whole, row 1 half left padding, the others have holes; the last position of every row is real."""
    mask = torch.rand(steps, rows, generator=generator) > 0.3
    mask[:, 0] = True
    if rows > 1:
        mask[:, 1] = torch.arange(steps) >= steps // 2
    mask[-1] = True
    return mask


def document_starts(steps: int, rows: int, generator: torch.Generator) -> Tensor:
    """bool (T, B), True where a document starts: at random, at the first step or the last, and at two steps in a row of every
    row, the first of them padding in row 1 of `padding_mask`."""
    starts = torch.rand(steps, rows, generator=generator) < 0.1
    starts[0, ::2] = starts[-1, 1::2] = starts[max(0, steps // 2 - 1) : steps // 2 + 1] = True
    return starts
