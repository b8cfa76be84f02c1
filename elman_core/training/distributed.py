"""Several processes, one training: who is there, what they tell each other, and how the failure of one ends all.

A rank is a process; each has one device and its own rows of the batch. Everything that may fail on one rank alone goes through
`together` or `first`, after which all ranks know; a rank that fails elsewhere leaves a note in the launcher's store before it
goes, and those that wait for it in vain read it there.
"""

from __future__ import annotations

import atexit
import datetime
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from elman_core.registry import ConfigError, ElmanError, RankError
from elman_core.registry import errors as known

from .launch import place, several
from .parting import Held, Holdings, in_time
from .phases import reached

T = TypeVar("T")
NOTE, SAID = "elman/failed", "elman/said"
READING = 3.0  # seconds: how long one looks for the note of a rank that has gone


class Ranks:
    """The processes of one training; this is `rank` of `size`. Alone, every method does the obvious and nothing is sent."""

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0, store: Any = None) -> None:
        self.rank, self.size, self.local, self.store = rank, size, local, store
        self.parted = False  # whether another rank is known to be gone
        self.holdings = Holdings()

    @property
    def main(self) -> bool:
        """Whether this one writes, shows and calls observers."""
        return self.rank == 0

    def together(self, run: Callable[[], T]) -> T:
        """What `run` gives here, once it has worked on every rank.

        Raises:
            ElmanError: it failed on a rank: on all of them the error of the first that failed.
        """
        if self.size == 1:
            return run()
        result, error = None, None
        try:
            result = run()
        except (ElmanError, OSError) as raised:
            error = raised
        self.settle(error)
        return result  # type: ignore[return-value]

    def first(self, run: Callable[[], T]) -> T:
        """What `run` gives on rank 0, on every rank; it is run there alone. Raises as `together`."""
        if self.size == 1:
            return run()
        box: list[Any] = [None]
        error: Exception | None = None
        if self.main:
            try:
                box[0] = run()
            except (ElmanError, OSError) as raised:
                error = raised
        self.settle(error)
        dist.broadcast_object_list(box, src=0)
        return box[0]

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
            raise _said(words, "" if everywhere else f"rank {rank}: ") from error

    def gather(self, value: Any) -> list[Any]:
        """What every rank gives, in order, on all of them. Any object that pickles."""
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
                if others[name] != value:
                    raise _everywhere(
                        ConfigError(
                            f"rank {rank} has {name} {others[name]}, rank 0 has {value}: give every rank the same"
                        )
                    )

    def rows(self, count: int) -> range:
        """The rows of a batch of `count` that are this rank's: whole parts in the order of the ranks."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def hold(self, held: Held) -> None:
        """Have it give up what it holds of the operations that ranks share, before this one parts from the others."""
        self.holdings.add(held)

    # the end of one is the end of all

    def leave_note(self, error: BaseException) -> None:
        """Say what ended this rank, for those that will wait for it in vain. The first note stays."""
        if self.store is None or self.parted or getattr(error, "everywhere", False):
            return
        try:
            self.store.add(SAID, 1)  # this rank says it itself
            self.store.compare_set(NOTE, "", json.dumps({"rank": self.rank, "words": _words(error)}))
        except (RuntimeError, OSError):
            return  # the store has gone with its launcher: the others find that out themselves

    def lost(self, error: BaseException) -> BaseException:
        """`error`, or what lies behind it where a collective operation failed because another rank is gone."""
        if self.size == 1 or isinstance(error, ElmanError) or not isinstance(error, RuntimeError):
            return error
        if not isinstance(error, dist.DistError) and not any(sign in str(error) for sign in _SIGNS):
            return error
        self.parted = True
        note = self._note()
        if note is None:
            found: ElmanError = RankError(
                f"a rank has ended or has not answered for {timeout().seconds} s: all of them stop; the launcher's lines say "
                f"which and why"
            )
        else:
            found = _said(note["words"], f"rank {note['rank']}: ")
        found.everywhere, found.said = False, not self._speaks()
        return found

    def _speaks(self) -> bool:
        """Whether this rank is the one of those left that says what happened: the first that asks."""
        try:
            return self.store.add(SAID, 1) == 1
        except (RuntimeError, OSError):
            return True

    def _note(self) -> dict[str, Any] | None:
        """What a rank that has gone left behind, if it did."""
        until = time.monotonic() + READING
        try:
            while not self.store.check([NOTE]):
                if time.monotonic() > until:
                    return None
                time.sleep(0.1)
            return json.loads(self.store.get(NOTE))
        except (RuntimeError, OSError):
            return None

    def all_here(self, error: BaseException) -> bool:
        """Whether all ranks have come to this error together, and may go on to something else together."""
        return self.size == 1 or (getattr(error, "everywhere", False) and not self.parted)


_SIGNS = (
    "gloo",
    "Gloo",
    "NCCL",
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "wait timeout",
    "Timed out",
)


def timeout() -> datetime.timedelta:
    """How long ranks wait for each other: `ELMAN_RANK_TIMEOUT` seconds, 600 by default.

    Raises:
        ConfigError: not a number above 0.
    """
    given = os.environ.get("ELMAN_RANK_TIMEOUT", "600")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"ELMAN_RANK_TIMEOUT is a number of seconds, not {given!r}")
    return datetime.timedelta(seconds=seconds)


_joined: Ranks | None = None


def join() -> Ranks:
    """This process's place among those that the launcher started; it meets them at the first call.

    NCCL for tensors on GPUs, gloo for those on CPUs and for everything that is not a tensor.

    Raises:
        ConfigError: the launcher's variables are wrong. RankError: not all ranks came within the time.
    """
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
            dist.init_process_group(
                backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout()
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise RankError(f"the {size} ranks did not find each other: {str(error).splitlines()[0]}") from error
        _joined = Ranks(rank, size, local, dist.PrefixStore("notes", store))
        atexit.register(leave, code=RankError.exit_code)
        reached("ranks")
    return _joined


def leave(well: bool = True, code: int = 0) -> None:
    """Part from the other ranks. After a failure without waiting for any of them.

    Args:
        code: what the process ends with if a library that connects ranks does not come to an end with that.
    """
    global _joined
    if _joined is None or not dist.is_initialized():
        return
    ranks, _joined = _joined, None
    reached("parting")
    with in_time(code):
        ranks.holdings.release(wait=well)
        if well:
            dist.destroy_process_group()
        else:
            dist.distributed_c10d._abort_process_group()
    reached("parted")


@contextmanager
def session() -> Iterator[Ranks]:
    """The ranks for as long as a command runs. What ends it is noted for the others; then nobody is waited for."""
    ranks = join()
    try:
        yield ranks
    except BaseException as error:
        if _is_exit(error):
            leave(code=error.exit_code)  # type: ignore[attr-defined]
        elif isinstance(error, Exception) and ranks.size > 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's; what is left to do is to say why
            ranks.leave_note(error)
            leave(well=False, code=getattr(error, "exit_code", RankError.exit_code))
        raise
    leave()


def _is_exit(error: BaseException) -> bool:
    """A command that leaves with a code, as after a signal: all ranks do."""
    return type(error).__name__ == "Exit"


def _words(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error) or type(error).__name__]


def _said(words: Iterable[str], before: str) -> ElmanError:
    """An error of the same class with the same words; one that is not ours becomes a `RankError`."""
    name, text = words
    kind = getattr(known, name, None)
    if not (isinstance(kind, type) and issubclass(kind, ElmanError)):
        kind, text = RankError, f"{name}: {text}"
    return _everywhere(kind(before + text))


def _everywhere(error: ElmanError) -> ElmanError:
    """Marked as one that every rank raises, so that one of them says it."""
    error.everywhere = True
    return error


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that changes with the bits of any of these tensors, the same in whatever order a device adds."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten()
        words = flat.view(torch.int32) if flat.element_size() % 4 == 0 else flat.view(torch.uint8)
        total = (total * 31 + int(words.sum(dtype=torch.int64))) % 2**63
    return total
