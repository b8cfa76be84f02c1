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

import torch

from elman_core.data import Batch, Source

from .objective import States
from .ranks.group import Ranks
from .settings import Settings
from .step import FROM_BATCH, Windows

DEPTH = 4
"""Batches read ahead: a step waits only if a read takes longer than this many steps."""

CLOSING = 5.0
"""Seconds that the end of a run waits for an unfinished read, in case a disk hangs."""

_Item = tuple[Windows, torch.cuda.Event | None] | BaseException
"""Windows, and the event of their arrival on the device (None: they are there); or the error of their reading."""


class Prefetcher:
    """Reads batch s, s + 1, … while s is being used: calls `read` in another thread, and copies to `device`. `depth`: at least
    2."""

    def __init__(self, read: Callable[[int], Batch], device: torch.device, depth: int = DEPTH) -> None:
        self.read, self.device, self.depth = read, device, depth
        self._wanted = -1  # the step whose batch is next in the queue
        self._ready: queue.Queue[_Item] = queue.Queue()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None

    def get(self, step: int) -> Windows:
        """The batch of `step` on the device, waiting for it if needed. Any step may be requested; only the following ones are
        read ahead. Raises what `read` raised for this step."""
        if self._thread is None or step != self._wanted:
            self.close()
            self._ready = queue.Queue(self.depth - 1)  # one more waits for room
            self._over = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(step, self._ready, self._over), name="elman-prefetch", daemon=True
            )
            self._thread.start()
        item = self._ready.get()
        self._wanted = step + 1
        if isinstance(item, BaseException):
            self.close()  # asked for again, it is read again
            raise item
        windows, copied = item
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for name in FROM_BATCH:
                tensor = getattr(windows, name)
                if tensor is not None:
                    tensor.record_stream(current)
        return windows

    def close(self) -> None:
        """End the thread. A later `get` starts another."""
        self._over.set()
        with contextlib.suppress(queue.Empty):
            while True:  # the thread may be waiting for room
                self._ready.get_nowait()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(CLOSING)

    def _run(self, step: int, ready: queue.Queue[_Item], over: threading.Event) -> None:
        try:
            while not over.is_set():
                ready.put(self._load(step))
                step += 1
        except BaseException as error:  # the step that needs the batch raises it
            ready.put(error)

    def _load(self, step: int) -> tuple[Windows, torch.cuda.Event | None]:
        windows = Windows.of(self.read(step))
        if self.device.type != "cuda":
            return windows.each(lambda t: t.to(self.device)), None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            copies = windows.each(lambda t: t.pin_memory().to(self.device, non_blocking=True))
            copied = torch.cuda.Event()
            copied.record()
        return copies, copied


class Feed:
    """This rank's rows of each global batch, as a step takes them: read ahead for a GPU; on a CPU, that would only take time
    from the computing threads.
    """

    def __init__(self, windows: Source, settings: Settings, device: torch.device, ranks: Ranks) -> None:
        self.windows, self.device = windows, device
        self.rows = None if ranks.size == 1 else ranks.rows(settings.train.batch_size)
        self.carries = settings.data.sampling == "tbptt"
        self.resets = settings.data.documents == "reset"
        self.reader = Prefetcher(self.read, device) if device.type == "cuda" else None

    def read(self, step: int) -> Batch:
        batch = self.windows.batch(step, self.rows)
        if not self.resets:
            return batch
        starts_BT = batch.tokens[:, : self.windows.length] == self.windows.separator
        starts_BT[:, 0] |= batch.fresh
        return dataclasses.replace(batch, starts=starts_BT)

    def get(self, step: int, carry: States | None) -> Windows:
        """The windows of `step`, to continue from the states `carry` (tbptt)."""
        if self.reader is not None:
            windows = self.reader.get(step)
        else:
            windows = Windows.of(self.read(step)).each(lambda t: t.to(self.device))
        fresh = windows.fresh if windows.starts is None and self.carries else None
        return dataclasses.replace(windows, carry=carry, fresh=fresh)

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
