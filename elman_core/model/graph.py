"""Record a function's GPU work as a CUDA graph, replay it without the host, and read its results later.

Training and generation both use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from elman_core.registry.checks import ran_out

WARM = 2
"""Steps before a recording: the first compiles and verifies kernels, the second settles the allocator."""


@dataclass(frozen=True)
class HostCopy:
    """A tensor on its way to the host, and the event of its arrival; None: it is there. Reading it waits only for the work
    that computes it."""

    values: Tensor
    arrived: torch.cuda.Event | None = None

    @classmethod
    def of(cls, values: Tensor) -> HostCopy:
        """Start the copy of `values`, which may be overwritten afterwards."""
        if values.device.type != "cuda":
            return cls(values.clone())
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(host, arrived)

    def read(self) -> list[Any]:
        """Wait for them; `values.tolist()`."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values.tolist()


class Recording(Protocol):
    def __call__(self) -> Tensor:
        """Replay it; returns the same tensor object that the function returned."""

    def release(self) -> None:
        """Free it and its memory. It must not be called again."""


class Recorder(Protocol):
    """Records: `CudaRecorder`, that of an extension for a CPU, or the tests' recorder. `burst`: steps of decoding that are best
    recorded at once."""

    burst: int

    def work(self) -> AbstractContextManager[Any]:
        """Code run inside may be recorded later, or is being replayed."""

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """Record `run`; the result replays it and returns the same tensor object that `run` returned.

        It reads and writes tensors whose addresses do not change, and never waits for the device. It must have run once before,
        so that everything that is compiled or allocated once exists. Raises `RuntimeError` if it did what cannot be recorded.
        """


def try_to_record(recorder: Recorder, run: Callable[[], Tensor]) -> Recording | RuntimeError:
    """`recorder.record(run)`, or why it cannot be recorded.
    Raises `RuntimeError` if memory ran out (`ran_out`), which does not mean that `run` cannot be recorded."""
    try:
        return recorder.record(run)
    except RuntimeError as error:
        if ran_out(error):
            raise
        return error


class CudaRecording:
    """A CUDA graph and the tensor that its replay fills."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor) -> None:
        self.graph, self.result = graph, result

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.result

    def release(self) -> None:
        """Destroy the graph even if it is referenced: an NCCL communicator cannot close while a graph has its operations."""
        self.graph.reset()


class CudaRecorder:
    """Records a CUDA graph on a separate stream, which capturing requires."""

    burst = 4  # the host reads the bytes of one while the next is computed

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    @contextmanager
    def work(self) -> Iterator[None]:
        before = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(before)
        with torch.cuda.stream(self.stream):
            yield
        before.wait_stream(self.stream)

    def record(self, run: Callable[[], Tensor]) -> CudaRecording:
        graph = torch.cuda.CUDAGraph()
        # "thread_local": a thread that reads ahead may allocate and copy meanwhile.
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                result = run()
        except BaseException:
            graph.reset()  # the error's traceback would keep it
            raise
        return CudaRecording(graph, result)
