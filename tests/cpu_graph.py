"""What a CUDA graph does, on a CPU: every operation is recorded with the tensors that it read and wrote, and a replay repeats
the operations on those very tensors. No line of Python runs again, so a number that was computed on the host stays what it was,
and an input that moved is not seen; and as in a capture, reading a value on the host is an error."""

from contextlib import contextmanager

import torch
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

HOST_READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "unique", "equal")


class _Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        if name.startswith(HOST_READS):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name} reads a value on the host")
        kwargs = kwargs or {}
        out = _run(func, args, kwargs)
        self.operations.append((func, args, kwargs, out))
        return out


def _run(func, args, kwargs):
    if func.namespace != "elman":
        return func(*args, **kwargs)
    with enable_reentrant_dispatch(), torch._C._DisableTorchDispatch():  # our own operations use autograd inside
        out = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, torch.Tensor.detach, out)


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def again(func, args, kwargs, out):
    """Repeat an operation and put what it gives where it was put the first time."""
    given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs)) if x.numel()}
    for new, old in zip(tensors(func(*args, **kwargs)), tensors(out), strict=True):
        if old.numel() and old.untyped_storage().data_ptr() not in given:  # neither a view nor changed in place
            old.copy_(new)


class CpuRecorder:
    """A `Recorder`. `records` and `replays` count, and `held` what is not released; `operations` is what was recorded last."""

    def __init__(self):
        self.records = self.replays = self.held = 0

    @contextmanager
    def work(self):
        yield

    def record(self, run, generators=()):
        with _Tape() as tape:
            result = run()  # a capture would not execute it: so the first replay has happened
        self.records += 1
        self.operations = tape.operations
        self.held += 1
        return _CpuRecording(self, tape, result)


class _CpuRecording:
    def __init__(self, recorder, tape, result):
        self.recorder, self.tape, self.result, self.executed = recorder, tape, result, True

    def __call__(self):
        self.recorder.replays += 1
        if not self.executed:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                for operation in self.tape.operations:
                    again(*operation)
        self.executed = False
        return self.result

    def release(self):
        self.recorder.held -= 1
        self.tape = None
