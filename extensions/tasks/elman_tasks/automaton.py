"""Finite automata that read random words: their tables, their words and labels, and what a window of inputs can tell.

Shapes: R rows, T places, S states, K symbols. A state is anything hashable; tables number them as they find them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .draws import Draws, unit

CELLS = 2**20
"""Most states times symbols of a table, which takes a second."""
SAMPLES = 400
"""Sampled words behind each figure of `window_accuracy`."""


@dataclass(frozen=True)
class Automaton:
    """A task as a state that symbols change.

    Attributes:
        symbols: names of the inputs; input k is token k. answers: names of the labels; label i is token K + i.
        start: the state before the first symbol. step: the state after a symbol, or None where it cannot stand.
        answer: the label of a state, or None where none is due.
        odds: the weight of a symbol in a state, beside the others that can stand there.
        end: a symbol that stands at the last place of a word and nowhere else.
    """

    symbols: tuple[str, ...]
    answers: tuple[str, ...]
    start: Hashable
    step: Callable[[Any, int], Hashable | None]
    answer: Callable[[Any], int | None]
    odds: Callable[[Any, int], float] = lambda _state, _symbol: 1.0
    end: int | None = None

    @property
    def vocabulary(self) -> int:
        return len(self.symbols) + len(self.answers)

    def tables(self) -> Tables:
        """All states that words reach, found breadth first. Raises `ValueError` if words end early, or for too many states."""
        numbers: dict[Hashable, int] = {self.start: 0}
        states, following, weights = [self.start], [], []
        for state in states:  # grows
            if len(states) * len(self.symbols) > CELLS:
                raise ValueError(f"its automaton has more than {CELLS // len(self.symbols):,} states")
            after = [self.step(state, symbol) for symbol in range(len(self.symbols))]
            for new in after:
                if new is not None and new not in numbers:
                    numbers[new] = len(states)
                    states.append(new)
            following.append([-1 if new is None else numbers[new] for new in after])
            free = [new is not None and symbol != self.end for symbol, new in enumerate(after)]
            weights.append([self.odds(state, symbol) * ok for symbol, ok in enumerate(free)])
        labels = [-1 if (label := self.answer(state)) is None else label for state in states]
        odds_SK = np.array(weights, dtype=np.float64)
        if self.end is None and not (odds_SK.sum(1) > 0).all():
            raise ValueError("after some inputs no other can stand")
        odds_SK /= np.maximum(odds_SK.sum(1, keepdims=True), 1e-300)  # after the end of a word nothing stands
        return Tables(np.array(following), odds_SK, np.array(labels), self.end)


@dataclass(frozen=True)
class Tables:
    """after: (S, K), the state after a symbol, -1 if it cannot stand. odds: (S, K), of each. labels: (S,), -1 for none."""

    after: NDArray[np.int64]
    odds: NDArray[np.float64]
    labels: NDArray[np.int64]
    end: int | None

    def words(self, draws: Draws, lengths_R: NDArray[np.int64], places: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Random words, and after each symbol its label's token, 0 for none: (R, T) each. Rows go on after their length."""
        cuts, after, tokens, labels = self._cells
        parts = np.uint64(len(tokens) // len(self.after))
        # Rows that are a power of two apart in memory share few lines of a cache: transposing would take four times as long.
        tokens_TR, labels_TR = np.empty((2, places, draws.rows + 64), dtype=tokens.dtype)[..., : draws.rows]
        base_R = np.zeros(draws.rows, dtype=np.int64)
        for some, words_tR in draws.by_place(places):
            if cuts is None:
                words_tR >>= np.uint64(11)
                words_tR *= parts
                words_tR >>= np.uint64(53)
                tokens_TR[some] = cell_tR = words_tR.view(np.int64)
            else:
                unit_tR, part_tR = unit(words_tR), np.zeros(words_tR.shape, dtype=np.min_scalar_type(parts))
                for cut in cuts:
                    part_tR += unit_tR >= cut
                if self.end is not None:
                    part_tR[np.arange(places)[some, None] == lengths_R - 1] = parts - 1
                cell_tR = part_tR.astype(np.int64)
            for cell_R in cell_tR:
                cell_R += base_R
                after.take(cell_R, out=base_R, mode="clip")  # all are inside: no checks, no copy of `out`
            labels_TR[some] = labels.take(cell_tR)
            if cuts is not None:
                tokens_TR[some] = tokens.take(cell_tR)
        return np.ascontiguousarray(tokens_TR.T), np.ascontiguousarray(labels_TR.T)

    @functools.cached_property
    def _cells(self) -> tuple[NDArray[np.float64] | None, NDArray[np.int64], NDArray[Any], NDArray[Any]]:
        """[0, 1) in parts that mean one symbol in each state: where they begin, but for the first; None for equal parts, one a
        symbol. Then, for each state and part, with a last part for `end`: the first cell of the state after it, its token, and
        the token of the label after it."""
        (n_states, n_symbols), cuts = self.after.shape, None
        symbols_SC = np.tile(np.arange(n_symbols), (n_states, 1))
        if (self.odds != self.odds[0, 0]).any() or n_symbols > 2**11:  # 53 random bits times more do not fit into 64
            below_SK = self.odds.cumsum(1)[:, :-1]
            below_SK[below_SK > 1 - 1e-9] = 1  # sums are rounded
            cuts = np.unique(below_SK[below_SK < 1])
            symbols_SC = (below_SK[:, None] <= np.array([-1, *cuts])[:, None]).sum(2)
        if self.end is not None:
            symbols_SC = np.pad(symbols_SC, ((0, 0), (0, 1)), constant_values=self.end)
        # A word that has ended stays where it is.
        after_SC = np.where(self.after < 0, np.arange(n_states)[:, None], self.after)
        after_SC = np.take_along_axis(after_SC, symbols_SC, 1)
        labels_SC = np.where(self.labels < 0, 0, self.labels + n_symbols)[after_SC]
        dtype = np.min_scalar_type(n_symbols + self.labels.max())
        tokens, labels = (table.ravel().astype(dtype) for table in (symbols_SC, labels_SC))
        return cuts, after_SC.ravel() * symbols_SC.shape[1], tokens, labels

    def window_accuracy(self, length: int, windows: list[int], draws: Draws) -> list[float]:
        """The share of last labels that the best predictor gets right that sees only the last w symbols, and their place.

        The distribution of the state before the window is exact; for each sampled word, Bayes' rule gives the one after.
        """
        words_RT, _ = self.words(draws, np.full(draws.rows, length), length)
        label_SA = np.eye(self.labels.max() + 1)[self.labels] * (self.labels >= 0)[:, None]
        prior_TS = [np.eye(1, len(self.labels))[0]]
        for t in range(length):
            mass_SK = prior_TS[-1][:, None] * self._odds_at(t, length)
            prior_TS.append(np.bincount(self._to.ravel(), mass_SK.ravel(), len(self.labels)))
        return [self._seen(words_RT[:, max(0, length - w) :], prior_TS, length, label_SA) for w in windows]

    def _seen(self, seen_RT: NDArray[Any], prior_TS: list[NDArray[Any]], length: int, label_SA: NDArray[Any]) -> float:
        rows, first = len(seen_RT), length - seen_RT.shape[1]
        belief_RS = np.repeat(prior_TS[first][None], rows, 0)
        row_RS = np.arange(rows)[:, None] * belief_RS.shape[1]
        for t, symbol_R in enumerate(seen_RT.T, first):
            mass_RS = belief_RS * self._odds_at(t, length)[:, symbol_R].T
            to_RS = row_RS + self._to[:, symbol_R].T
            after_RS = np.bincount(to_RS.ravel(), mass_RS.ravel(), belief_RS.size).reshape(belief_RS.shape)
            belief_RS = after_RS / after_RS.sum(1, keepdims=True)
        answers_RA = belief_RS @ label_SA
        return float(answers_RA.max(1).sum() / answers_RA.sum())

    @property
    def _to(self) -> NDArray[np.int64]:
        return self.after.clip(min=0)  # with odds of 0

    def _odds_at(self, t: int, length: int) -> NDArray[np.float64]:
        if self.end is None or t < length - 1:
            return self.odds
        return np.eye(self.after.shape[1])[self.end] * (self.after >= 0)
