"""The windows of each step, read ahead in a thread and already on their way to the GPU.

Reading ahead does not change what a step sees: a batch is a function of its step. Bytes are copied as uint8, wider tokens as
int32, and converted to int64 on the device. A slow disk makes a step wait; no batch is skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from elman_core.data import Batch, Source

from .objective import States
from .ranks.group import Ranks
from .settings import Settings
from .step import Windows

DEPTH = 4
"""Batches read ahead: a step waits only if a read takes longer than this many steps."""

CLOSING = 5.0
"""Seconds that the end of a run waits for an unfinished read, in case a disk hangs."""


@dataclass(frozen=True)
class Ready:
    """A batch, and what a step reads of it on the device: tokens, targets and counts as `step.Windows` has them.

    Attributes:
        copied: the event of their arrival; None: they are there.
    """

    batch: Batch
    tokens: Tensor
    targets: Tensor | None = None
    counts: Tensor | None = None
    copied: torch.cuda.Event | None = None


class Prefetcher:
    """Reads batch s, s + 1, … while s is being used.

    Args:
        read: the batch of a step; called in another thread. device: where its tokens go. depth: at least 2.
    """

    def __init__(self, read: Callable[[int], Batch], device: torch.device, depth: int = DEPTH) -> None:
        self.read, self.device, self.depth = read, device, depth
        self._wanted = -1  # the step whose batch is next in the queue
        self._ready: queue.Queue[Ready | BaseException] = queue.Queue()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None

    def get(self, step: int) -> Ready:
        """The batch of `step`, waiting for it if needed. Any step may be requested; only the following ones are read ahead.

        Raises:
            any exception that `read` raised for this step.
        """
        if self._thread is None or step != self._wanted:
            self.close()
            self._ready, self._over = queue.Queue(self.depth - 1), threading.Event()  # one more waits for room
            self._thread = threading.Thread(
                target=self._run, args=(step, self._ready, self._over), name="elman-prefetch", daemon=True
            )
            self._thread.start()
        item = self._ready.get()
        self._wanted = step + 1
        if isinstance(item, BaseException):
            self.close()  # asked for again, it is read again
            raise item
        if item.copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(item.copied)
            for tensor in (item.tokens, item.targets, item.counts):
                if tensor is not None:
                    tensor.record_stream(current)
        return item

    def close(self) -> None:
        """End the thread. A later `get` starts another."""
        self._over.set()
        with contextlib.suppress(queue.Empty):
            while True:  # the thread may be waiting for room
                self._ready.get_nowait()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(CLOSING)

    def _run(self, step: int, ready: queue.Queue[Ready | BaseException], over: threading.Event) -> None:
        try:
            while not over.is_set():
                ready.put(self._load(step))
                step += 1
        except BaseException as error:  # the step that needs the batch raises it
            ready.put(error)

    def _load(self, step: int) -> Ready:
        batch = self.read(step)
        if self.device.type != "cuda":
            return Ready(batch, *tensors(batch, lambda t: t.to(self.device)))
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            copies = tensors(batch, lambda t: t.pin_memory().to(self.device, non_blocking=True))
            copied = torch.cuda.Event()
            copied.record()
        return Ready(batch, *copies, copied)


def tensors(batch: Batch, move: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Tokens, targets and counts of a batch, moved; uint8, int32 (torch computes little in wider unsigned dtypes), bool."""

    def one(array: np.ndarray) -> Tensor:
        narrow = array.dtype in (np.uint8, np.bool_)
        return move(torch.from_numpy(np.ascontiguousarray(array if narrow else array.astype(np.int32))))

    return (
        one(batch.tokens),
        None if batch.targets is None else one(batch.targets),
        None if batch.counts is None else one(batch.counts),
    )


class Feed:
    """This rank's rows of each global batch, as a step takes them: read ahead for a GPU; on a CPU, that would only take time
    from the computing threads.
    """

    def __init__(self, windows: Source, settings: Settings, device: torch.device, ranks: Ranks) -> None:
        self.windows, self.device = windows, device
        self.rows = None if ranks.size == 1 else ranks.rows(settings.train.batch_size)
        self.carries, self.resets = settings.data.sampling == "tbptt", settings.data.documents == "reset"
        self.reader = Prefetcher(self.read, device) if device.type == "cuda" else None

    def read(self, step: int) -> Batch:
        return self.windows.batch(step, self.rows)

    def get(self, step: int, carry: States | None) -> Windows:
        """The windows of `step`, to continue from the states `carry` (tbptt)."""
        if self.reader is not None:
            ready = self.reader.get(step)
        else:
            batch = self.read(step)
            ready = Ready(batch, *tensors(batch, lambda t: t.to(self.device)))
        windows = Windows(ready.tokens, targets=ready.targets, counts=ready.counts)
        if not self.carries:
            return windows
        batch = ready.batch
        inputs_BT = batch.tokens[:, : self.windows.length]
        fresh_BT = inputs_BT == self.windows.separator if self.resets else np.zeros(inputs_BT.shape, dtype=bool)
        fresh_BT[:, 0] |= batch.fresh
        return dataclasses.replace(windows, fresh=torch.from_numpy(fresh_BT), carry=carry)

    def close(self) -> None:
        """End the reading thread."""
        if self.reader is not None:
            self.reader.close()
