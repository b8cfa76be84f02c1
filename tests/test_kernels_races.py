"""No race in the shared memory of matrix-state kernels and of clusters, by which barriers order which threads (races.cpp).

Of each place any two accesses are compared, by two threads and one of them a write: barriers must order them, however far apart
they ran.
Only these kernels: others have many threads write one value to one place, which is a race by this measure.
"""

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import elman_csrc
import pytest
from elman_authors.testing.kernel import need_host_compiler
from emulated import HERE, compile_detector, compile_to_find_races, find_races
from gpu_programs import FUSED, Program, bf16, dense, e75, e97, f16, f32, gates, matrix, name_of, rnn, tape

from elman_core.kernels.build import Extension

Compile = Callable[..., Path]
STEPS = 37  # three segments
LONG = 117  # eight, more than there are places for where sixteen steps go at once
FUSED_32X24 = matrix(32, 24, bf16, FUSED, write=True)
LARGE = matrix(64, 72, bf16)
STEP = matrix(96, 20, bf16, FUSED, write=True, step=True)
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
    matrix(128, 72, bf16, FUSED, of=e97): 1,  # eight warps and their helpers
    matrix(20, 24, f32, FUSED, write=True, of=e97): 1,
    matrix(16, 24, bf16, of=e75): 3,  # learned constants are folded, too
    matrix(32, 32, bf16, of=e75): 1,
    STEP: 1,
    matrix(64, 7, f32, FUSED, of=e97, step=True): 1,
}
BLOCKED = {
    matrix(rows, columns, bf16, FUSED, write=True, linear=True): 1 for rows, columns in ((64, 24), (64, 72), (128, 72))
}
E23 = tape(bf16, 96)
DENSE = dense("cluster", 0, 1, bf16, 144)
CLUSTERS = (
    E23,
    tape(f32, 96, packed=True),
    DENSE,
    dense("cluster", 0, 1, f32, 48),
    dense("cluster", 0, 1, bf16, 144, tied=True),
    gates(rnn.gru_gates.cell, 16, bf16, 64),
)
SOUND = (
    "barrier", "warp_barrier", "both_halves", "through_a_third", "halves_of_a_word", "copy", "own_copy",
    "sent", "sent_and_waited_for_by_a_warp_then_a_barrier", "sent_onto_what_was_written", "sent_after_a_block_has_read",
    "sent_for_a_warp",
)  # fmt: skip
RACING = (
    "no_barrier", "shuffle", "warp_barrier_for_a_block", "half_of_the_warps", "halves_apart", "write_after_read", "same_place",
    "copy_without_waiting", "copy_with_a_barrier_only", "copy_of_a_group_not_waited_for", "copy_without_a_barrier",
    "copy_onto_what_is_read", "sent_and_not_waited_for", "sent_and_waited_for_by_a_warp",
    "sent_and_another_mbarrier_waited_for", "sent_onto_what_is_written", "two_sent_to_a_place", "sent_before_a_block_has_read",
    "sent_for_a_warp_by_shuffles", "sent_for_two_warps", "initialised_by_a_lane",
)  # fmt: skip
LOOP = "    __pipeline_wait_prior(0);\n    team_sync<P>(at.team);\n"
SCORES = "      score_now = c.slots_received(), written = softmax<Elem>(kappa * score_now);"
SENT = "c.send_number(warp_sum(w * h));"
W_PART = "c.partials(c.w_part, 1);"
SHARES = "    if (lane < P::across) store<P::E>(&shares[threadIdx.x / 32][at], x);"
READ = "  float r[E] = {}, energy[E] = {};"
STORE = "product.store(partial_out, g.rows);"
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
    "a wait of the first warp alone": (E23, "e23_cluster.cuh", ("while (!ptx::", "while (warp == 0 && !ptx::")),
    "what arrived read after the answer is sent": (
        E23,
        "e23.cuh",
        (f"{SCORES}\n    }}\n", "    }\n"),
        (SENT, f"{SENT} c.e--;\n{SCORES} c.e++;\n"),
    ),
    "a warp of E23 whose lanes send before all have read": (
        E23,
        "e23_cluster.cuh",
        ("    __syncwarp();  // all lanes have read: peers may overwrite it once this send arrives\n", ""),
    ),
    "one half for every exchange of E23": (
        E23,
        "e23_cluster.cuh",
        ("ptx::in_block(half(e) + offset", "ptx::in_block(base + offset"),
        ("shared + e % 2 * L::half", "shared"),
    ),
    "no barrier before sums of E23 are added": (E23, "e23.cuh", (f"{W_PART}\n    __syncthreads();", W_PART)),
    "no barrier before sums are added": (DENSE, "dense.cuh", (f"{STORE}\n      __syncthreads();", STORE)),
    "no barrier before a step's shares are added": (
        STEP,
        "matrix_step.cuh",
        (f"{SHARES}\n    __syncthreads();", SHARES),
    ),
    "no barrier before a step's vectors are read": (STEP, "matrix_step.cuh", (f"  __syncthreads();\n\n{READ}", READ)),
    "a wait of one lane": (
        DENSE,
        "dense.cuh",
        ("while (!ptx::barrier_passed", "while (lane == 0 && !ptx::barrier_passed"),
    ),
    "one slot for every step": (
        DENSE,
        "dense.cuh",
        ("send_to + slot * Slot::slot_bytes", "send_to"),
        ("L::slots + slot * Slot::slot_bytes", "L::slots"),
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


def races(program: Path, *arguments: str, **options: bool) -> tuple[int, str]:
    """How many the program has, and what it said."""
    code, said = find_races(program, *arguments, **options)
    found = re.search(r"^(\d+) races in shared memory, of (\d+) accesses$", said, re.MULTILINE)
    assert found, said
    count, accesses = map(int, found.groups())
    assert accesses > 0
    assert code == (9 if count else 0), said
    return count, said


@pytest.fixture
def small(compiled: Compile) -> Path:
    source = HERE / "emulated_races.cu"
    return compiled(source, Extension("small", source, include=(elman_csrc.get_include(),)))


@pytest.mark.parametrize("kernel", SOUND)
def test_threads_ordered_by_barriers_do_not_race(kernel: str, small: Path) -> None:
    count, said = races(small, kernel)
    assert count == 0, said


@pytest.mark.parametrize("backwards", [False, True], ids=["first-warps-ahead", "last-warps-ahead"])
@pytest.mark.parametrize("kernel", RACING)
def test_a_race_is_found_in_either_order(kernel: str, backwards: bool, small: Path) -> None:
    count, said = races(small, kernel, backwards=backwards)
    assert count > 0, said
    assert "emulated_races.cu:" in said or "dense_ptx.cuh:" in said  # where


@pytest.mark.parametrize("case", range(5))
def test_of_the_program_for_racecheck_two_cases_race(case: int, compiled: Compile) -> None:
    source = HERE / "racecheck_clusters.cu"
    count, said = races(compiled(source, Extension("clusters", source, include=(elman_csrc.get_include(),))), str(case))
    assert (count > 0) == (case in (3, 4)), said


def steps_of(program: Program) -> int:
    return LONG if program in BLOCKED else 5 if program in CLUSTERS else STEPS


@pytest.mark.parametrize("program", CLUSTERS, ids=name_of)
def test_the_kernels_of_clusters_do_not_race(program: Program, compiled: Compile) -> None:
    driver = compile_driver(compiled, program, 1, steps_of(program))
    count, said = races(driver)
    assert count == 0, said
    assert "every output was written" in said


@pytest.mark.parametrize(("program", "heads"), (PROGRAMS | BLOCKED).items(), ids=map(name_of, PROGRAMS | BLOCKED))
def test_the_matrix_state_kernels_do_not_race(program: Program, heads: int, compiled: Compile) -> None:
    """In one order of the warps: the detector finds a race in either."""
    count, said = races(compile_driver(compiled, program, heads, steps_of(program)))
    assert count == 0, said
    assert "every output was written" in said


def changed(program: Program, file: str, changes: Sequence[tuple[str, str]], folder: Path) -> Program:
    """`program` with other text in one of its files, whose folder is copied."""
    whole = program.extension
    old = next(p for f in (*whole.include, whole.binding.parent) for p in f.rglob(file))
    top = old.parent if whole.binding.parent == old.parent else old.parents[1]
    copied = Path(shutil.copytree(top, folder / "changed"))
    text = old.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (copied / old.relative_to(top)).write_text(text)
    include = tuple(copied if f == top else f for f in whole.include)
    binding = copied / whole.binding.name if top == whole.binding.parent else whole.binding
    return replace(program, extension=replace(whole, name=f"{whole.name}_changed", include=include, binding=binding))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_barrier_or_a_buffer_too_few_is_found(name: str, compiled: Compile, tmp_path: Path) -> None:
    program, file, *changes = MUTATIONS[name]
    driver = compile_driver(compiled, changed(program, file, changes, tmp_path), 1, steps_of(program))
    count, said = races(driver)
    assert count > 0, said
