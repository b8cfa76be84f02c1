"""The operators of a kernel, from the table of its family: schema, results, gradients, launches, verification."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from . import build, launch
from .family import Family, Row, Values
from .runtime import operator, tensors
from .spec import Inputs, KernelSpec, Outputs


class _Signature:
    """The arguments and results of one direction. kept: of the rows, those that may be empty. constants: as in `Family`."""

    def __init__(
        self, cell: Any, rows: Sequence[Row], kept: Sequence[Row], constants: Sequence[str], results: Sequence[Row]
    ) -> None:
        words: list[str] = []
        self.parameters: list[str] = []
        self.places: list[tuple[str, Any]] = []
        self.found: list[tuple[str, Any]] = []
        self._known: dict[str, None] = {}
        self._sizes: list[str] = []
        self._given: list[tuple[str, str, str]] = []
        likes: dict[tuple[str | None, str], str] = {}
        for row in (*rows, *kept):
            names = [f"{row.name}{i}" for i in range(len(row.of(cell)))] if row.listed else [row.name]
            first = len(words)
            self.places.append((row.name, slice(first, first + len(names)) if row.listed else first))
            self.parameters += names
            words += [f"Tensor{'?' * row.optional} {name}" for name in names]
            self._given.append(_argument(row, names, row in kept))
            if row.optional or not names:
                continue
            letters = ["_" if n in self._known or n == "?" else f"n_{n}" for n in row.shape or ""]
            self._known |= dict.fromkeys(n[2:] for n in letters if n != "_")
            if set(letters) != {"_"}:
                self._sizes.append(f"({', '.join(letters)},) = {names[0]}.shape")
            # A result of an argument's shape and dtype is made like it, which takes half the time.
            if not (row.takes and row.dtype == "storage"):
                likes.setdefault((row.shape, row.dtype), names[0])
        self._constants = [each.split()[1] for each in constants]
        self.places += [(name, len(words) + i) for i, name in enumerate(self._constants)]
        count = 0
        for row in results:
            many = len(row.of(cell)) if row.listed else 1
            self.found.append((row.name, slice(count, count + many) if row.listed else count))
            count += many
        self._results = [(row, len(row.of(cell)), likes.get((row.shape, row.dtype))) for row in results]
        self.schema = f"({', '.join([*words, *constants])}) -> {tensors(count)}"

    def values(self, given: Sequence[Any]) -> Values:
        """Arguments by name."""
        return {name: given[place] for name, place in self.places}

    def made(self, results: Sequence[Tensor]) -> Values:
        """Results by name."""
        return {name: results[place] for name, place in self.found}

    def function(self, name: str, direction: str = "", **known: Any) -> Callable[..., tuple[Tensor, ...]]:
        """What the operator calls: it makes the results, and fills them in with `run`; without a direction, for FakeTensors.

        It is written as straight code, since a loop over the table would take as long as a launch.
        """
        every = [*self.parameters, *self._constants]
        of = {n: every[at] if isinstance(at, int) else f"[{', '.join(every[at])}]" for n, at in self.places}
        first = self.parameters[0]
        lines = [f"_values = {{{', '.join(f'{n!r}: {x}' for n, x in of.items())}}}"]
        if direction and known.get("plain"):
            lines.append("if backend == 'torch': return tuple(_plain(_cell, _values))")
        lines += [*self._sizes]
        if any(n not in self._known for row, *_ in self._results if not row.like for n in row.shape or ""):
            lines.append(f"_sizes = {{{', '.join(f'{n!r}: n_{n}' for n in self._known)}}}")
            lines.append("_derive(_cell, _sizes, _values)")
        lines += [f"_stored = {first}.dtype", "_wide = _stored if _stored is _float64 else _float32"]
        for row, count, like in self._results:
            lines.append(f"{row.name} = {self._result(row, count, like, of.get(row.like, ''), fake=not direction)}")
        if direction:
            always = {row.name: row.listed or set(row.shape or "") <= set(self._known) for row, *_ in self._results}
            given = [*self._given, *(("" if there else f"{n}.numel()", n, n) for n, there in always.items())]
            lines.append(f"_given = {{{', '.join(f'{n!r}: {x}' for there, n, x in given if not there)}}}")
            lines += [f"if {there}: _given[{n!r}] = {x}" for there, n, x in given if there]
            lines.append(f"_operator._run(_cell, {direction!r}, _given, _values)")
        lines.append(f"return ({', '.join('*' * row.listed + row.name for row, *_ in self._results)},)")
        return _straight(name, every, lines, known)

    def _result(self, row: Row, count: int, like: str | None, layout: str, fake: bool) -> str:
        """An expression for a result that is not filled in."""
        first = self.parameters[0]
        if layout and "?" in (row.shape or ""):
            own = "".join("len(x), " if n == "?" else f"n_{n}, " for n in row.shape or "")
            return f"[{first}.new_empty(({own})) for x in {layout}]"
        if layout and row.listed:
            return f"[{first}.new_empty(0) if x is None else x.new_empty(x.shape) for x in {layout}]"
        if layout:
            return f"_rows_like({layout})"
        kept = ", dtype=_wide if backend == 'torch' else _stored" if fake else ""
        dtype = {"storage": "", "kept": kept}.get(row.dtype, ", dtype=_wide")
        sizes = [f"n_{n}" if n in self._known else f"_sizes[{n!r}]" for n in row.shape or ""]
        made = f"{first}.new_empty(({''.join(f'{size}, ' for size in sizes)}){dtype})"
        if row.listed:
            return f"[{', '.join([made] * count)}]"
        return made if like is None else f"_empty_like({like}) if {like}.is_contiguous() else {made}"


def _operands(cell: Any, rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """The tensors of a call, and the lines that make `given` of them: states in one, and computed dtypes as in the table."""
    parameters, made = list[str](), list[str]()
    for row in rows:
        names = [f"{row.name}{i}" for i in range(len(row.of(cell)))]
        parameters += names
        if row.dtype == "compute":
            names = [f"{x} if {x} is None or {x}.dtype == wide else {x}.to(wide)" for x in names]
        if row.stacked:
            names = [f"({names[0]})[None]" if len(names) == 1 else f"_stack(({', '.join(names)}))"]
        made += names
    wide = f"wide = _float64 if {parameters[0]}.dtype == _float64 else _float32"
    return parameters, [wide, f"given = [{', '.join(made)}]"]


def _straight(name: str, parameters: Sequence[str], lines: Sequence[str], known: Values) -> Callable[..., Any]:
    """A function of these lines. known: what it reads beside its parameters, as "_name"."""
    scope: Values = {f"_{each}": value for each, value in (_NAMES | known).items()}
    source = "\n    ".join([f"def {name}({', '.join(parameters)}):", *lines])
    title = f"<elman::{name}>"
    linecache.cache[title] = len(source), None, source.splitlines(keepends=True), title  # shown in tracebacks
    exec(compile(source, title, "exec"), scope)
    made: Callable[..., Any] = scope[name]
    return made


def _argument(row: Row, names: Sequence[str], may_be_empty: bool) -> tuple[str, str, str]:
    """What the modules read of an argument: in which case ("" for always), its name, and an expression for it."""
    each = list(names)
    if not row.as_is:
        by_rows = row.strides and (row.shape or "").startswith(row.strides)
        arrange = "_readable" if by_rows else "_aligned" if row.strides else "_whole"
        if row.dtype == "storage" and row.takes is not None:
            each = [f"{x} if {x}.dtype is _stored else {x}.to(_stored)" for x in each]
        each = [f"{arrange}({x})" for x in each]
    if row.listed:
        return "", row.name, f"[{', '.join(each)}]"
    if may_be_empty:
        return f"{row.name}.numel()", row.name, each[0]
    return f"{row.name} is not None" if row.optional else "", row.name, each[0]


_NAMES = {
    "readable": launch.readable, "rows_like": launch.rows_like, "aligned": launch.aligned, "whole": launch.whole,
    "empty_like": torch.empty_like, "stack": torch.stack, "is_grad_enabled": torch.is_grad_enabled,
    "float32": torch.float32, "float64": torch.float64,
}  # fmt: skip


class Operator:
    """`elman::FAMILY_CELL` and its backward, from the family's table.

    Attributes:
        op: the forward as `torch.library` has it: `op(*operands, *constants)` returns outputs and what is kept.
        call: `call(*tensors, backend="cuda", **constants)` returns the outputs; `operands(*tensors)` the operator's tensors.

    Args:
        run: `run(cell, function, given, values)` runs "forward" or "backward" in a compiled module. given: tensors as the
            modules read them, and empty results. values: the operator's arguments. Both by name.
        plain: `forward(cell, values)` and `backward(cell, values)` in PyTorch; they return all results.
        gradients: `gradients(cell, values)` gives the gradients of inputs by name. values: the arguments and the results of the
            backward, and `needs`: which inputs have a gradient. None: there is no backward.
    """

    def __init__(
        self,
        family: Family,
        cell: Any,
        run: Callable[[Any, str, Values, Values], None],
        plain: Sequence[Callable[[Any, Values], Sequence[Tensor]]] = (),
        gradients: Callable[[Any, Values], Values] | None = None,
    ) -> None:
        self.family, self.cell, self._run, self._plain, self._gradients = family, cell, run, plain, gradients
        read = [row._replace(optional=row.optional or row.read == "torch") for row in family.inputs if row.read]
        constants = [each for each in family.constants if each != "bool keep"]
        self._forward = _Signature(cell, family.inputs, (), family.constants, (*family.outputs, *family.kept))
        self._backward = _Signature(cell, (*family.arriving, *read), family.kept, constants, family.gradients)
        self._words = [each.split()[1] for each in family.constants]
        name = f"{family.name}_{cell.name}".removesuffix(f"_{family.name}")
        self.call = self._caller(name)
        parameters, lines = _operands(cell, family.inputs)
        self.operands = _straight(f"{name}_operands", parameters, [*lines, "return given"], {})

        def functions(signature: _Signature, title: str, direction: str, plain: Any) -> tuple[str, Any, Any]:
            known = {"operator": self, "cell": cell, "derive": family.derive, "plain": plain}
            run = signature.function(title, direction, **known)
            return f"{title}{signature.schema}", run, signature.function(title, **known)

        plain_forward, plain_backward = plain or (None, None)
        forward = functions(self._forward, name, "forward", plain_forward)
        if gradients is None:
            self.op = operator(*forward)
            return
        self._backward_op = operator(*functions(self._backward, f"{name}_backward", "backward", plain_backward))
        self.op = operator(*forward, self._saver(name), self._differentiate)

    def _caller(self, name: str) -> Callable[..., Sequence[Tensor]]:
        """What `call` is: with the back end "reference", autograd differentiates plain PyTorch."""
        parameters, lines = _operands(self.cell, self.family.inputs)
        keep = "_is_grad_enabled() and any(x is not None and x.requires_grad for x in given)"
        count = len(self.family.outputs)
        last = [keep if word == "keep" else word for word in self._words]
        lines.append(f"given += ({''.join(f'{each}, ' for each in last)})")
        if self._plain:
            lines.append(f"if backend == 'reference': return _plain(_cell, _values(given))[:{count}]")
        lines.append(f"return _operator.op(*given)[:{count}]")
        constants = [f"{word}='cuda'" if word == "backend" else word for word in self._words if word != "keep"]
        plain = self._plain[0] if self._plain else None
        known = {"operator": self, "cell": self.cell, "values": self._forward.values, "plain": plain}
        return _straight(f"{name}_call", [*parameters, *constants], lines, known)

    def spec(
        self, kernel: Callable[..., Sequence[Tensor]], names: Sequence[str], python: Sequence[Path] = (), **more: Any
    ) -> KernelSpec:
        """What `elman verify` checks.

        Args:
            kernel: `kernel(*inputs, backend=…)`, what a user calls. names: of what it returns, final states last.
            python: what a stamp covers beside the reference and the family's Python.
            more: fields of `KernelSpec` that do not follow from this.
        """
        family, cell = self.family, self.cell

        def call(backend: str, inputs: Inputs, _options: Mapping[str, Any]) -> Outputs:
            return dict(zip(names, kernel(*inputs.values(), backend=backend), strict=True))

        fields: dict[str, Any] = {
            "name": cell.name,
            "family": family.name,
            "cell": cell,
            "make_inputs": lambda case, generator: family.draw(cell, case, generator),
            "call": call,
            "op": self.example,
            "states": tuple(names[1:]),
            "targets": build.targets(),
            "record": cell.record,
            "python": (*cell.python(inspect.getfile(self._run)), *python),
        }
        return KernelSpec(**(fields | more))

    def example(self, backend: str, inputs: Inputs, options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        """The operator and its arguments, for `torch.library.opcheck`."""
        constants = {"keep": True, "backend": backend, **options}
        return self.op, (*self.operands(*inputs.values()), *[constants[word] for word in self._words])

    def _saver(self, name: str) -> Callable[..., None]:
        """What saves for the backward: the inputs that it reads and what was kept, and of outputs their shapes and dtypes."""
        family, flat = self.family, self._forward.parameters
        places = dict(self._forward.places)
        read: list[str] = []
        for row in family.inputs:
            names = flat[places[row.name]] if row.listed else [flat[places[row.name]]]
            if row.read == "torch":
                names = [f"{name} if backend == 'torch' else None" for name in names]
            read += names if row.read else []
        outputs = [row.name for row in family.outputs]
        kept = [row.name for row in family.kept]
        shapes = [f"({n}.shape, {n}.dtype)" for n, g in zip(outputs, family.arriving, strict=True) if not g.optional]
        lines = [
            f"{', '.join([*flat, *self._words])}, = inputs",
            f"{', '.join([*outputs, *kept])}, = output",
            "ctx.set_materialize_grads(False)",
            f"ctx.save_for_backward({', '.join([*read, *kept])})",
            f"ctx.constants = ({', '.join(word for word in self._words if word != 'keep')},)",
            f"ctx.outputs = ({', '.join(shapes)},)",
        ]
        return _straight(f"{name}_save", ("ctx", "inputs", "output"), lines, {})

    def _differentiate(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        arriving = list(gradients[: len(self.family.outputs)])
        for i, (shape, dtype) in enumerate(ctx.outputs):
            if arriving[i] is None:
                arriving[i] = next(x for x in saved if x is not None).new_zeros(shape, dtype=dtype)
        given = (*arriving, *saved, *ctx.constants)
        values = self._backward.values(given)
        values |= self._backward.made(self._backward_op(*given))
        values["needs"] = self._forward.values(ctx.needs_input_grad)
        found = cast(Any, self._gradients)(self.cell, values)
        made = [None] * len(ctx.needs_input_grad)
        for name, place in self._forward.places:
            if name in found:
                made[place] = found[name]
        return tuple(made)
