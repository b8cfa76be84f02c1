"""Every error a user can cause: one line that says what is wrong, whose fault it is, and what to type next.

The command line prints the line and leaves with `exit_code`. In Python each is also the built-in exception that a caller
would expect (`ValueError`, `OSError`, …), so nothing need be imported from here to catch it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class ElmanError(Exception):
    """Base of all errors of this package. `exit_code` is what the command line leaves with.

    Attributes:
        everywhere: every rank of a training raises it, so only the first prints it. said: another rank prints it.
        fatal: this process can do nothing more, and leaving in the usual way would abort it: the GPU has failed.
    """

    exit_code = 1
    fatal = False
    everywhere = False
    said = False

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(ElmanError, ValueError):
    """A setting, option, name or size that cannot be used."""

    exit_code = 2


class PluginError(ElmanError, LookupError):
    """A variant or plugin that is missing, broken or defined twice."""

    exit_code = 2

    def __str__(self) -> str:  # LookupError would otherwise be free to quote it
        return printable(" ".join(str(a) for a in self.args))


class DataError(ElmanError, ValueError):
    """Data that is missing, empty, unreadable or too short."""

    exit_code = 2


class CheckpointError(ElmanError, ValueError):
    """A checkpoint that is missing, truncated or altered, or was made by something that is not installed."""

    exit_code = 2


class StorageError(ElmanError, OSError):
    """Input or output that failed: a full disk, a folder that cannot be written."""


class LoaderError(StorageError):
    """The training text could not be read in the middle of a training."""


class OutOfMemoryError(ElmanError, MemoryError):
    """The device ran out of memory."""

    exit_code = 3


class DivergedError(ElmanError, ArithmeticError):
    """Training met a loss or gradient that is not finite.

    Attributes:
        step: the optimizer step, from 1, in which it was, or after which the evaluation was not.
    """

    exit_code = 4
    step: int | None = None


class RankError(ElmanError, RuntimeError):
    """Another process of the same training has ended, does not answer, or holds something else than this one."""


class KernelError(ElmanError, RuntimeError):
    """A kernel that could not be built, launched or verified."""

    exit_code = 5


class KernelUnavailableError(KernelError):
    """A problem for which this GPU is too small, or a module that its driver refuses: that says nothing about the kernel."""


class KernelTimeoutError(KernelError):
    """A launch that gave up waiting for the GPU: its results are invalid, and say nothing about the kernel."""


DIRECTIONS = "".join(map(chr, (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))))
"""The characters that change the direction of text: with them a terminal shows one name as another."""
_UNPRINTABLE = re.compile(f"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff{DIRECTIONS}]")


def printable(text: str, keep: str = "") -> str:
    """`text` on one line: control characters, marks of direction and bytes that are not UTF-8 are escaped, unless in `keep`."""
    return _UNPRINTABLE.sub(lambda at: at[0] if at[0] in keep else at[0].encode("unicode_escape").decode(), text)


def nearest(name: str, known: Iterable[str]) -> str:
    """`"Installed: a, b"`; of more than three the nearest three, and how many there are."""
    names = sorted(known)
    if len(names) <= 3:
        return f"Installed: {', '.join(names) or 'none'}"
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
    return f"Installed: {', '.join(close)} and {len(names) - 3} more (`elman list`)"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
