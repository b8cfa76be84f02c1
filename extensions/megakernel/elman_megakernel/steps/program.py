"""A recorded function, checked while it is recorded, and repeated without Python where there are instructions for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elman_core.extension import KernelError, in_int8
from elman_megakernel.tape import Operation, Tape, memory, tensors

from .lower import Instruction, UnknownOperationError, lower, name_of, read_narrow


class Checked(Tape):
    """A tape that compares the instructions of each operation with plain PyTorch, from the very inputs of the recording.

    Attributes:
        before: what the function wrote that it had not made, with the values before: {address: (tensor, values)}.
        made: the addresses of what the function made. lowered: the instructions of each operation, None for Python.
        coarsest: the largest relative distance of two numbers, over the dtypes of all results.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.held = module, list[Tensor]()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.made, self.written = set[int](), set[int]()
        self.lowered: list[list[Instruction] | None] = []
        self.coarsest = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        private: Any = torch._C
        inside = None
        if func.namespace == "elman":
            inside = private.DispatchKey.CompositeExplicitAutograd if "torch" in args else None
        elif name_of(func) is None and func._can_decompose():
            inside = private.DispatchKey.CompositeImplicitAutograd
        if inside is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self:
            return func._op_dk(inside, *args, **(kwargs or {}))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        changed = Operation(func, args, kwargs, None).writes
        for x in changed:
            if not (at := memory(x)) <= self.made | self.before.keys():
                whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
                self.before |= dict.fromkeys(at, (whole, whole.clone()))
        self.written |= memory(changed)
        old = [x.clone() for x in changed]
        out = super().run(func, args, kwargs)
        operation = Operation(func, args, kwargs, out)
        self.made |= memory(operation.makes)
        self.lowered.append([])  # of a view
        if results := [*changed, *operation.makes]:
            try:
                self.lowered[-1] = code = lower(operation, self.held)
            except UnknownOperationError:
                if name_of(func) == "linear":  # then a row's bits might depend on the rows beside it
                    raise RuntimeError(f"there is no instruction for a product of {args[0].dtype}") from None
                self.lowered[-1] = None
                return out
            wanted = [x.clone() for x in results]
            for x, value in zip(changed, old, strict=True):
                x.copy_(value)
            call(self.module, code, 1)()
            for x, right in zip(results, wanted, strict=True):
                eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
                self.coarsest = max(self.coarsest, eps)
                compare(func, x, right, eps)
                x.copy_(right)
        return out


def compare(func: Any, x: Tensor, right: Tensor, eps: float) -> None:
    """Half of the digits of numbers stored this exactly must agree: what is wrong is far off, and rounding is far below."""
    same = torch.equal(x, right)
    if not same and x.is_floating_point():
        most = right.nan_to_num(0, 0, 0).abs().max()
        same = torch.allclose(x, right, rtol=0, atol=eps**0.5 * float(most), equal_nan=True)
    if not same:
        raise KernelError(f"decoding on this CPU computes a wrong {func}: set ELMAN_KERNELS=off, and report this line")


def call(module: Any, code: Sequence[Instruction] | Tensor, threads: int) -> Callable[[], None]:
    """What runs these instructions."""
    made = module.call(code=torch.as_tensor(code), threads=threads, stream=0)
    return lambda: made.run("run")


class Program:
    """A recorded function: called, it repeats it.

    Attributes:
        parts: in order, instructions, and operations that have none and are repeated in Python. module: runs the former.
    """

    def __init__(self, tape: Checked, result: Tensor) -> None:
        self.result, self._tape, self.module = result, tape, tape.module
        self.parts: list[list[Instruction] | Operation] = []
        given = [x for operation in tape.operations for x in operation.reads if not x.is_floating_point()]
        inputs = tape.written | (memory(given) - tape.made)  # whole numbers from outside are tokens, which may change
        narrow: dict[int, int] = {}  # constants that are copies of bfloat16, by address: products read half as much
        int8: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # constants that have been rounded: a quarter
        for operation, lowered, varies in zip(tape.operations, tape.lowered, tape.varying(inputs), strict=True):
            if operation.name in ("empty", "empty_like", "new_empty"):
                continue
            if not varies:
                wide, of = operation.out, next(iter(operation.args), None)
                if isinstance(of, Tensor) and operation.name == "to" and of.dtype == torch.bfloat16:
                    narrow |= {wide.data_ptr(): of.data_ptr()} if wide.stride() == of.stride() else {}
                continue
            inputs |= memory(operation.out)
            for w in operation.reads:
                if not memory(w) & inputs and (found := in_int8(w)) is not None:
                    int8[w.data_ptr(), *found[0].shape, found[0].shape[1]] = found
                    tape.held += found
            if lowered is None:
                self.parts.append(operation)
            elif code := [read_narrow(instruction, narrow, int8) for instruction in lowered]:
                if not self.parts or isinstance(self.parts[-1], Operation):
                    self.parts.append([])
                self.parts[-1] += code  # type: ignore[operator]
        threads = torch.get_num_threads()
        self.steps = [
            part.again() if isinstance(part, Operation) else call(self.module, part, threads) for part in self.parts
        ]

    def __call__(self) -> Tensor:
        for step in self.steps:
            step()
        return self.result

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """The memory of all its tensors, by address."""
        found = [x.untyped_storage() for x in tensors([self._tape.held, *map(list, self._tape.operations)])]
        return {storage.data_ptr(): storage for storage in found if storage.nbytes()}

    def release(self) -> None:
        self.steps = []
