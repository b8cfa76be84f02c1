"""The source of a model's program: a recorded step as C++ over the functions of `elman/whole.cuh`.

Every block computes all pointwise operations and small reductions by itself. Blocks share two kinds of work: products with
weights, by rows, and states of at least `large` elements, by columns, a column being what a reduction adds up. They exchange
the results. A step is a sequence of phases: the shared work of a phase depends on results of earlier phases only.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .nodes import Index, Node, UnknownError, Value, flat, same, unflat, values
from .rows import Rows, name, row_indices

LARGE = 16384
MOST_WHOLE = 1 << 17
State = tuple[int, str]
_WARPS, _PIECE, _SCRATCH, _PART = 15, 3072, 4096, 24  # at least those of whole.cuh
_THREADS = 32 * _WARPS
_RING = 32 << 10, 128 << 10  # bytes for weights, at least and at most: what is left of the memory caches constants
_LOADS = 10  # of results, that a thread has on their way
COPIES = 8  # of each word of the exchange, so that not all blocks ask for the same few lines


@dataclass(frozen=True)
class Source:
    """A program.

    Attributes:
        text: of the header. constants: concatenated in this order. embedding: of the tokens (V, D).
        weights: (N, K) each, in the order in which they are read. states: where each lies among all, in floats.
        floats: of all states. own: those of every block, outside of shared memory. words: of the exchange.
        classes: of the logits. blocks: how many may run at most.
    """

    text: str
    constants: list[Tensor]
    embedding: Tensor
    weights: list[Tensor]
    states: dict[State, int]
    floats: int
    own: int
    words: int
    classes: int
    blocks: int


@dataclass
class _Use:
    """Of a node in memory, by the threads of a block; own: whether thread i % _THREADS alone has to do with element i."""

    node: Node
    own: bool
    writes: bool = False


@dataclass
class _Line:
    text: str
    reads: set[Node]
    makes: Node | None = None
    uses: Sequence[_Use] = ()
    meets: bool = False  # inside, after it has read


def write(
    logits: Node, states: Mapping[State, tuple[Node, Node]], itemsize: int, shared: int, large: int = LARGE
) -> Source:
    """The program of a recorded step.

    Args:
        logits, states: as `record` returns them. itemsize: bytes of a weight. shared: bytes of shared memory of a block.
        large: elements from which blocks share a state.

    Raises:
        UnknownError: the step does not fit this form, or this memory.
    """
    whole = set[Node]()
    while True:
        try:
            return _Writer(logits, states, {b for b, _ in states.values() if b.count >= large} - whole).source(
                itemsize, shared
            )
        except _AcrossError as error:  # then every block has it for itself
            whole.add(error.args[0])


class _AcrossError(Exception):
    """A large state is not read column by column."""


def _root(node: Node) -> Node:
    while node.view and node.args:
        node = node.args[0]
    return node


def _in_order(node: Node) -> bool:
    """Whether the elements of a view lie as those of its root."""
    if not node.view or node.count != _root(node).count:
        return not node.view
    found: list[str] = []

    def value(x: Node, index: Index) -> str:
        if x.view:
            return x.expr(value, index)
        found.append(flat(index, x.shape))
        return ""

    node.expr(value, unflat("i", node.shape))
    return values(found[0], "i", node.count) == [*range(node.count)]


def _copied(node: Node) -> Node:
    return Node(node.shape, lambda value, index: value(node, index), [node])


def _computed(x: Node, at: Index, value: Value, known: dict[tuple[Any, ...], str], lines: list[str]) -> str:
    """An element of a node, computed once into a variable; of a view, what it shows."""
    if x.view:
        return x.expr(value, at)
    if (key := (x, *at)) not in known:
        text = x.expr(value, at)
        known[key] = f"v{len(known)}"
        lines.append(f"const float {known[key]} = {text};")
    return known[key]


class _Writer:
    def __init__(self, logits: Node, states: Mapping[State, tuple[Node, Node]], large: set[Node]) -> None:
        self.logits, self.states, self.large = logits, states, large
        self.updated, self.target = dict[Node, Node](), dict[Node, Node]()  # what becomes a large state, a small one
        for before, after in states.values():
            root, made = _root(after), self.updated if before in self.large else self.target
            fits = _in_order(after) and root.leaf is None and not root.combine and root not in made
            if made is self.updated and not (fits and root.shape == before.shape):
                raise _AcrossError(before)
            made[root if fits else _copied(after)] = before
        self.inputs = dict[Node, Node]()  # of products, as they lie in memory
        self.part, self.level = dict[Node, Node](), dict[Node, int]()
        self.order = self._reach([logits, *self.target, *self.updated])
        self.columns = dict[Node, tuple[Index, int]]()
        self.kept = {*self.target, *self.updated, *self.inputs.values()}
        self._find()
        if wrong := [state for state in self.updated.values() if state not in self.columns]:
            raise _AcrossError(wrong[0])
        levels = range(1, max(self.level.values()) + 1)
        self.works = [[x for x in self.order if self.shared(x) and self.level[x] == n] for n in levels]
        fixed = {_root(logits), *self.updated, *self.large, *self.part}
        found = Rows(self.order, self.level, self.target, fixed, [x for work in self.works for x in work], self.kept)
        self.rows, self.after = found.found(), found.after
        changed = {x for row in self.rows.values() for x, _ in row.states}
        self.owned = {self.target.pop(x): x for x in changed}
        self.offset, self.small, self.floats = dict[Node, int](), 0, 0
        first = [*self.target.values()]  # the states that each block has for itself
        local = [row.end for row in self.rows.values() if row.local]
        for before in [*first, *(b for b, _ in states.values() if b not in first), *local]:
            self.offset[before] = self.floats
            self.floats += before.count + -before.count % 4
            self.small = self.floats if before in first else self.small
        self.lines, self.place, self.done = list[_Line](), dict[Node, str](), set[Node]()
        self.constants, self.places, self.size = list[Tensor](), dict[Node, int](), 0
        self.embedding: Tensor | None = None
        self.weights, self.words = list[Tensor](), 0
        self.home, self.buffers = dict[Node, tuple[Node, int]](), dict[Node, int]()
        self.jobs, self.phases = list[tuple[str, ...]](), list[tuple[int, int, int, list[str]]]()
        self.ends, self.known = list[str](), dict[Node, str]()  # what becomes of each job's rows; sums in registers

    def _reach(self, roots: Sequence[Node]) -> list[Node]:
        """All nodes, arguments first."""
        order, seen, waiting = list[Node](), set[Node](), [(root, False) for root in reversed(roots)]
        while waiting:
            node, done = waiting.pop()
            if done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                if node.weight is not None:
                    x = node.args[0]
                    here = _in_order(x) and _root(x).leaf is None and _root(x) not in self.target
                    self.inputs[node] = _root(x) if here else _copied(x)
                    node.args = [self.inputs[node]]
                waiting += [(node, True), *((x, False) for x in reversed(node.args))]
        return order

    def _find(self) -> None:
        """Find which nodes belong to a large state, the phase of every node, and which lie in memory."""
        uses, least = dict.fromkeys(self.order, 0), min((state.count for state in self.large), default=math.inf)
        for node in self.order:
            states = {self.part[x] for x in node.args if x in self.part} | ({node} & self.large)
            if len(states) > 1:
                raise _AcrossError(min(states, key=lambda state: state.count))
            if states and not node.combine:
                self.part[node] = states.pop()
            self.level[node] = max((self.level[x] for x in node.args), default=0) + self.shared(node)
            wide = node in self.part or node.count >= least
            for x in () if node.view else node.args:  # what is smaller, a wide one reads again and again
                uses[_root(x)] += 2 if node.moves or (wide and _root(x).count < node.count) else 1
            if self.shared(node) and node.weight is None:
                self._find_columns(node)
        for node, count in uses.items():
            often = count > 1 and node.count > 1 and node.leaf is None and not node.view and node not in self.part
            if node.combine or (often and not node.moves):
                self.kept.add(node)

    def shared(self, node: Node) -> bool:
        """Whether blocks share the work of a reduction."""
        return node.weight is not None or (bool(node.combine) and any(x in self.part for x in node.args))

    def _find_columns(self, node: Node) -> None:
        """Learn from a reduction what the columns of its large state are."""

        def value(x: Node, index: Index) -> str:
            state = x if x in self.large else self.updated.get(x)
            if state is not None:
                if self.columns.setdefault(state, (index, node.over)) != (index, node.over) or "k" not in index:
                    raise _AcrossError(state)
            elif x in self.part:
                x.expr(value, index)
            return ""

        if node.combine != "sum":
            raise _AcrossError(next(self.part[x] for x in node.args if x in self.part))
        node.expr(value, [*unflat("o", node.shape), "k"])

    # expressions ---------------------------------------------------------------------------------------------------------

    def body(
        self, node: Node, index: Index, finish: str, column: Node | None = None, own: str = "i"
    ) -> tuple[str, list[_Use]]:
        """The statements that compute an element of a node, and what they read. own: a thread's index, as in `each`."""
        lines, known, uses = list[str](), dict[tuple[Any, ...], str](), list[_Use]()
        most = node.over if own == "k" else node.count  # values of `own`

        def value(x: Node, at: Index) -> str:
            if (state := x if x in self.large else self.updated.get(x)) is not None and x is not node:
                if column is not state or state not in self.columns or at != self.columns[state][0]:
                    raise _AcrossError(state)
                if x is state and x in self.done:
                    raise _AcrossError(state)
            if x is not node and x in self.known:
                return self.known[x]
            if x is not node and x in self.place:
                uses.append(_Use(x, same(flat(at, x.shape), own, most)))
                return f"{self.place[x]}[{flat(at, x.shape)}]"
            if x.leaf is not None:
                assert x not in self.owned, "read beside its rows"
                if x in self.target.values():
                    uses.append(_Use(x, same(flat(at, x.shape), own, most)))
                return self._leaf(x, at)
            return _computed(x, at, value, known, lines)

        result = node.expr(value, index)
        return " ".join([*lines, finish.format(result)]), uses

    def row(self, product: Node) -> list[_Use]:
        """Write what becomes of a row of a product, and return what that reads in memory."""
        row, lines, known = self.rows[product], list[str](), dict[tuple[Any, ...], str]()
        operands, uses = dict[str, str](), list[_Use]()

        def operand(text: str) -> str:
            return operands.setdefault(text, f"u[{len(operands)}]")

        def value(x: Node, at: Index) -> str:
            if x is product:
                return "p"
            if x in self.place:
                uses.append(_Use(x, False))
                return operand(f"{self.place[x]}[{flat(at, x.shape)}]")
            if x in self.owned or (self.is_local(x) and x is not row.end):
                return operand(f"b.states[{self.offset[x]} + {flat(at, x.shape)}]")
            if x.leaf is not None:
                if x in self.target.values():
                    uses.append(_Use(x, False))
                return operand(self._leaf(x, at)) if x.leaf != "token" else "token"
            return _computed(x, at, value, known, lines)

        kept = list[str]()
        for state, first in row.states:
            start = next(self.offset[before] for before, x in self.owned.items() if x is state)
            for at, index in row_indices((state, first), product.count):
                kept.append(f"b.keep({start + at} + row, {value(state, index)});")
        result = value(row.end, unflat(name(product.count), row.end.shape))
        if row.local:
            kept.append(f"b.keep({self.offset[row.end]} + row, {result});")
        loads = " ".join(f"{u} = {text};" for text, u in operands.items())
        done = result == "p" and not kept
        text = "" if done else f"{loads}\n{' '.join([*lines, *kept])} return {result};"
        self.ends.append(text.replace(name(product.count), "row"))
        return uses

    def is_local(self, node: Node) -> bool:
        return any(row.local and row.end is node for row in self.rows.values())

    def _leaf(self, x: Node, index: Index) -> str:
        if x.leaf == "token":
            return "token"
        if not x.constant:
            return f"b.{'now' if x in self.target.values() else 'states'}[{flat(index, x.shape)} + {self.offset[x]}]"
        if index[:1] == ["token"]:
            if self.embedding is not None and self.embedding is not x.leaf:
                raise UnknownError("two embeddings of the token")
            self.embedding = x.leaf
            return f"b.embedding({flat(index, x.shape)})"
        if x not in self.places:
            self.places[x] = self.size
            self.constants.append(x.leaf)
            self.size += x.count
        return f"b.constants[{flat(index, x.shape)} + {self.places[x]}]"

    # statements ----------------------------------------------------------------------------------------------------------

    def need(self, node: Node) -> None:
        """Write what computes the arguments of a node."""
        for x in node.args:
            if x in self.done or x.leaf is not None or self.shared(x):
                continue
            (self.make if x in self.kept else self.need)(x)
            self.done.add(x)

    def make(self, node: Node) -> None:
        """Write what computes a node into memory."""
        self.need(node)
        if (state := self.updated.get(node)) is not None:
            index, over = self.columns[state]
            text, uses = self.body(node, index, "return {};", state, "")
            how = f"b.template update<{self._width(index)}>({state.count // over}, {over}"
            place = f"[&](int o, int k) {{ return {flat(index, state.shape)} + {self.offset[state]}; }}"
            self.add(f"{how}, {place}, [&](int o, int k) {{ {text} }});", uses)
            self.place[node] = f"(b.states + {self.offset[state]})"
            self.done.add(state)
            return
        before = self.target.get(node)
        place = f"(b.next + {self.offset[before]})" if before is not None else f"(b.memory + {self.at(node)})"
        if node.combine:
            shared = together(node.count, node.over)
            text, uses = self.body(node, [*unflat("o", node.shape), "k"], "return {};", None, "k" if shared else "")
            how = f"b.template total<{node.count}, {node.over}, {str(node.combine == 'max').lower()}>"
            text = f"{how}({place}, [&](int o, int k) {{ {text} }});"
            if node.count == 1 and shared:
                self.known[node] = f"t{len(self.known)}"
                text = f"const float {self.known[node]} = {text}"
            self.add(text, [*uses, _Use(node, shared or node.over <= 16, True)], node, shared)
        else:
            text, uses = self.body(node, unflat("i", node.shape), "return {};")
            text = f"b.template each<{node.count}>({place}, [&](int i) {{ {text} }});"
            self.add(text, [*uses, _Use(node, True, True)], node)
        self.place[node] = place

    @staticmethod
    def _width(index: Index) -> int:
        """How many columns a warp takes at once: more than one where neighbours in memory are of several columns."""
        return 1 if index[-1] == "k" else 8

    def add(self, text: str, uses: Sequence[_Use], makes: Node | None = None, meets: bool = False) -> None:
        reads = {self.home.get(use.node, (use.node, 0))[0] for use in uses if not use.writes}
        self.lines.append(_Line(text, reads, makes, uses, meets))

    def at(self, node: Node) -> str:
        """Where a node lies in a block's memory, to be filled in."""
        buffer, offset = self.home.setdefault(node, (node, 0))
        return f"@{self.buffers.setdefault(buffer, len(self.buffers))}+{offset}@"

    def columns_of(self, node: Node) -> list[_Use]:
        """Write a sum over the columns of a large state, and return what it reads."""
        state = next(self.part[x] for x in node.args if x in self.part)
        index, over = self.columns[state]
        text, uses = self.body(node, [*unflat("o", node.shape), "k"], "return {};", state, "")
        how = f"b.template columns<{self._width(index)}>({node.count}, {over}, {self.words}"
        self.add(f"{how}, [&](int o, int k) {{ {text} }});", uses)
        return uses

    def phase(self, work: Sequence[Node], ready: Sequence[Node]) -> None:
        """Write a phase: what leads to its shared work, that work, states while other blocks are still at it, and the wait."""
        begin, first, uses, buffer = len(self.lines), self.words, list[_Use](), Node((0,))
        made = list[Node]()
        for node in work:
            self.need(node)
            end = self.rows[node].end if node in self.rows else node
            local = node in self.rows and self.rows[node].local
            if node.weight is None:
                uses += self.columns_of(node)
            else:
                for x in self.beside(node):
                    self.need(Node((), args=[x]))
                (x,), (rows, inner) = node.args, node.weight.shape
                block = node.shape[-1] if len(node.shape) == 3 else rows  # rows that share a vector
                word = -1 if local else self.words
                self.jobs.append(tuple(map(str, (rows, inner, self.at(x), word, node.count // rows, block))))
                self.weights.append(node.weight)
                uses.append(_Use(x, False))
                if node in self.rows:
                    uses += self.row(node)
                else:
                    self.ends.append("")
            self.done |= {node, end}
            if not local:
                made.append(end)
                self.home[end] = buffer, self.words - first
                self.words += node.count + -node.count % 4
        self.known.clear()
        self.add("", uses)
        middle = len(self.lines)
        for node in ready:
            if node not in self.done:
                self.make(node)
                self.done.add(node)
        self.known.clear()
        buffer.count = self.words - first
        for node in made:
            self.place[node] = f"(b.memory + {self.at(node)})"
        place = self.buffers.setdefault(buffer, len(self.buffers))
        gathered = [] if not buffer.count else [_Use(buffer, True, True)]
        self.add("", [*uses, *gathered], buffer)
        self.phases.append(
            (begin, middle, len(self.lines), [str(len(self.jobs)), str(first), str(buffer.count), f"@{place}+0@"])
        )

    def beside(self, product: Node) -> list[Node]:
        """What the rows of a product read beside it."""
        found, seen, row = list[Node](), set[Node](), self.rows.get(product)
        ends = [] if row is None else [row.end, *(x for x, _ in row.states)]
        waiting = [*ends]
        while waiting:
            x = waiting.pop()
            if x in seen or x is product:
                continue
            seen.add(x)
            if x in self.place or x in self.done or (self.is_local(x) and x not in ends):
                continue
            if x in self.kept and x not in self.after[product]:
                found.append(x)
            else:
                waiting += x.args
        return found

    def source(self, itemsize: int, shared: int) -> Source:
        states = [*self.target, *self.updated]
        for level, work in enumerate([*self.works, []]):
            self.phase(work, [node for node in states if self.level[node] <= level])
        root = _root(self.logits)
        end = root if _in_order(self.logits) and root in self.home else _copied(self.logits)
        if end is not root:
            self.phase([], [end])
        self.add("", [_Use(end, False)])
        return self._text(itemsize, shared, self.at(end))

    def _text(self, itemsize: int, shared: int, logits: str) -> Source:
        places, floats = self._allocate()

        def filled(text: str) -> str:
            return re.sub(r"@(\d+)\+(\d+)@", lambda m: str(places.get(int(m[1]), 0) + int(m[2])), text)

        if self.embedding is None:
            raise UnknownError("no embedding of the token")
        if self.small > MOST_WHOLE:
            raise UnknownError("a large state that is not read column by column")
        if any(w.shape[1] * itemsize % 16 for w in self.weights):
            raise UnknownError("a product whose inner size is not a multiple of 16 bytes")
        self._meet(places)
        ends = [part for begin, middle, end, _ in self.phases for part in ((begin, middle), (middle, end))]
        cases, parts = _alike([filled(" ".join(line.text for line in self.lines[a:b] if line.text)) for a, b in ends])
        rows, numbers = _alike([filled(text) for text in self.ends])
        tables = {
            "job": [[int(filled(x)) for x in job] for job in self.jobs],
            "phase": [[int(filled(x)) for x in phase] for *_, phase in self.phases],
            "numbers": parts, "ends": numbers,
        }  # fmt: skip
        least = (
            floats * 4 + _SCRATCH + _PART * len(self.jobs) + 4 * sum(len(t) * len(t[0]) for t in tables.values()) + 64
        )
        most = max(w.shape[1] for w in self.weights) * itemsize
        ring = max(_RING[0], _WARPS * most) + _PIECE  # a row for each warp
        inside = least + 8 * self.small + ring <= shared
        least += 8 * self.small * inside
        if least + ring > shared:
            raise UnknownError(f"a step that needs {least + ring} bytes of shared memory, of {shared}")
        ring = max(ring, min(shared - least, _RING[1])) // 16 * 16
        loads = max(-(-int(phase[2]) // _THREADS) for *_, phase in self.phases)
        sizes = {
            "classes": self.logits.count, "jobs": len(self.jobs), "phases": len(self.phases), "ring": ring,
            "floats": floats, "small": self.small, "words": self.words, "inside": int(inside), "logits": filled(logits),
            "vectors": max(int(job[4]) for job in self.jobs), "copies": COPIES, "shared": shared,
            "gathers": min(loads, _LOADS),
        }  # fmt: skip
        head = "template <class B>\n  static __device__ __forceinline__"
        pairs = [(i, *row.split("\n")) for i, row in enumerate(rows) if row]
        text = [
            "#pragma once", "#include <elman/whole.cuh>", "namespace elman::whole {",
            f"struct Tables {{\n  int {', '.join(f'{k}[{len(v)}][{len(v[0])}]' for k, v in tables.items())};\n}};",
            f"__device__ const Tables kTables = {{{', '.join(map(_braces, tables.values()))}}};", "struct Program {",
            "  using Tables = whole::Tables;", "  static __device__ const Tables& tables() { return kTables; }",
            f"  static constexpr int {', '.join(f'{k} = {v}' for k, v in sizes.items())};",
            f"  {head} void part(B& b, int token, const int* n) {{", "    switch (n[0]) {",
            *(f"      case {i}: {{\n        {case}\n      }} break;" for i, case in enumerate(cases) if case),
            "    }", "  }",
            f"  {head} void operands(B& b, const int* n, int row, int token, float (&u)[kOperands]) {{", "    switch (n[0]) {",
            *(f"      case {i}: {{\n        {loads}\n      }} break;" for i, loads, _ in pairs if loads), "    }", "  }",
            f"  {head} float made(B& b, const int* n, int row, int token, const float (&u)[kOperands], float p) {{",
            "    switch (n[0]) {", *(f"      case {i}: {{\n        {end}\n      }}" for i, _, end in pairs),
            "    }", "    return p;", "  }",
            "};", "}  // namespace elman::whole", "",
        ]  # fmt: skip
        states = {key: self.offset[before] for key, (before, _) in self.states.items()}
        own = 0 if inside else 2 * self.small
        jobs = [0, *(int(numbers[0]) for *_, numbers in self.phases)]
        told = [int(job[0]) * (job[3] != "-1") for job in self.jobs]
        most_rows = sorted(max(told[a:b], default=0) for a, b in itertools.pairwise(jobs))
        if len(most_rows) < 2 or not most_rows[-2]:
            raise UnknownError("a single product with weights")
        return Source(
            "\n".join(text), self.constants, self.embedding, self.weights, states, self.floats, own, COPIES * self.words,
            self.logits.count, most_rows[-2],
        )  # fmt: skip

    def _meet(self, places: Mapping[int, int]) -> None:
        """Let threads meet where one reads or writes what another wrote, or writes what another read."""
        since = list[tuple[str, int, int, bool, bool]]()
        for line in self.lines:
            uses = [self._where(use, places) for use in line.uses]
            if any(_apart(a, b) for a in since for b in uses if not (line.meets and b[4])):
                line.text = f"b.meet(); {line.text}".rstrip()
                since.clear()
            since = [u for u in uses if u[4]] if line.meets else [*since, *uses]

    def _where(self, use: _Use, places: Mapping[int, int]) -> tuple[str, int, int, bool, bool]:
        """(memory, from, to, own, writes)."""
        x = use.node
        if x in self.target or x in self.target.values():
            space, start = ("next", self.offset[self.target[x]]) if x in self.target else ("now", self.offset[x])
        else:
            buffer, offset = self.home.get(x, (x, 0))
            space, start = "memory", places.get(self.buffers.get(buffer, -1), 0) + offset
        return space, start, start + x.count, use.own, use.writes

    def _allocate(self) -> tuple[dict[int, int], int]:
        """Where each buffer lies, in floats, and how many there are: buffers share memory unless both are needed at a time."""
        last = {node: at for at, line in enumerate(self.lines) for node in line.reads}
        places = dict[int, int]()
        taken = list[tuple[int, int, int, int]]()  # (from line, to line, from float, to float)
        for at, line in enumerate(self.lines):
            if line.makes is None or line.makes not in self.buffers or not line.makes.count:
                continue
            until, size, start = max(last.get(line.makes, at), at), line.makes.count + -line.makes.count % 8, 0
            for *_, low, high in sorted((t for t in taken if t[0] <= until and t[1] >= at), key=lambda t: t[2]):
                if low - start >= size:
                    break
                start = max(start, high)
            taken.append((at, until, start, start + size))
            places[self.buffers[line.makes]] = start
        return places, max((high for *_, high in taken), default=0)


def _braces(rows: Sequence[Sequence[int]]) -> str:
    return "{" + ", ".join("{" + ", ".join(map(str, row)) + "}" for row in rows) + "}"


def _apart(a: tuple[str, int, int, bool, bool], b: tuple[str, int, int, bool, bool]) -> bool:
    """Whether two uses are of the same memory by different threads, and one writes."""
    meet = a[0] == b[0] and a[1] < b[2] and b[1] < a[2] and (a[4] or b[4])
    return meet and not (a[3] and b[3] and (a[1] - b[1]) % _THREADS == 0)


def together(count: int, over: int) -> bool:
    """Whether all threads share each of these sums; as in whole.cuh."""
    return over > 64 if count == 1 else count < _WARPS // 2 and over > 512


def _alike(parts: Sequence[str]) -> tuple[list[str], list[list[int]]]:
    """Parts that differ in whole numbers alone as one: (cases, which read their numbers from `n`; the `n` of each part, whose
    first is the number of its case). So the layers of a model share their code."""
    token = re.compile(r"template \w+<[^>]*>|(?<![\w.])\d+(?![\w.])")
    groups = dict[str, list[int]]()
    for at, part in enumerate(parts):
        groups.setdefault(token.sub(lambda m: m[0] if m[0][0] == "t" else "#", part), []).append(at)
    cases, made = list[str](), [list[int]() for _ in parts]
    for case, members in enumerate(groups.values()):
        rows = [[int(x) for x in token.findall(parts[at]) if x[0] != "t"] for at in members]
        columns = [tuple(column) for column in zip(*rows, strict=True)]
        varies = list(dict.fromkeys(column for column in columns if len(set(column)) > 1))  # equal ones are read once
        names = iter([f"n[{varies.index(c) + 1}]" if c in varies else str(c[0]) for c in columns])
        words = re.split(f"({token.pattern})", parts[members[0]])
        cases.append("".join(next(names) if k % 2 and x[0] != "t" else x for k, x in enumerate(words)))
        for at, row in zip(members, zip(*varies, strict=True) if varies else [()] * len(members), strict=True):
            made[at] = [case, *row]
    width = max(map(len, made))
    return cases, [[*row, *[0] * (width - len(row))] for row in made]
