"""What becomes of a row of a product with weights before it is published.

The warp that has the row computes what depends on it alone, and keeps the states that only such rows read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from .nodes import Index, Node, flat, same, unflat, values

OPERANDS = 16  # of a row, at most; as in whole.cuh
_MOST_STATES = 8  # elements of a state in a row
Piece = tuple[Node, int]
"""A state, or what becomes one, whose elements from this place on, in its last dimensions, belong to rows."""


@dataclass
class Row:
    """What becomes of a row of a product.

    Attributes:
        end: the node that it is then. states: nodes that become states of the row. local: whether only later rows with this
            number read it, so that it is not published.
    """

    end: Node
    states: list[Piece] = field(default_factory=list)
    local: bool = False


def name(rows: int) -> str:
    """Of the index of a row, where there are so many."""
    return f"row{rows}"


def _tail(shape: Sequence[int], rows: int) -> int | None:
    """The dimension from which on a shape has at least this many elements."""
    return next((d for d in range(len(shape), -1, -1) if math.prod(shape[d:]) >= rows), None)


def row_indices(piece: Piece, rows: int) -> list[tuple[int, Index]]:
    """The elements that belong to a row: where each lies in the row 0, and its index."""
    (node, first), d = piece, _tail(piece[0].shape, rows)
    assert d is not None
    size, place = math.prod(node.shape[d:]), f"({first} + {name(rows)})" if first else name(rows)
    front = itertools.product(*map(range, node.shape[:d]))
    return [(k * size + first, [*map(str, at), *unflat(place, node.shape[d:])]) for k, at in enumerate(front)]


def _first(index: Index, shape: Sequence[int], rows: int) -> int | None:
    """The first place of the piece whose element belongs to the row that asks for it."""
    d = _tail(shape, rows)
    if d is None or any(values(i) is None or name(rows) in i for i in index[:d]):
        return None
    known = values(flat(index[d:], tuple(shape[d:])))
    return known[0] if known and known == [*range(known[0], known[0] + rows)] else None


class Rows:
    """Args: order: all nodes, arguments first. level: the phase of each. target: what becomes which small state. fixed: nodes
    that every block needs, or that large states are made of. products: those with weights, in the order in which they are
    computed. kept: what lies in memory."""

    def __init__(
        self, order: Sequence[Node], level: Mapping[Node, int], target: Mapping[Node, Node], fixed: Set[Node],
        products: Sequence[Node], kept: Set[Node],
    ) -> None:  # fmt: skip
        self.order, self.level, self.target, self.fixed, self.kept = order, level, target, fixed, kept
        self.products = [p for p in products if p.weight is not None and p.count == len(p.weight)]
        self.users = dict[Node, list[Node]]()
        self.after = {p: {p} for p in self.products}  # what depends on a product
        for node in order:
            for x in node.args:
                self.users.setdefault(x, []).append(node)
        for found in self.after.values():
            for node in order:
                if node not in found and any(x in found for x in node.args):
                    found.add(node)
        self.owned, self.banned = set(target.values()), set[Node]()

    def found(self) -> dict[Node, Row]:
        while True:
            self.rows, self.ends = dict[Node, Row](), dict[Node, Node]()
            self.asked = set[Node]()  # what rows read in memory
            # Products whose rows read what is of other rows, and where.
            self.readers = dict[Node, list[tuple[Node, int]]]()
            for p in self.products:
                self.rows[p] = self._row(p)
                self.ends[self.rows[p].end] = p
            if not self._wrong():
                return {p: row for p, row in self.rows.items() if row.end is not p or row.states or row.local}

    def _row(self, p: Node) -> Row:
        own = [x for x in self.order if x in self.after[p] and self._computes(x, p)]
        for end in reversed([x for x in own if x.count == p.count]):
            states = self._states(p, end)
            if states is None:
                continue
            pieces = [(x, [index for _, index in row_indices((x, at), p.count)]) for x, at in states]
            reads, operands = self._reads([(end, [unflat(name(p.count), end.shape)]), *pieces], p)
            if reads is not None and len(operands) <= OPERANDS:
                self.asked |= {x for x, place in operands if place}
                for x, first in reads:
                    self.readers.setdefault(x, []).append((p, first))
                return Row(end, states)
        return Row(p)

    def _computes(self, x: Node, p: Node) -> bool:
        plain = (
            not x.view and not x.combine and x.weight is None and x not in self.fixed and self.level[x] == self.level[p]
        )
        return x is p or plain

    def _states(self, p: Node, end: Node) -> list[Piece] | None:
        """The states that depend on p, beside or at `end`; None if anything else does."""
        states, seen, waiting = list[Piece](), set[Node](), [p]
        while waiting:
            x = waiting.pop()
            if x in seen:
                continue
            seen.add(x)
            if x is not end and (x in self.fixed or not (x.view or self._computes(x, p))):
                return None
            if x in self.target:
                if (piece := self._piece(x, p)) is None:
                    return None
                states.append(piece)
            waiting += [] if x is end else self.users.get(x, [])
        return states

    def _piece(self, x: Node, p: Node) -> Piece | None:
        """Which part of what becomes a state belongs to the rows of p."""
        d = _tail(x.shape, p.count)
        if self.target[x] not in self.owned or d is None or x.count > _MOST_STATES * math.prod(x.shape[d:]):
            return None
        places = range(0, math.prod(x.shape[d:]) - p.count + 1, p.count)
        found = [(x, first) for first in places if self._products((x, first), p.count) == {p}]
        return found[0] if len(found) == 1 else None

    def _products(self, piece: Piece, rows: int) -> set[Node]:
        """The products that a row's part of a state depends on."""
        read = set[Node]()

        def value(y: Node, at: Index) -> str:
            if y.weight is not None:
                read.add(y)
            elif y.leaf is None and not y.combine:
                y.expr(value, at)
            return "0"

        for _, index in row_indices(piece, rows):
            value(piece[0], index)
        return read

    def _reads(
        self, work: Sequence[tuple[Node, list[Index]]], p: Node
    ) -> tuple[set[Piece] | None, set[tuple[Node, str]]]:
        """Which states of the row, and what became of other rows, these elements read, and all numbers; None if a row does not
        have them."""
        reads, operands, seen, wrong = set[Piece](), set[tuple[Node, str]](), set[tuple[Any, ...]](), False
        row = name(p.count)

        def value(x: Node, at: Index) -> str:
            nonlocal wrong
            place = flat(at, x.shape)
            if x is p:
                wrong |= not same(place, row, p.count)
                return "p"
            if x in self.fixed and x.leaf is not None:  # an element of a large state
                wrong = True
            elif (
                x in self.ends and x not in self.banned and self.ends[x].count == p.count and same(place, row, p.count)
            ):
                reads.add((x, 0))
                operands.add((x, ""))  # of this row, so not in memory
            elif x.leaf is not None:
                operands.add((x, place))
                if x in self.owned:
                    first = _first(at, x.shape, p.count)
                    wrong |= first is None
                    reads.add((x, first or 0))
            elif x not in self.after[p] and (x.weight is not None or x.combine or x in self.kept or x in self.ends):
                operands.add((x, place))
                wrong |= self.level[x] >= self.level[p] or x in self.fixed
            elif x.combine:  # of what this row and others become
                wrong = True
            elif x.view:
                return x.expr(value, at)
            elif (key := (x, *at)) not in seen:
                seen.add(key)
                wrong |= x in self.fixed
                x.expr(value, at)
            return "0"

        for node, indices in work:
            for index in indices:
                node.expr(value, index) if node is not p else None
        return (None if wrong else reads), operands

    def _wrong(self) -> bool:
        """Whether something was taken for a row's own that is not, which is then forbidden; if nothing was, decide which rows
        are local."""
        at = {p: i for i, p in enumerate(self.products)}
        stops = {*self.ends, *(x for row in self.rows.values() for x, _ in row.states)}
        writers = dict[Node, list[tuple[Node, int]]]()
        for p, row in self.rows.items():
            for x, first in row.states:
                writers.setdefault(self.target[x], []).append((p, first))
        wrong = False
        for before in [*self.owned]:
            given = {(first, p.count): p for p, first in writers.get(before, [])}
            rows = sum(count for _, count in given)
            d = _tail(before.shape, max((count for _, count in given), default=1))
            whole = d is not None and rows == math.prod(before.shape[d:])
            read = [(given.get((first, q.count)), q) for q, first in self.readers.get(before, [])]
            if not whole or any(p is None or at[q] > at[p] for p, q in read) or self._leaks(before, stops):
                self.owned.discard(before)
                wrong = True
        for end, p in self.ends.items():
            readers = self.readers.get(end, [])
            mine = (
                readers
                and all(at[q] > at[p] for q, _ in readers)
                and not any(end in them for them in (self.fixed, self.target, self.asked))
            )
            self.rows[p].local = bool(mine) and not self._leaks(end, stops - {end})
            if readers and not self.rows[p].local and any(self.level[q] <= self.level[end] for q, _ in readers):
                self.banned.add(end)
                wrong = True
        return wrong

    def _leaks(self, x: Node, stops: Set[Node]) -> bool:
        """Whether anything but rows reads a node."""
        waiting, seen = [*self.users.get(x, [])], set[Node]()
        while waiting:
            y = waiting.pop()
            if y in seen:
                continue
            seen.add(y)
            if (
                y.combine
                or y.weight is not None
                or (y not in stops and any(y in them for them in (self.fixed, self.target, self.asked)))
            ):
                return True
            waiting += [] if y in stops else self.users.get(y, [])
        return False
