"""No race in the shared memory of the matrix-state kernels, by which barriers order which threads (races.cpp).

Of each place any two accesses are compared, by two threads and one of them a write: barriers must order them, however far apart
they ran.
Only these kernels: others have many threads write one value to one place, which is a race by this measure.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from emulated import HERE, compile_detector, compile_to_find_races, find_races
from gpu_programs import FUSED, Program, bf16, e75, e97, f16, f32, matrix, name_of

from elman_core.kernels.build import Extension
from elman_core.testing.kernel import need_host_compiler

Compile = Callable[..., Path]
STEPS = 37  # three segments
LONG = 117  # eight, more than there are places for where sixteen steps go at once
FUSED_32X24 = matrix(32, 24, bf16, FUSED, write=True)
LARGE = matrix(64, 72, bf16)
PROGRAMS = {  # to numbers of heads
    matrix(16, 16, bf16, FUSED): 3,  # a warp a team
    matrix(32, 32, bf16): 1,
    FUSED_32X24: 3,
    matrix(4, 260, bf16, FUSED): 1,
    LARGE: 1,
    matrix(40, 24, bf16, FUSED, linear=True): 2,  # sixteen steps at once
    matrix(96, 20, f16, FUSED, write=True): 2,
    matrix(16, 16, f32, FUSED): 3,  # no helpers, a warp a team
    matrix(16, 24, bf16, FUSED, of=e97): 3,  # a further vector, lines that are folded
    matrix(32, 24, bf16, FUSED, of=e97): 3,
    matrix(32, 32, bf16, FUSED, of=e97): 3,  # results straight to memory
    matrix(64, 72, bf16, FUSED, of=e97): 1,
    matrix(20, 24, f32, FUSED, write=True, of=e97): 1,
    matrix(16, 24, bf16, of=e75): 3,  # learned constants are folded, too
    matrix(32, 32, bf16, of=e75): 1,
}
BLOCKED = {
    matrix(rows, columns, bf16, FUSED, write=True, linear=True): 1 for rows, columns in ((64, 24), (64, 72), (128, 72))
}
SOUND = ("barrier", "warp_barrier", "both_halves", "through_a_third", "halves_of_a_word", "copy", "own_copy")
RACING = (
    "no_barrier", "shuffle", "warp_barrier_for_a_block", "half_of_the_warps", "halves_apart", "write_after_read", "same_place",
    "copy_without_waiting", "copy_with_a_barrier_only", "copy_of_a_group_not_waited_for", "copy_without_a_barrier",
    "copy_onto_what_is_read",
)  # fmt: skip
LOOP = "    __pipeline_wait_prior(0);\n    team_sync<P>(at.team);\n"
MUTATIONS = {  # program, file, then pairs of what stands there and what shall
    "no helpers_sync in the backward's loop": (
        FUSED_32X24,
        "matrix_state_backward.cuh",
        ("helpers_sync<P>(at.team);\n    bring(j + 2", "bring(j + 2"),
    ),
    "no team_sync in the forward's loop": (
        FUSED_32X24,
        "matrix_state_forward.cuh",
        (LOOP + "  }\n  finish", "    __pipeline_wait_prior(0);\n  }\n  finish"),
        ("run();\n    team_sync<P>(at.team);", "run();"),
    ),
    "helpers that replay and do not wait for the walk": (
        LARGE,
        "matrix_state_walk_large.cuh",
        ("signal<P, true>(at.team, s / each);", ";"),
    ),
    "one buffer in the forward": (FUSED_32X24, "matrix_state_forward.cuh", ("sm.x[seg & 1]", "sm.x[0]")),
    "inputs brought over those that are still read": (
        next(iter(BLOCKED)),
        "matrix_state_backward.cuh",
        ("    if (j > 0) give(j - 1);\n", "    if (!solves) bring(j + 3);\n    if (j > 0) give(j - 1);\n"),
        ("      bring(j + 3);\n", ""),
    ),
    "inputs that have not arrived": (
        list(BLOCKED)[-1],
        "matrix_state_backward.cuh",
        (
            "__pipeline_wait_prior(0);\n      helpers_sync<P>(at.team);\n      block",
            "helpers_sync<P>(at.team);\n      block",
        ),
    ),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    need_host_compiler()
    folder = tmp_path_factory.mktemp("races")
    detector = compile_detector(folder)

    @cache
    def compile_once(source: Path, extension: Extension, *options: str) -> Path:
        made = Path(folder, f"{source.stem}-{extension.name}")
        compile_to_find_races(extension, source, made, detector, *options)
        return made

    return compile_once


def compile_driver(compiled: Compile, program: Program, heads: int, steps: int) -> Path:
    sizes = ("-DELMAN_BATCH=1", f"-DELMAN_STEPS={steps}", f"-DELMAN_HEADS={heads}")
    return compiled(program.source, program.extension, *sizes)


def races(program: Path, *arguments: str, backwards: bool = False) -> tuple[int, str]:
    """How many the program has, and what it said."""
    code, said = find_races(program, *arguments, backwards=backwards)
    found = re.search(r"^(\d+) races in shared memory, of (\d+) accesses$", said, re.MULTILINE)
    assert found, said
    count, accesses = map(int, found.groups())
    assert accesses > 0
    assert code == (9 if count else 0), said
    return count, said


@pytest.fixture
def small(compiled: Compile) -> Path:
    source = HERE / "emulated_races.cu"
    return compiled(source, Extension("small", source))


@pytest.mark.parametrize("kernel", SOUND)
def test_threads_ordered_by_barriers_do_not_race(kernel: str, small: Path) -> None:
    count, said = races(small, kernel)
    assert count == 0, said


@pytest.mark.parametrize("backwards", [False, True], ids=["first-warps-ahead", "last-warps-ahead"])
@pytest.mark.parametrize("kernel", RACING)
def test_a_race_is_found_in_either_order(kernel: str, backwards: bool, small: Path) -> None:
    count, said = races(small, kernel, backwards=backwards)
    assert count > 0, said
    assert "emulated_races.cu:" in said  # where


def steps_of(program: Program) -> int:
    return LONG if program in BLOCKED else STEPS


@pytest.mark.parametrize(("program", "heads"), (PROGRAMS | BLOCKED).items(), ids=map(name_of, PROGRAMS | BLOCKED))
def test_the_matrix_state_kernels_do_not_race(program: Program, heads: int, compiled: Compile) -> None:
    """In one order of the warps: the detector finds a race in either."""
    count, said = races(compile_driver(compiled, program, heads, steps_of(program)))
    assert count == 0, said
    assert "every output was written" in said


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_barrier_or_a_buffer_too_few_is_found(name: str, compiled: Compile, tmp_path: Path) -> None:
    program, file, *changes = MUTATIONS[name]
    whole = program.extension
    (include,) = whole.include
    shutil.copytree(include, tmp_path / "include")
    mutated = tmp_path / "include" / "elman" / file
    text = mutated.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    mutated.write_text(text)
    extension = replace(whole, name=name.replace(" ", "_"), include=(tmp_path / "include",))
    count, said = races(compile_driver(compiled, replace(program, extension=extension), 1, steps_of(program)))
    assert count > 0, said
