"""The windows of each step, read ahead in a thread and already on their way to the GPU.

Reading ahead does not change what a step sees: a batch is a function of its step. Bytes are copied as uint8 and converted to
int64 on the device. A slow disk makes a step wait; no batch is skipped.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from elman_core.data import SEPARATOR, Batch, TrainingWindows

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
    """A batch, and its tokens (B, T + 1), uint8, on the device.

    Attributes:
        copied: the event of their arrival; None: they are there.
    """

    batch: Batch
    tokens: Tensor
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
            item.tokens.record_stream(current)
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
        tokens = torch.from_numpy(batch.tokens)
        if self.device.type != "cuda":
            return Ready(batch, tokens.to(self.device))
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return Ready(batch, tokens, copied)


class Feed:
    """This rank's rows of each global batch, as a step takes them: read ahead for a GPU; on a CPU, that would only take time
    from the computing threads.
    """

    def __init__(self, windows: TrainingWindows, settings: Settings, device: torch.device, ranks: Ranks) -> None:
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
            batch, tokens = ready.batch, ready.tokens
        else:
            batch = self.read(step)
            tokens = torch.from_numpy(batch.tokens).to(self.device)
        if not self.carries:
            return Windows(tokens)
        inputs_BT = torch.from_numpy(batch.tokens)[:, :-1]
        fresh_BT = inputs_BT == SEPARATOR if self.resets else torch.zeros(inputs_BT.shape, dtype=torch.bool)
        fresh_BT[:, 0] |= torch.from_numpy(batch.fresh)
        return Windows(tokens, fresh_BT, carry)

    def close(self) -> None:
        """End the reading thread."""
        if self.reader is not None:
            self.reader.close()
