"""The full grids: a sample draws whatever a family declares, and the same every time."""

from itertools import combinations, product
from typing import Any

import pytest
import torch
from elman_authors import grids
from elman_authors.grids import decoding, recurrences
from elman_authors.grids.matrix import PROBLEMS as MATRIX
from elman_authors.grids.problems import Problems

from elman_core.registry import list_variants

TABLES = {
    "conv": recurrences.CONVOLUTION,
    "decoding": decoding.SHARED,
    "step": decoding.STEP,
    "dense": recurrences.DENSE,
    "blocks": recurrences.BLOCKS,
    "elementwise": recurrences.ELEMENTWISE,
    "gates": recurrences.GATES,
    "rows": recurrences.ROWS,
}
EACH = {f"{name} {target}": problems for name, table in TABLES.items() for target, problems in table.items()}
EACH |= {f"matrix {target} {i}": problems for target, some in MATRIX.items() for i, problems in enumerate(some)}


@pytest.mark.parametrize("problems", EACH.values(), ids=EACH)
def test_every_declared_value_and_every_pair_of_words_is_drawn(problems: Problems) -> None:
    quick, full = problems.cases("quick"), problems.cases("full")
    assert set(map(str, quick)) < set(map(str, full)) == set(map(str, problems.cases("full")))
    full += [case for name in "abcdef" for case in problems.cases("full", name)]  # of a family's kernels
    for letters, values in problems.values.items():
        wide = problems.wide if letters == problems.letters[-1] else 1
        drawn = {tuple(case.sizes[letter] for letter in letters) for case in full}
        for value in values:
            sizes = value if isinstance(value, tuple) else (value,)
            assert drawn & {sizes, tuple(n * wide for n in sizes)}, (letters, value)
    for pair in combinations(problems.words.split(), 2):
        for on in product((False, True), repeat=2):
            assert any(tuple(case.has(word) for word in pair) == on for case in full), (pair, on)


@pytest.mark.parametrize(("grid", "most"), [("quick", 7), ("full", 18)])
def test_a_grid_of_a_kernel_and_dtype_compiles_few_modules(grid: Any, most: int) -> None:
    for entry in list_variants().values():
        for spec in (s for s in entry.variant.kernels if s.module is not None and "cuda" in s.targets):
            made: dict[Any, set[Any]] = {}
            for case in grids.cases(spec, "cuda", grid):
                made.setdefault(case.dtype, set()).add(spec.module("cuda", case))
            assert all(len(modules) <= most for modules in made.values()), spec.name


@pytest.mark.parametrize(("rows", "steps"), [(8, 64), (512, 64), (4096, 16), (66_000, 2)])
@pytest.mark.parametrize(
    ("module", "name"), [("elman_e42.op", "e42"), ("elman_e65.op", "e65"), ("elman_baselines.rnn.op", "lstm_gates")]
)
def test_a_first_use_with_many_rows_is_verified_in_little_memory(module: str, name: str, rows: int, steps: int) -> None:
    made = getattr(pytest.importorskip(module), name)
    kernel = getattr(made, "_plain", made)
    [case] = kernel.cases(torch.bfloat16, rows, 512)
    assert case.sizes == {"T": steps, "B": rows, "d": 512}
