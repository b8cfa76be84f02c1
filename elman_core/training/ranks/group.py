"""Several processes, one training: who takes part, what they exchange, and how a failure of one ends all.

A rank is a process with one device and its own rows of the batch. Code that may fail on only one rank runs in `together` or
`first`, which inform all ranks. A rank that fails elsewhere leaves a note in the launcher's store before it exits; ranks
whose connection to it breaks read the note there.
"""

from __future__ import annotations

import atexit
import datetime
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from elman_core.registry import ConfigError, ElmanError, RankError
from elman_core.registry import errors as known

from .launch import place, reached, several

log = logging.getLogger("elman_core")

T = TypeVar("T")
NOTE, SAID = "elman/failed", "elman/said"
READING = 3.0  # seconds to wait for the note of a rank that is gone
PARTING = 60.0  # seconds that libraries may take to close their connections; they normally need less than one


class Ranks:
    """The processes of one training; this is `rank` of `size`. With a single process nothing is sent."""

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0, store: Any = None) -> None:
        self.rank, self.size, self.local, self.store = rank, size, local, store
        self.parted = False  # whether another rank is known to be gone
        self._held: WeakSet[Any] = WeakSet()

    @property
    def main(self) -> bool:
        """Whether this rank writes, shows and calls observers."""
        return self.rank == 0

    def together(self, run: Callable[[], T]) -> T:
        """The result of `run` on this rank, once it has succeeded on every rank.
        If it failed on a rank, every rank raises the error of the first that failed."""
        result, error = self._attempt(run)
        self.settle(error)
        return result  # type: ignore[return-value]

    def first(self, run: Callable[[], T]) -> T:
        """The result of `run`, which runs on rank 0 only, on every rank. Raises as `together`."""
        box: list[Any] = [None]
        error: BaseException | None = None
        if self.main:
            box[0], error = self._attempt(run)
        self.settle(error)
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def _attempt(self, run: Callable[[], T]) -> tuple[T | None, BaseException | None]:
        try:
            return run(), None
        except (ElmanError, OSError) as error:
            return None, error

    def settle(self, error: BaseException | None) -> None:
        """Tell the others whether something failed here. Raises on every rank if it did on any."""
        if self.size == 1:
            if error is not None:
                raise error
            return
        told = self.gather(None if error is None else _words(error))
        failed = [(rank, words) for rank, words in enumerate(told) if words]
        if failed:
            rank, words = failed[0]
            everywhere = len(failed) == self.size and all(w == words for _, w in failed)
            raise _rebuilt(words, "" if everywhere else f"rank {rank}: ") from error

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks in order, on every rank. Any object that pickles."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, value)
        return box

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Raise `ConfigError` on every rank unless all hold the same values."""
        told = self.gather(dict(facts))
        for rank, others in enumerate(told):
            for name, value in told[0].items():
                if others.get(name) != value:
                    what = f"rank {rank} has {name} {others.get(name)}, rank 0 has {value}: give every rank the same"
                    raise everywhere(ConfigError(what))

    def rows(self, count: int) -> range:
        """This rank's rows of a batch of `count`: contiguous parts in the order of the ranks."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def hold(self, held: Any) -> None:
        """Call `held.release()`, if `held` still lives, before this rank disconnects: it holds collective operations.

        NCCL closes or aborts a communicator only after every CUDA graph with one of its operations is destroyed, and waits for
        that without a limit (`commDestroySync` in its src/init.cc, version 2.28).
        """
        self._held.add(held)

    def release(self, wait: bool) -> None:
        """Release all. `wait`: first let the device finish, which never happens if a rank it waits for is gone."""
        if wait and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for held in list(self._held):
            held.release()
        self._held.clear()

    # the failure of one ends all

    def leave_note(self, error: BaseException) -> None:
        """Tell the ranks that will wait in vain what ended this one. Only the first note counts."""
        if self.store is None or self.parted or getattr(error, "everywhere", False):
            return
        try:
            self.store.add(SAID, 1)  # this rank prints it itself
            self.store.compare_set(NOTE, "", json.dumps({"rank": self.rank, "words": _words(error)}))
        except (RuntimeError, OSError):
            return  # the store is gone with its launcher: the others find that out themselves

    def explain(self, error: BaseException) -> BaseException:
        """`error`; or, if a collective operation failed because another rank is gone, the error that ended that rank."""
        if self.size == 1 or isinstance(error, ElmanError) or not isinstance(error, RuntimeError):
            return error
        if not isinstance(error, dist.DistError) and not any(sign in str(error) for sign in _SIGNS):
            return error
        self.parted = True
        cause: ElmanError = RankError(
            f"a rank has ended or has not answered for {timeout().total_seconds():g} s: all ranks stop; the launcher's "
            "output says which rank and why"
        )
        speaks = True
        try:
            until = time.monotonic() + READING
            while not self.store.check([NOTE]) and time.monotonic() < until:
                time.sleep(0.1)
            if self.store.check([NOTE]):
                note = json.loads(self.store.get(NOTE))
                cause = _rebuilt(note["words"], f"rank {note['rank']}: ")
            speaks = self.store.add(SAID, 1) == 1  # the first rank that asks prints it
        except (RuntimeError, OSError):
            pass  # the store is gone with its launcher: this rank prints what it knows
        cause.everywhere, cause.said = False, not speaks
        return cause

    def all_here(self, error: BaseException) -> bool:
        """Whether all ranks raised this error together and can still work together."""
        return self.size == 1 or (getattr(error, "everywhere", False) and not self.parted)


_SIGNS = (
    "gloo", "Gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe", "wait timeout", "Timed out",
)  # fmt: skip


def timeout() -> datetime.timedelta:
    """Return the time limit of ranks that wait for each other: `ELMAN_RANK_TIMEOUT` seconds, 600 by default.
    Raises `ConfigError` if that is not a number above 0."""
    text = os.environ.get("ELMAN_RANK_TIMEOUT", "600")
    try:
        limit = datetime.timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        limit = datetime.timedelta()
    if limit > datetime.timedelta():
        return limit
    raise ConfigError(f"ELMAN_RANK_TIMEOUT must be a number of seconds above 0, not {text!r}")


_joined: Ranks | None = None


def join() -> Ranks:
    """This process among those that the launcher started; the first call connects them. Tensors on GPUs travel by NCCL,
    everything else by gloo. Raises as `place`, and `RankError` if not all ranks came in time."""
    global _joined
    if not several():
        return Ranks()
    if _joined is None:
        rank, size, local = place()
        reached("libraries")
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout()))
            if torch.cuda.is_available() and local < torch.cuda.device_count():
                torch.cuda.set_device(local)
            group = dist.PrefixStore("group", store)
            dist.init_process_group(backend, store=group, rank=rank, world_size=size, timeout=timeout())
        except (RuntimeError, ValueError, OSError) as error:
            raise RankError(f"the {size} ranks did not find each other: {str(error).splitlines()[0]}") from error
        _joined = Ranks(rank, size, local, dist.PrefixStore("notes", store))
        atexit.register(leave, code=RankError.exit_code)
        reached("ranks")
    return _joined


def leave(well: bool = True, code: int = 0) -> None:
    """Disconnect from the other ranks; after a failure without waiting for any of them. `code`: of the process, if a library
    does not finish disconnecting."""
    global _joined
    if _joined is None or not dist.is_initialized():
        return
    ranks, _joined = _joined, None
    reached("parting")
    with in_time(code):
        ranks.release(wait=well)
        if well:
            dist.destroy_process_group()
        else:
            dist.distributed_c10d._abort_process_group()
    reached("parted")


@contextmanager
def in_time(code: int, seconds: float = PARTING, leave: Callable[[int], object] = os._exit) -> Iterator[None]:
    """End the process with exit code `code` if the block, in which a library disconnects, takes longer than `seconds`."""

    def end() -> None:
        log.error("elman: connections to the other ranks did not close within %.0f s; exiting anyway", seconds)
        sys.stdout.flush()
        leave(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def session() -> Iterator[Ranks]:
    """The ranks, for the duration of a command. An error is noted for the others, and then this rank waits for none of them."""
    ranks = join()
    try:
        yield ranks
    except BaseException as error:
        if type(error).__name__ == "Exit":  # a command that exits with a code, as after a signal: all ranks do
            leave(code=error.exit_code)  # type: ignore[attr-defined]
        elif isinstance(error, Exception) and ranks.size > 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from the launcher; this rank still has to say why it ends
            ranks.leave_note(error)
            leave(well=False, code=getattr(error, "exit_code", RankError.exit_code))
        raise
    leave()


def _words(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error) or type(error).__name__]


def _rebuilt(words: Iterable[str], before: str) -> ElmanError:
    """An error of the same class with the same words; one that is not ours becomes a `RankError`."""
    name, text = words
    kind = getattr(known, name, None)
    if not (isinstance(kind, type) and issubclass(kind, ElmanError)):
        kind, text = RankError, f"{name}: {text}"
    return everywhere(kind(before + text))


def everywhere(error: ElmanError) -> ElmanError:
    """`error`, marked as raised by every rank, so that only one prints it."""
    error.everywhere = True
    return error
