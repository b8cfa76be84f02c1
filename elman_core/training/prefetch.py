"""The windows of each step, read ahead in a thread and already on their way to the GPU.

Reading ahead does not change what a step sees: a batch is a function of its step. Bytes are copied as uint8 and converted to
int64 on the device. A slow disk makes a step wait; no batch is skipped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from elman_core.data import SEPARATOR, Batch, TrainingWindows

from .distributed import Ranks
from .objective import States
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
        read: the batch of a step; called in another thread. device: where its tokens go.
    """

    def __init__(self, read: Callable[[int], Batch], device: torch.device, depth: int = DEPTH) -> None:
        self.read, self.device, self.depth = read, device, depth
        self._changed = threading.Condition()
        self._ready: dict[int, Ready | BaseException] = {}
        self._wanted = self._next = -1  # the step that is asked for next, the step that is read next
        self._turn = 0  # counts jumps to another step; what was read for an earlier one is dropped
        self._closed = False
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None

    def get(self, step: int) -> Ready:
        """The batch of `step`, waiting for it if needed. Any step may be requested; only the following ones are read ahead.

        Raises:
            any exception that `read` raised for this step.
        """
        with self._changed:
            if step != self._wanted:
                self._turn += 1
                self._ready.clear()
                self._wanted = self._next = step
            if self._thread is None:
                self._closed = False
                self._thread = threading.Thread(target=self._run, name="elman-prefetch", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            self._changed.wait_for(lambda: step in self._ready)
            found = self._ready.pop(step)
            self._wanted = step + 1
            if isinstance(found, BaseException):
                self._wanted = -1  # asked for again, it is read again
                raise found
            self._changed.notify_all()
        if found.copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(found.copied)
            found.tokens.record_stream(current)
        return found

    def close(self) -> None:
        """End the thread. A later `get` starts another."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._wanted = -1
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(CLOSING)

    def _run(self) -> None:
        mine = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._thread is not mine or self._may_read())
                if self._closed or self._thread is not mine:
                    return
                step, turn = self._next, self._turn
            try:
                found: Ready | BaseException = self._load(step)
            except BaseException as error:  # the step that needs the batch raises it
                found = error
            with self._changed:
                if turn == self._turn and not self._closed:
                    self._ready[step] = found
                    self._next = step + 1
                    self._changed.notify_all()

    def _may_read(self) -> bool:
        failed = any(isinstance(found, BaseException) for found in self._ready.values())
        return 0 <= self._wanted <= self._next < self._wanted + self.depth and not failed

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
