"""The problems of a grid, from a few that are stated and a sample of what a family declares."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from elman_core.extension import Case

Grid = Literal["quick", "full"]
HALF = (torch.bfloat16, torch.float16)
HOST = (torch.float64, torch.float32)
CPU = (torch.float32, torch.bfloat16)
CUDA = (*HALF, torch.float32)


@dataclass(frozen=True)
class Problems:
    """The problems of a grid: "quick" has those with a name, in every dtype; "full" also the large ones and a sample.

    A sample draws every declared value of a size equally often, and each word in half of the cases; what else they combine with
    is arbitrary, but the same every time. Modules compile slowly: of the kinds of cases that have one each, a kernel and dtype
    has those of the problems with a name, and a few others of its own.

    Attributes:
        letters: of the sizes.
        named, large: "33x3x64, 7x2x16 masked packed": sizes, and words that set flags or options of `Case`.
        values: the declared values of each size, by letter, or of several that depend on each other, by letters. words: those
            that a sample sets. count: cases of a sample, for each dtype; none without values.
        wide: in float32, the last size is so many times as large: of a few numbers, the relative error is a matter of luck.
        compiled: letters of the sizes for which a module is compiled, beside "packed". modules: most kinds in a dtype.
    """

    letters: str
    dtypes: Sequence[torch.dtype]
    named: str
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    large: str = ""
    words: str = "masked strided bare packed"
    count: int = 40
    wide: int = 1
    compiled: str = ""
    modules: int = 16

    def cases(self, grid: Grid, name: str = "") -> list[Case]:
        """All problems of a grid, each once. name: of the kernel."""
        problems = [*_stated(self.named), *(() if grid == "quick" else (*_stated(self.large), *self._sample()))]
        every = ([self._case(*problem, dtype) for problem in problems] for dtype in self.dtypes)
        return list({str(case): case for some in every for case in self._few(some, name)}.values())

    def kind(self, case: Case) -> tuple[Any, ...]:
        """What of a case its module is compiled for."""
        return case.dtype, *(case.sizes[letter] for letter in self.compiled), case.has("packed")

    def _few(self, cases: list[Case], name: str) -> list[Case]:
        kinds = list(dict.fromkeys(map(self.kind, cases)))
        named = len({self.kind(case) for case in cases[: len(_stated(f"{self.named},{self.large}"))]})
        first = zlib.crc32(f"{name} {cases[0].dtype}".encode()) % max(1, len(kinds) - named)
        kept = kinds[:named] + (2 * kinds[named:])[first : first + self.modules - named]
        return [case for case in cases if self.kind(case) in kept]

    def _sample(self) -> Iterator[tuple[tuple[int, ...], str]]:
        generator, count = random.Random(0), range(self.count if self.values else 0)

        def column(values: Sequence[Any]) -> list[Any]:
            return generator.sample([values[i % len(values)] for i in count], len(count))

        sizes = [column([v if isinstance(v, tuple) else (v,) for v in values]) for values in self.values.values()]
        words = [column(("", word)) for word in self.words.split()]
        for i in count:
            yield tuple(n for size in sizes for n in size[i]), " ".join(word[i] for word in words)

    def _case(self, sizes: tuple[int, ...], words: str, dtype: torch.dtype) -> Case:
        *others, last = sizes
        last *= self.wide if dtype == torch.float32 else 1
        return Case.of(self.letters, (*others, last), dtype, **dict.fromkeys(words.split(), True))


def _stated(problems: str) -> list[tuple[tuple[int, ...], str]]:
    """(sizes, words) of each problem."""
    parts = [problem.split() for problem in problems.split(",") if problem]
    return [(tuple(map(int, sizes.split("x"))), " ".join(words)) for sizes, *words in parts]
