"""Compiled modules, opened and called through one small extension of Python (`bind/launch.cpp` of `elman_csrc`).

The extension checks every tensor of a call (dtype, device, sizes, layout) and names what does not fit in one line. It is
compiled once for each Python and machine, at the first use of any compiled kernel. The modules themselves contain no Python.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from elman_core.registry.errors import ConfigError, KernelError, KernelUnavailableError
from elman_core.storage import read_json

from . import build, toolchain
from .build import Extension

if TYPE_CHECKING:
    from .family import Family

_HERE = nullcontext()
# What CUDA says of a module that this driver cannot run (35, 200, 209, 222).
_REFUSALS = ("driver version is insufficient", "kernel image is", "unsupported toolchain")
ALIGNMENT = 16  # bytes: the widest load of a kernel
Given = TypeVar("Given", Tensor, Tensor | None)


def extension() -> Extension:
    """The launcher's source, built for the host."""
    return build.shipped("elman_launch", "launch.cpp", python=True)


@cache
def _native() -> Any:
    native: Any = build.load(extension())
    native.raises(KernelError)
    return native


@cache
def open_module(path: Path, family: Family) -> Any:
    """A compiled module: `call(**arguments)`, whose `run(function)` launches, `run`, which does both, `ask` and `info`.

    Raises:
        KernelError: the module does not load or was made from other sources than this Python, or the launcher cannot be built.
            The module's methods raise it for arguments that do not fit and for launches that fail.
    """
    functions = {name: needed.split() for name, needed in family.functions.items()}
    title = f"kernel {path.name.partition('-')[0]}"
    return _native().Module(str(path), family.name, title, family.fields, family.sizes, functions)


def opened(what: Extension, family: Family, on_cpu: bool = False) -> Any:
    """`open_module` of what is compiled for the current device, built if no cache folder holds it.

    Args:
        on_cpu: whether it runs on tensors of the CPU: a kernel of a GPU is then emulated.

    Raises:
        ConfigError: the cell's header says something else than its declaration in Python.
        KernelUnavailableError: nvcc is of a later CUDA than the driver. KernelError: as `open_module`.
    """
    if on_cpu and what.is_cuda:
        what = build.emulated(what)
    _native()  # first: without it, compiling the kernel would be in vain
    arch = build.local_arch(what)
    found = build.find(what, arch)
    if what.is_cuda:
        check_driver(what.name, found)
    module = open_module(found or build.build(what, arch), family)
    for i, (name, declared) in enumerate(what.declared):
        there = type(declared)(module.ask("declares", i))
        if there != declared:
            header = what.header.name if what.header is not None else "the header"
            raise ConfigError(f"kernel {what.name}: {header} says {name} = {there}, Python {declared}: make them agree")
    return module


def driver_version() -> int:
    """Return the newest CUDA that the driver runs, 1000 times the major version plus 10 times the minor one."""
    found = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    return found.value


def check_driver(name: str, there: Path | None, error: Exception | None = None) -> None:
    """Raise `KernelUnavailableError` if the nvcc of a module (`there`, or None before it is built) is of a later CUDA than the
    driver, or if `error`, of its launch, says that the driver refuses it."""
    if error is not None and not any(words in str(error) for words in _REFUSALS):
        return
    driver = driver_version()
    said = read_json(there.with_suffix(".json"))["compiler_version"] if there else build.version(toolchain.find_nvcc())
    toolkit = re.search(r"release (\d+)[.\d]+", said)
    if error is not None or (toolkit is not None and int(toolkit[1]) > driver // 1000):
        here = f"CUDA {driver // 1000}.{driver % 1000 // 10}"
        raise KernelUnavailableError(
            f"kernel {name}: nvcc is of {toolkit[0] if toolkit else said}, the driver runs {here} ({error or 'older'}): "
            f"update the driver, or set CUDA_HOME to a toolkit of {here} or older, and ELMAN_CACHE to a new folder"
        )


def opener(family: Family, extension: Callable[..., Extension]) -> Callable[..., Any]:
    """`open(*key, index)`: the module of `extension(*key)`, opened once for each key and device. index: None or negative for
    tensors of a CPU."""

    @cache
    def open_for(*key: Any) -> Any:
        *what, index = key
        return opened(extension(*what), family, on_cpu=index is None or index < 0)

    return open_for


def readable(x: Tensor) -> Tensor:
    """x itself if a kernel can read it in place (rows of adjacent elements that start aligned), else a contiguous copy."""
    if x.is_contiguous():
        return x if x.data_ptr() % ALIGNMENT == 0 else whole(x)
    starts = (x.data_ptr(), *(step * x.element_size() for step in x.stride()[:-1]))
    return x if x.stride(-1) == 1 and not any(start % ALIGNMENT for start in starts) else whole(x)


def whole(x: Given) -> Given:
    """x itself if it is contiguous and aligned, or None; else a copy."""
    if x is None or (x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def rows_like(x: Tensor) -> Tensor:
    """An empty tensor in the layout of x, with rows of adjacent elements as a kernel writes them."""
    made = torch.empty_like(x)
    return made if made.stride(-1) == 1 else x.new_empty(x.shape)


def aligned(x: Tensor, align: int = ALIGNMENT) -> Tensor:
    """x itself if a kernel can read it in place (time steps evenly apart, the rest adjacent, rows aligned), else a copy.

    `align` 0 requires no alignment beyond the elements'. The host reads contiguous tensors only.
    """
    x = evenly(x)
    apart = align == 0 or (x.data_ptr() % align == 0 and x.stride(1) * x.element_size() % align == 0)
    if x.is_contiguous() and apart:  # nearly all calls: what follows takes as long as a launch
        return x
    adjacent = all(x.stride(i) == x.shape[i + 1 :].numel() for i in range(2, x.dim()) if x.shape[i] > 1)
    even = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    far = x.shape[1] == 1 or x.stride(1) >= x.shape[2:].numel()
    if adjacent and even and far and apart and (x.is_cuda or align):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def evenly(x: Tensor) -> Tensor:
    """x (B, T, ...). The stride of a single step is arbitrary; it becomes the one that puts rows evenly apart."""
    return x.as_strided(x.shape, (x.stride(0), x.stride(0), *x.stride()[2:])) if x.shape[1] == 1 else x


def on(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which the device of x is the current one."""
    index = x.get_device()
    return _HERE if index < 0 or index == torch.cuda.current_device() else torch.cuda.device(index)


def stream(x: Tensor) -> int:
    """The current stream of the device of x; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0


class _Streams:
    """The launches under way on several streams of a GPU whose blocks wait for each other.

    Each of their blocks fills a multiprocessor. If two launches began and neither found room for its last blocks, both would
    wait in vain; so all that may run at once have at most as many blocks as there are multiprocessors.
    """

    def __init__(self, processors: int) -> None:
        self.processors = processors
        # By stream, oldest first: the most blocks, the end of its last launch.
        self.running: dict[Any, tuple[int, Any]] = {}
        self.ended: dict[Any, Any] = {}  # by stream: all later launches wait for this end

    @contextmanager
    def launch(self, blocks: int) -> Iterator[None]:
        stream: Any = torch.cuda.current_stream()
        for event in self.ended.values():
            stream.wait_event(event)
        blocks = max(blocks, self.running.pop(stream, (0, None))[0])  # an earlier one of this stream may still run
        while self.running and blocks + sum(each for each, _ in self.running.values()) > self.processors:
            oldest = next(iter(self.running))
            _, self.ended[oldest] = self.running.pop(oldest)
            stream.wait_event(self.ended[oldest])
        yield
        self.running[stream] = blocks, stream.record_event()


_streams: ContextVar[_Streams | None] = ContextVar("streams", default=None)


@contextmanager
def several_streams(device: torch.device) -> Iterator[None]:
    """A context in which this thread launches on several streams of a GPU: what is launched `together` keeps to its limits."""
    before = _streams.set(_Streams(torch.cuda.get_device_properties(device).multi_processor_count))
    try:
        yield
    finally:
        _streams.reset(before)


def together(blocks: int | None = None) -> AbstractContextManager[None]:
    """A context for a launch on the current device whose blocks wait for each other, outside of clusters.

    Several streams (a long prompt) run such launches at once only as far as the GPU holds all their blocks.

    Args:
        blocks: of the launch; None if they are not known: no other such launch then runs beside it.
    """
    streams = None if torch.compiler.is_compiling() else _streams.get()
    if streams is None:
        return _HERE
    return streams.launch(streams.processors if blocks is None else blocks)
