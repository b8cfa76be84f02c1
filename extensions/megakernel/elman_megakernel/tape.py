"""A step recorded as a list of operations with the tensors that they read and make, for programs of a CPU and of a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

HOST_READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "unique", "equal")
POINTWISE = {
    "copy": "{0}", "neg": "-{0}", "abs": "fabsf({0})", "exp": "expf({0})", "tanh": "tanhf({0})", "sigmoid": "sigmoid({0})",
    "silu": "{0} * sigmoid({0})", "relu": "fmaxf({0}, 0.f)", "log_sigmoid": "-softplus(-{0})", "softplus": "softplus({0})",
    "log": "logf({0})", "square": "{0} * {0}", "sqrt": "sqrtf({0})", "rsqrt": "1.f / sqrtf({0})", "reciprocal": "1.f / {0}",
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "maximum": "fmaxf({0}, {1})",
    "minimum": "fminf({0}, {1})", "addcmul": "{0} + {1} * {2}",
}  # fmt: skip
"""Operators whose elements do not depend on each other, as C++; in the order of `Code` in `elman/program_cpu.h`."""
SAME = (
    "to", "_to_copy", "clone", "contiguous", "reshape", "flatten", "view", "_unsafe_view", "unsqueeze", "squeeze", "alias",
    "detach", "lift_fresh",
)  # fmt: skip
"""Operators whose results are the elements of their input, in order."""

_SHAPED = "(new_(empty|zeros|ones|full)|(empty|zeros|ones|full)_like)"


class Operation(NamedTuple):
    """One call of an operator and what it returned."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def name(self) -> str:
        """Of the operator, without overload, and the same in place: "add" for `aten.add.Tensor` and `aten.add_.Tensor`."""
        return str(self.func.overloadpacket.__name__).rstrip("_")

    @property
    def reads(self) -> list[Tensor]:
        """The arguments whose numbers matter, not only their shapes."""
        return [] if re.fullmatch(_SHAPED, self.name) else tensors((self.args, self.kwargs))

    @property
    def writes(self) -> list[Tensor]:
        """The arguments that it changes."""
        given = [
            self.args[i] if i < len(self.args) else self.kwargs.get(a.name)
            for i, a in enumerate(self.func._schema.arguments)
        ]
        told = zip(self.func._schema.arguments, given, strict=True)
        return tensors([x for a, x in told if a.alias_info is not None and a.alias_info.is_write])

    @property
    def makes(self) -> list[Tensor]:
        """The results that are neither views of arguments nor changed in place."""
        given = memory((self.args, self.kwargs))
        return [x for x in tensors(self.out) if not memory(x) <= given]

    def again(self) -> Callable[[], None]:
        """What repeats it, and puts what it gives where it was put the first time."""
        made = {id(x) for x in self.makes}
        places = [x if id(x) in made else None for x in tensors(self.out)]

        def repeat() -> None:
            for new, place in zip(tensors(self.func(*self.args, **self.kwargs)), places, strict=True):
                if place is not None:
                    place.copy_(new)

        return repeat


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of nested lists and dictionaries, in order."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def memory(tree: Any) -> set[int]:
    """Where the storages of the tensors of a tree begin; those without elements have none."""
    return {x.untyped_storage().data_ptr() for x in tensors(tree) if x.numel()}


class Tape(TorchDispatchMode):
    """Inside, every operation runs and is listed.

    Args:
        host: whether a value may be read on the host; otherwise it is an error, as in a CUDA graph's capture.

    Attributes:
        operations: the list.

    Raises:
        RuntimeError: a value is read on the host.
    """

    def __init__(self, host: bool = False) -> None:
        super().__init__()
        self.host, self.operations = host, list[Operation]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.host and func.overloadpacket.__name__.startswith(HOST_READS):
            name = func.overloadpacket.__name__
            raise RuntimeError(f"operation not permitted when stream is capturing: {name} reads a value on the host")
        out = self.run(func, args, kwargs)
        self.operations.append(Operation(func, args, kwargs, out))
        return out

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation returns."""
        if func.namespace != "elman":
            return func(*args, **kwargs)
        with enable_reentrant_dispatch(), torch._C._DisableTorchDispatch():  # our own operations use autograd inside
            out = func(*args, **kwargs)
        return tree_map_only(Tensor, torch.Tensor.detach, out)

    def varying(self, inputs: set[int]) -> list[bool]:
        """Which operations a repetition needs: those that draw at random or depend on these places, whose numbers change."""
        found, places = list[bool](), set(inputs)
        for operation in self.operations:
            random = torch.Tag.nondeterministic_seeded in operation.func.tags
            found.append(random or bool(memory((operation.reads, operation.makes)) & places))
            if found[-1]:
                places |= memory(operation.out)
        return found
