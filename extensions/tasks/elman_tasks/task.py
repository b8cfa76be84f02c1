"""A task: what is drawn, which answers count, the lengths of training and of tests. `TASKS` has all of them by name.

Shapes: R rows, T places. A model reads `tokens` up to a place and answers there; nothing after it is seen.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from elman_core.extension import ConfigError, did_you_mean

from .automaton import SAMPLES, Automaton
from .draws import Draws

TESTS = (40, 64, 88, 112, 136, 160, 184, 208, 232, 256)
TRAINING, EXAMPLES, TESTING, HELD_OUT, LOOKING = range(5)
"""Streams of random numbers: those of tests are never those of training."""
WINDOWS = (1, 2, 4, 8, 16, 32)
LONGEST = 2**20
"""Most inputs of a sequence, and the largest value of an option."""
TRIED = 64
"""Sequences of each length that are drawn to see whether a task can have them, or fewer of long ones."""


@dataclass(frozen=True)
class Drawn:
    """Sequences with their answers; integers of any dtype.

    Attributes:
        tokens: (R, T), the inputs. targets: (R, T), the right answer after each input. scored: (R, T), bool: the answers that
            count. trained: (R, T), bool: the answers that the loss takes; None if those that count.
        reach: (R, T): how many of the last inputs hold all that an answer needs; None if an automaton tells.
    """

    tokens: NDArray[np.integer]
    targets: NDArray[np.integer]
    scored: NDArray[np.bool_]
    trained: NDArray[np.bool_] | None = None
    reach: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Sequences:
    """Sequences that are drawn whole: their number of tokens, and `draw(draws)`."""

    vocabulary: int
    draw: Callable[[Draws], Drawn]


@dataclass(frozen=True)
class Task:
    """A task with its options chosen.

    Attributes:
        name: with the options that are not the defaults. definition: in one or two sentences.
        make: `make(**options)` returns an `Automaton` or `Sequences`; an option `length` is the longest sequence.
        train: shortest and longest training sequence. tests: lengths of the test sequences.
        labels: whether the last place counts, or every place with an answer. even: lengths are even.
        examples: number of different training sequences; 0: never the same twice.
        until: a training ends at an evaluation whose mean accuracy over `tests` is at least this.
    """

    name: str
    definition: str
    make: Callable[..., Any]
    train: tuple[int, int] = (3, 40)
    tests: tuple[int, ...] = TESTS
    labels: Literal["last", "every"] = "every"
    even: bool = False
    examples: int = 0
    until: float = math.inf
    options: tuple[tuple[str, int], ...] = ()

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return int(self._made(self.train[1]).vocabulary)

    @property
    def defaults(self) -> dict[str, int]:
        """The options of `make`, with their values here."""
        parameters = inspect.signature(self.make).parameters
        return {name: p.default for name, p in parameters.items() if name != "length"} | dict(self.options)

    def names(self, tokens: NDArray[Any]) -> list[str]:
        """The names of some tokens; a token without one is its number."""
        made = self._made(self.train[1])
        known = (*made.symbols, *made.answers) if isinstance(made, Automaton) else ()
        return [known[token].replace(" ", "") if token < len(known) else str(token) for token in tokens]

    def batch(self, seed: int, step: int, rows: Sequence[int] | NDArray[Any], size: int, steps: int = 1) -> Drawn:
        """These rows of training batch `step`, of `size` rows in all, and of the batches after it, `steps` in all; each as long
        as the longest training sequence."""
        numbers = (np.arange(step, step + steps)[:, None] * size + np.asarray(rows)).ravel()
        return self._rows(
            seed, TRAINING, Draws(seed, EXAMPLES, numbers).below(self.examples) if self.examples else numbers
        )

    def heldout(self, numbers: NDArray[Any]) -> Drawn:
        """Test sequences as long as those of training."""
        return self._rows(0, HELD_OUT, numbers)

    @property
    def longest(self) -> int:
        """Inputs of the longest training sequence."""
        return self._length(self.train[1])

    def _rows(self, seed: int, stream: int, numbers: NDArray[Any]) -> Drawn:
        draws, (low, high) = Draws(seed, stream, numbers), self.train
        fixed = low == high or self.labels == "every"
        return self._draw(draws, np.full(draws.rows, high) if fixed else low + draws.below(high - low + 1), high)

    def test(self, length: int, rows: int, seed: int = 0) -> Drawn:
        """Test sequences of one length."""
        return self._draw(Draws(seed, TESTING, length, np.arange(rows)), np.full(rows, length), length)

    def windows(self, windows: Sequence[int] = WINDOWS) -> dict[int, float]:
        """The best accuracy at the longest training length of a predictor that sees only the last w inputs, for each w. w = 0
        is chance: it knows the place and nothing else.

        For an automaton, the last answer, by Bayes' rule over sampled windows; otherwise, an answer whose evidence is
        outside the window is a guess at chance.
        """
        length = self.longest
        made = self._made(length)
        if isinstance(made, Automaton):
            draws = Draws(0, LOOKING, np.arange(SAMPLES))
            return dict(zip((0, *windows), _tables(made).window_accuracy(length, [0, *windows], draws), strict=True))
        drawn = made.draw(Draws(0, LOOKING, np.arange(10 * SAMPLES)))
        counts = np.bincount(drawn.targets[drawn.scored])
        chance = float(counts.max() / counts.sum())
        assert drawn.reach is not None
        inside = {w: float((drawn.reach[drawn.scored] <= w).mean()) for w in windows}
        return {0: chance} | {w: share + (1 - share) * chance for w, share in inside.items()}

    def require_sequences(self) -> None:
        """Draw some of each length. Raises `ConfigError` if there are none, or nothing is asked in them."""
        try:
            if self.train[0] != self.train[1] and not isinstance(self._made(self.longest), Automaton):
                raise ConfigError(f"task {self.name} trains on sequences of one length: train={self.longest}")
            drawn = [self.test(length, max(1, min(TRIED, LONGEST // length))) for length in (self.longest, *self.tests)]
        except ConfigError:
            raise
        except (ArithmeticError, LookupError, ValueError) as error:
            raise ConfigError(f"task {self.name} has no sequences with these options: {error}") from error
        for some in drawn:
            if not some.scored.any():
                raise ConfigError(f"task {self.name} asks nothing in sequences of {some.tokens.shape[1]} inputs")

    def _length(self, length: int) -> int:
        return length + length % 2 if self.even else length

    def _made(self, length: int) -> Any:
        return _made(self.make, self._length(length), self.options)

    def _draw(self, draws: Draws, lengths_R: NDArray[np.int64], places: int) -> Drawn:
        made, places = self._made(places), self._length(places)
        if not isinstance(made, Automaton):
            return made.draw(draws)
        lengths_R = lengths_R + lengths_R % 2 * self.even
        tokens_RT, targets_RT = _tables(made).words(draws, lengths_R, places)
        if self.labels == "last":
            targets_RT *= np.arange(places) == lengths_R[:, None] - 1
        return Drawn(tokens_RT, targets_RT, targets_RT > 0)


@functools.lru_cache(maxsize=32)
def _made(make: Callable[..., Any], length: int, options: tuple[tuple[str, int], ...]) -> Any:
    sized = {"length": length} if "length" in inspect.signature(make).parameters else {}
    return make(**sized, **dict(options))


@functools.lru_cache(maxsize=32)
def _tables(automaton: Automaton) -> Any:
    return automaton.tables()


TASKS: dict[str, Task] = {}


def task(name: str, **fields: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the function below as `Task.make`; its docstring is the definition. `fields`: others of `Task`."""

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        TASKS[name] = Task(name, " ".join((make.__doc__ or "").split()), make, **fields)
        return make

    return register


@functools.lru_cache(maxsize=64)
def find(spec: str) -> Task:
    """The task `name` or `name:key=value,…`: its own options, or `train=3-40`, `tests=40+256`, `labels=every`, `examples=256`,
    `until=1`.

    Raises:
        ConfigError: there is none of this name, or it has no such option or value.
    """
    name, _, given = spec.partition(":")
    if name not in TASKS:
        raise ConfigError(f"there is no task {name!r}.{did_you_mean(name, TASKS)} Tasks: {', '.join(TASKS)}")
    chosen = TASKS[name]
    own = chosen.defaults
    fields: dict[str, Any] = {}
    options: dict[str, int] = {}
    known = [*own, "train", "tests", "labels", "examples", "until"]
    for key, _, value in (text.partition("=") for text in filter(None, given.split(","))):
        if key not in known or (key == "labels" and value not in ("last", "every")):
            raise ConfigError(f"task {name} takes {', '.join(known)}, not {key}={value}.{did_you_mean(key, known)}")
        try:
            if key == "train":
                low, _, high = value.partition("-")
                fields["train"] = (int(low), int(high or low))
            elif key == "tests":
                fields["tests"] = tuple(int(length) for length in value.split("+"))
            elif key == "labels":
                fields["labels"] = value
            elif key == "until":
                fields["until"] = float(value)
                if not 0 < fields["until"] <= 1:
                    raise ValueError
            else:
                number = int(value)
                if not 0 <= number <= LONGEST:
                    raise ValueError
                chosen_in = options if key in own else fields
                chosen_in[key] = number
        except ValueError:
            takes = "a number from 0 to 1" if key == "until" else f"whole numbers from 0 to {LONGEST:,}"
            raise ConfigError(f"task {name}: {key} takes {takes}, not {value!r}") from None
    made = dataclasses.replace(chosen, name=spec, options=tuple(sorted(options.items())), **fields)
    shortest, longest = made.train
    if (
        not (1 <= shortest <= longest <= LONGEST and 1 <= min(made.tests) <= max(made.tests) <= LONGEST)
        or made.examples < 0
    ):
        raise ConfigError(f"task {spec}: lengths are from 1 to {LONGEST:,}, and train=SHORTEST-LONGEST")
    made.require_sequences()
    return made
