"""Tasks that a finite automaton solves: formal languages, products of group elements, brackets, counting, flags."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from elman_core.extension import ConfigError

from .automaton import Automaton
from .draws import Draws
from .task import task

LONG = (128, 256, 512, 1024)


@task("parity", labels="last")
def parity() -> Automaton:
    """Bits; the answer is the parity of the ones."""
    return Automaton(("0", "1"), ("even", "odd"), 0, lambda s, x: s ^ x, lambda s: s)


@task("even_pairs", labels="last")
def even_pairs() -> Automaton:
    """Words of a and b; whether the number of ab and ba together is even, that is, whether the first letter is the last."""
    return Automaton(
        ("a", "b"),
        ("even", "odd"),
        None,
        lambda s, x: (x if s is None else s[0], x),
        lambda s: None if s is None else s[0] ^ s[1],
    )


@task("cycle_navigation", labels="last")
def cycle_navigation(places: int = 5) -> Automaton:
    """Steps of 0, +1 and -1 on a circle of 5 places; the answer is the place at the end."""
    return Automaton(
        ("stay", "+1", "-1"),
        tuple(map(str, range(places))),
        0,
        lambda s, x: (s + (0, 1, -1)[x]) % places,
        lambda s: s,
    )


@task("modular_arithmetic", labels="last", even=True)
def modular_arithmetic(modulus: int = 5) -> Automaton:
    """Digits and + - * in turn, ended by =; the answer is the value modulo 5, with * before + and -."""
    plus, minus, times, equals = range(modulus, modulus + 4)

    def step(s: Any, x: int) -> Any:
        total, term, before = s  # sum of the finished terms, the present term, the sign before the next digit or None
        if before == equals or (x < modulus) == (before is None):
            return None
        if before is not None:
            return total, (term * x if before == times else -x if before == minus else x) % modulus, None
        return (total, term, times) if x == times else ((total + term) % modulus, 0, x)

    return Automaton(
        (*map(str, range(modulus)), "+", "-", "*", "="),
        tuple(map(str, range(modulus))),
        (0, 0, plus),
        step,
        lambda s: s[0] if s[2] == equals else None,
        end=equals,
    )


def _group(elements: list[Any], product: Callable[[Any, Any], Any], shown: list[Any]) -> Automaton:
    number = {element: i for i, element in enumerate(elements)}
    names = tuple(map(str, elements))
    table = [[number[product(a, b)] for b in shown] for a in elements]
    return Automaton(tuple(map(str, shown)), names, 0, lambda s, x: table[s][x], lambda s: s)


def _shown(generators: int, few: list[Any], elements: list[Any]) -> list[Any]:
    if generators not in (0, len(few)):
        raise ConfigError(f"generators is {len(few)} for a generating set, or 0 for all elements")
    return few if generators else elements


def _permutations(things: int, generators: int, first: list[tuple[int, ...]], even: bool = False) -> Automaton:
    """Products of permutations; each new one is applied after those before it. `first`: the generators, if they are few."""

    def sign(p: tuple[int, ...]) -> int:
        return sum(p[i] > p[j] for i, j in itertools.combinations(range(things), 2)) % 2

    elements = [p for p in itertools.permutations(range(things)) if not (even and sign(p))]
    return _group(elements, lambda a, b: tuple(b[i] for i in a), _shown(generators, first, elements))


@task("s3", train=(128, 128), tests=LONG)
def s3(generators: int = 0) -> Automaton:
    """Permutations of three things; the product so far, at every place. generators=2: only (0 1) and (0 1 2) are shown."""
    return _permutations(3, generators, [(1, 0, 2), (1, 2, 0)])


@task("a5", train=(40, 40))
def a5(generators: int = 0) -> Automaton:
    """Even permutations of five things; the product so far. generators=2: only (0 1 2) and (0 1 2 3 4) are shown."""
    return _permutations(5, generators, [(1, 2, 0, 3, 4), (1, 2, 3, 4, 0)], even=True)


@task("s5", train=(40, 40))
def s5(generators: int = 0) -> Automaton:
    """Permutations of five things; the product so far. generators=2: only (0 1) and (0 1 2 3 4) are shown."""
    return _permutations(5, generators, [(1, 0, 2, 3, 4), (1, 2, 3, 4, 0)])


@task("z60", train=(40, 40))
def z60(generators: int = 0) -> Automaton:
    """Numbers modulo 60; the sum so far. generators=2: only 0 and 1 are shown."""
    return _group(list(range(60)), lambda a, b: (a + b) % 60, _shown(generators, [0, 1], list(range(60))))


def _dyck(kinds: int, depth: int, answers: Iterable[str], answer: Callable[[Any], int]) -> Automaton:
    def step(s: Any, x: int) -> Any:
        if x < kinds:
            return (*s, x) if len(s) < depth else None
        return s[:-1] if s and s[-1] == x - kinds else None

    return Automaton(tuple("([{<"[:kinds] + ")]}>"[:kinds]), tuple(answers), (), step, answer)


@task("dyck1", train=(128, 128), tests=LONG)
def dyck1(depth: int = 8) -> Automaton:
    """Brackets of one kind, nested at most 8 deep; how many are open, at every place."""
    return _dyck(1, depth, map(str, range(depth + 1)), len)


@task("dyck2", train=(128, 128), tests=LONG)
def dyck2(depth: int = 8) -> Automaton:
    """Brackets of two kinds, nested at most 8 deep; which one may close next, or none, at every place."""
    return _dyck(2, depth, (")", "]", "none"), lambda s: s[-1] if s else 2)


@task("anbncn", train=(40, 40), tests=(40, 64, 128, 256))
def anbncn(length: int) -> Automaton:
    """aⁿbⁿcⁿ one after the other, each n at random up to a third of the length; from the first b on, the next letter."""
    most = max(1, length // 3)

    def step(s: Any, x: int) -> Any:
        run, n, left = s  # letter that is written, its number in all, and how many of it are to come
        if run == 0 and x == 0:
            return (0, n + 1, 0) if n < most else None
        if run == 0:
            return (1, n, n - 1) if x == 1 and n else None
        if left:
            return (run, n, left - 1) if x == run else None
        if x != (run + 1) % 3:
            return None
        return (2, n, n - 1) if run == 1 else (0, 1, 0)

    def answer(s: Any) -> int | None:
        run, _, left = s
        if run == 0:
            return None
        return run if left else (run + 1) % 3

    return Automaton(
        ("a", "b", "c"),
        ("a", "b", "c"),
        (0, 0, 0),
        step,
        answer,
        lambda s, x: most - s[1] if s[0] == 0 and x == 0 and s[1] else 1,  # every n is as likely
    )


@task("keyed_automata", train=(40, 40))
def keyed_automata(keys: int = 4, states: int = 5, letters: int = 3) -> Automaton:
    """A key, then letters. The key chooses one of 4 automata, whose letters permute 5 states; the state, at every place."""
    moves = Draws(0, range(keys * letters)).distinct(states, states).reshape(keys, letters, states).tolist()

    def step(s: Any, x: int) -> Any:
        if s is None:
            return (x, 0) if x < keys else None
        return None if x < keys else (s[0], moves[s[0]][x - keys][s[1]])

    names = (*(f"key {k}" for k in range(keys)), *(chr(ord("a") + i) for i in range(letters)))
    return Automaton(names, tuple(map(str, range(states))), None, step, lambda s: None if s is None else s[1])


@task("flag_hold", train=(128, 128), tests=LONG)
def flag_hold(flags: int = 4, gap: int = 32) -> Automaton:
    """A flag of four, on average every 32 inputs, between blanks; the flag that stands, at every place after the first."""
    return Automaton(
        (*(f"flag {f}" for f in range(flags)), "blank"),
        tuple(map(str, range(flags))),
        None,
        lambda s, x: x if x < flags else s,
        lambda s: s,
        lambda _, x: 1 / flags if x < flags else gap - 1.0,
    )
