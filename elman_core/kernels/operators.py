"""The operators of a kernel, from the table of its family: schema, results, gradients, launches, verification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import launch
from .family import Family, Row, Values
from .runtime import compute_dtype, operator, tensors
from .spec import Inputs, KernelSpec, Outputs, Problems, Target


class _Signature:
    """The arguments and results of one direction. constants: as in `Family`."""

    def __init__(self, cell: Any, rows: Sequence[Row], constants: Sequence[str], results: Sequence[Row]) -> None:
        words = list[str]()
        self._first, self._listed = rows[0].name, rows[0].listed
        self.places: list[tuple[str, Any]] = []
        self._arrange: list[tuple[str, Callable[[Any], Any] | None, bool, bool]] = []
        self._shapes: list[tuple[str, bool, list[tuple[int, str]]]] = []
        known: set[str] = set()
        for row in rows:
            names = [f"{row.name}{i}" for i in range(len(row.of(cell)))] if row.listed else [row.name]
            self.places.append((row.name, slice(len(words), len(words) + len(names)) if row.listed else len(words)))
            words += [f"Tensor{'?' * row.optional} {name}" for name in names]
            arrange = launch.readable if len(row.strides) > 1 else launch.timed if row.strides else launch.whole
            self._arrange.append(
                (row.name, None if row.as_is else arrange, row.dtype == "storage" and row.takes is not None, row.listed)
            )
            new = [(i, letter) for i, letter in enumerate(row.shape or "") if letter not in known]
            if new and names and not row.optional:
                self._shapes.append((row.name, row.listed, new))
                known |= {letter for _, letter in new}
        # A result of an argument's shape and dtype is made like it, which takes half the time.
        likes: dict[tuple[str | None, str], tuple[str, bool]] = {}
        for row in rows:
            if row.of(cell) and not row.optional and not (row.takes and row.dtype == "storage"):
                likes.setdefault((row.shape, row.dtype), (row.name, row.listed))
        self.results = [
            (
                row.name,
                row.shape or "",
                row.dtype,
                row.like,
                likes.get((row.shape, row.dtype)),
                len(row.of(cell)),
                row.listed,
            )
            for row in results
        ]
        self.flat = not any(row.listed for row in results)
        self.places += [(each.split()[1], len(words) + i) for i, each in enumerate(constants)]
        count, self.found = 0, list[tuple[str, Any]]()
        for row in results:
            many = len(row.of(cell)) if row.listed else 1
            self.found.append((row.name, slice(count, count + many) if row.listed else count))
            count += many
        self.schema = f"({', '.join([*words, *constants])}) -> {tensors(count)}"

    def values(self, given: Sequence[Any]) -> Values:
        """Arguments by name."""
        return {name: given[place] for name, place in self.places}

    def made(self, results: Sequence[Tensor]) -> Values:
        """Results by name."""
        return {name: results[place] for name, place in self.found}

    def flattened(self, made: Values) -> tuple[Tensor, ...]:
        """Results as the operator returns them."""
        if self.flat:
            return tuple(made.values())
        return tuple(x for each in made.values() for x in (each if isinstance(each, list) else [each]))

    def first(self, values: Values) -> Tensor:
        """The tensor that sets the dtype and the device."""
        x: Any = values[self._first]
        return x[0] if self._listed else x  # type: ignore[no-any-return]

    def sizes(self, values: Values) -> Values:
        """The sizes that the arguments show, by letter."""
        made: Values = {}
        for name, listed, letters in self._shapes:
            shape = values[name][0].shape if listed else values[name].shape
            for i, letter in letters:
                made[letter] = shape[i]
        return made

    def arranged(self, values: Values) -> Values:
        """The tensors among the arguments as the modules read them; none that is empty."""
        made, dtype = Values(), self.first(values).dtype
        for name, arrange, convert, listed in self._arrange:
            x = values[name]
            if x is None:
                continue
            if arrange is None:
                made[name] = x
            elif listed:
                made[name] = [arrange(each) for each in x]
            elif convert and x.dtype != dtype:
                made[name] = arrange(x.to(dtype))
            elif x.numel():
                made[name] = arrange(x)
        return made


class Operator:
    """`elman::FAMILY_CELL` and its backward, from the family's table.

    Attributes:
        op: the forward as `torch.library` has it: `op(*operands, *constants)` returns outputs and what is kept.

    Args:
        run: `run(cell, function, given, values)` runs "forward" or "backward" in a compiled module. given: tensors as the
            modules read them, and empty results. values: the operator's arguments. Both by name.
        plain: `forward(cell, values)` and `backward(cell, values)` in PyTorch; they return all results.
        gradients: `gradients(cell, values)` gives the gradients of inputs by name. values: the arguments and the results of the
            backward, and `needs`: which inputs have a gradient.
    """

    def __init__(
        self,
        family: Family,
        cell: Any,
        run: Callable[[Any, str, Values, Values], None],
        plain: Sequence[Callable[[Any, Values], Sequence[Tensor]]],
        gradients: Callable[[Any, Values], Values],
    ) -> None:
        self.family, self.cell, self._run, self._plain, self._gradients = family, cell, run, plain, gradients
        read = [row._replace(optional=row.optional or row.read == "torch") for row in family.inputs if row.read]
        constants = [each for each in family.constants if each != "bool keep"]
        self._forward = _Signature(cell, family.inputs, family.constants, (*family.outputs, *family.kept))
        self._backward = _Signature(cell, (*family.arriving, *read, *family.kept), constants, family.gradients)
        self._words = [each.split()[1] for each in family.constants]
        rows = [row for row in family.inputs for _ in row.of(cell)]
        self._computed = [i for i, row in enumerate(rows) if row.dtype == "compute"]
        stacked = [i for i, row in enumerate(rows) if row.stacked]
        self._states = slice(stacked[0], stacked[-1] + 1) if stacked else None
        rows = [row for row in family.inputs for _ in (row.of(cell) if row.listed else "1")]
        self._read = [(i, row.read == "torch") for i, row in enumerate(rows) if row.read]
        self._handed = [len(rows) + i for i, word in enumerate(self._words) if word != "keep"]
        name = f"{family.name}_{cell.name}".removesuffix(f"_{family.name}")
        self._backward_op = operator(
            f"{name}_backward{self._backward.schema}", partial(self._results, 1), partial(self._fake, self._backward)
        )
        self.op = operator(
            f"{name}{self._forward.schema}",
            partial(self._results, 0),
            partial(self._fake, self._forward),
            self._save,
            self._differentiate,
        )

    def __call__(self, *given: Any, backend: str = "cuda", **constants: Any) -> Sequence[Tensor]:
        """The outputs for the tensors of a call. With "reference", autograd differentiates plain PyTorch."""
        arguments = self.operands(given)
        keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments)
        for word in self._words:
            arguments.append(keep if word == "keep" else backend if word == "backend" else constants[word])
        if backend == "reference":
            return self._plain[0](self.cell, self._forward.values(arguments))[: len(self.family.outputs)]
        made: Sequence[Tensor] = self.op(*arguments)
        return made[: len(self.family.outputs)]

    def operands(self, given: Sequence[Any]) -> list[Any]:
        """The operator's tensors from those of a call: states in one, and computed dtypes as in the table."""
        wide, made = compute_dtype(given[0]), list(given)
        for i in self._computed:
            x = made[i]
            if x is not None and x.dtype != wide:
                made[i] = x.to(wide)
        if self._states is not None:
            states = made[self._states]
            made[self._states] = [states[0][None] if len(states) == 1 else torch.stack(states)]
        return made

    def spec(
        self,
        kernel: Callable[..., Sequence[Tensor]],
        problems: Mapping[Target, Problems],
        names: Sequence[str],
        **more: Any,
    ) -> KernelSpec:
        """What `elman verify` checks.

        Args:
            kernel: `kernel(*inputs, backend=…)`, what a user calls. names: of what it returns, final states last.
            more: fields of `KernelSpec` that do not follow from this.
        """
        family, cell = self.family, self.cell

        def call(backend: str, inputs: Inputs, _options: Mapping[str, Any]) -> Outputs:
            return dict(zip(names, kernel(*inputs.values(), backend=backend), strict=True))

        fields: dict[str, Any] = {
            "cases": lambda target, grid: problems[target].cases(grid),
            "make_inputs": lambda case, generator: family.draw(cell, case, generator),
            "call": call,
            "op": self.example,
            "states": tuple(names[1:]),
        }
        return KernelSpec(name=cell.name, **{**fields, **more})

    def example(self, backend: str, inputs: Inputs, options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        """The operator and its arguments, for `torch.library.opcheck`."""
        constants = {"keep": True, "backend": backend, **options}
        return self.op, (*self.operands(tuple(inputs.values())), *[constants[word] for word in self._words])

    def _results(self, direction: int, *given: Any) -> tuple[Tensor, ...]:
        signature = (self._forward, self._backward)[direction]
        values = signature.values(given)
        if values.get("backend") == "torch":
            return tuple(self._plain[direction](self.cell, values))
        made = self._empty(signature, values)
        arguments = signature.arranged(values)
        for name, x in made.items():
            if isinstance(x, list) or x.numel():
                arguments[name] = x
        self._run(self.cell, ("forward", "backward")[direction], arguments, values)
        return signature.flattened(made)

    def _fake(self, signature: _Signature, *given: Any) -> tuple[Tensor, ...]:
        return signature.flattened(self._empty(signature, signature.values(given)))

    def _empty(self, signature: _Signature, values: Values) -> Values:
        """The results of one direction, not filled in."""
        sizes, first, made = signature.sizes(values), signature.first(values), Values()
        self.family.derive(self.cell, sizes, values)
        stored, plain = first.dtype, values.get("backend") == "torch"
        wide = stored if stored == torch.float64 else torch.float32
        for name, letters, dtype, layout, like, count, listed in signature.results:
            if layout and listed:
                made[name] = [first.new_empty(0) if x is None else x.new_empty(x.shape) for x in values[layout]]
                continue
            if layout:
                made[name] = torch.empty_like(values[layout])
                continue
            if like is not None and not listed:
                x = values[like[0]][0] if like[1] else values[like[0]]
                if x.is_contiguous():
                    made[name] = torch.empty_like(x)
                    continue
            shape = [sizes[letter] for letter in letters]
            if listed:
                made[name] = [first.new_empty(shape) for _ in range(count)]
            elif dtype == "storage" or (dtype == "kept" and not plain) or wide == stored:
                made[name] = first.new_empty(shape)
            else:
                made[name] = first.new_empty(shape, dtype=wide)
        return made

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.constants = [inputs[i] for i in self._handed]
        plain, count = "torch" in ctx.constants, len(self.family.outputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(inputs[i] if plain or not alone else None for i, alone in self._read), *output[count:])
        ctx.outputs = [(x.shape, x.dtype) for x in output[:count]]

    def _differentiate(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, arriving = ctx.saved_tensors, list(gradients[: len(ctx.outputs)])
        for i, row in enumerate(self.family.arriving):
            if arriving[i] is None and not row.optional:
                shape, dtype = ctx.outputs[i]
                arriving[i] = next(x for x in saved if x is not None).new_zeros(shape, dtype=dtype)
        given = (*arriving, *saved, *ctx.constants)
        values = self._backward.values(given)
        values |= self._backward.made(self._backward_op(*given))
        values["needs"] = self._forward.values(ctx.needs_input_grad)
        found, made = self._gradients(self.cell, values), [None] * len(ctx.needs_input_grad)
        for name, place in self._forward.places:
            if name in found:
                made[place] = found[name]
        return tuple(made)
