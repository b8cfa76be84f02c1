"""A list of the operations that a function runs, with the very tensors that they read and write."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

HOST_READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "unique", "equal")


class Operation(NamedTuple):
    """One call of an operator and what it returned."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def name(self) -> str:
        """Of the operator, without overload: "add" for `aten.add.Tensor`, "add_" in place."""
        return str(self.func.overloadpacket.__name__)

    def written(self) -> list[Tensor]:
        """The arguments that it changes."""
        given = [
            self.args[i] if i < len(self.args) else self.kwargs.get(a.name)
            for i, a in enumerate(self.func._schema.arguments)
        ]
        told = zip(self.func._schema.arguments, given, strict=True)
        return tensors([x for a, x in told if a.alias_info is not None and a.alias_info.is_write])

    def again(self) -> None:
        """Repeat it, and put what it gives where it was put the first time."""
        given = {x.untyped_storage().data_ptr() for x in tensors((self.args, self.kwargs)) if x.numel()}
        for new, old in zip(tensors(self.func(*self.args, **self.kwargs)), tensors(self.out), strict=True):
            if old.numel() and old.untyped_storage().data_ptr() not in given:  # neither a view nor changed in place
                old.copy_(new)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of nested lists and dictionaries, in order."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Tape(TorchDispatchMode):
    """Inside, every operation runs and is listed; reading a value on the host is an error, as in a CUDA graph's capture.

    Attributes:
        operations: the list.

    Raises:
        RuntimeError: a value is read on the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__.startswith(HOST_READS):
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
