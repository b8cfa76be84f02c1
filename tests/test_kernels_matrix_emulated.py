"""The GPU source of the matrix-state kernels on the processor, by emulated threads, within verify's limits.

It shows which lane holds what and which fragment goes where. Not their time and not a GPU's own tanh;
of races between warps those that show when some run ahead of others as far as barriers let them (test_kernels_races.py: all).
"""

import re
import shutil
from pathlib import Path
from typing import Any

import elman_csrc
import pytest
import torch
from elman_authors.testing.kernel import need_host_compiler

from elman_core.kernels import build
from elman_core.kernels.matrix import native as matrix_native
from elman_core.kernels.matrix import spec as matrix_spec
from elman_core.kernels.matrix.problems import case
from elman_core.kernels.spec import Case
from elman_core.kernels.verify import failures, verify

matrix = pytest.importorskip("elman_e88.op").e88
FUSED: dict[str, Any] = {"maps": matrix.cell.maps[0], "fused": True}
GATED = FUSED | {"on": ("write",)}
bf16 = torch.bfloat16
EMULATED = build._EMULATED_FLAGS
PROBLEMS = [
    case((1, 49, 3, 16, 16), bf16),
    case((2, 35, 3, 16, 16), bf16, **GATED, masked=True, packed=True),
    case((1, 18, 1, 32, 24), bf16, **GATED, masked=True),
    case((1, 50, 2, 32, 32), bf16, **FUSED, packed=True),
    *(case((1, 17, 1, rows, 11), bf16, on=("linear_state",) * (rows == 8), **FUSED, bare=True) for rows in (8, 24)),
    case((1, 17, 1, 4, 260), bf16),  # more lines than a block takes
    case((1, 18, 1, 16, 16), torch.float16, **FUSED, packed=True),
    case((3, 1, 2, 4, 4), torch.float16, **FUSED),  # a single step, whose strides mean nothing
    case((1, 1, 2, 4, 4), torch.float16),  # two keys of four numbers: bf16 operands would be seen
    case((2, 31, 2, 8, 8), torch.float16, **GATED, masked=True),  # the terms of d A_log cancel
    # Without tensor cores, a head in two parts.
    case((1, 18, 2, 32, 44), torch.float32, on=("write",), masked=True, packed=True),
    case((1, 18, 1, 128, 4), torch.float32, masked=True, packed=True),  # the same with segments of 8 steps
    case((1, 17, 1, 64, 72), bf16, packed=True),  # large heads: states in shared memory, segments of 8 steps or of 4
    case((2, 22, 2, 48, 24), torch.float16, **GATED, masked=True),
    case((1, 18, 1, 128, 20), bf16, **FUSED, packed=True),
    case((1, 18, 2, 124, 3), bf16),  # a saved line that is no whole number of eight rows
    case((1, 9, 1, 36, 5), bf16, on=("linear_state",), bare=True),  # sixteen steps at once
    # More segments than there are places for.
    case((1, 101, 1, 52, 17), bf16, **(FUSED | {"on": ("linear_state", "write")}), masked=True, packed=True),
    case((2, 43, 2, 40, 24), bf16, maps=matrix.cell.maps[0], fused=True, on=("linear_state", "write"), masked=True),
    case((1, 32, 1, 64, 64), torch.float16, on=("linear_state",), packed=True),
    case((1, 37, 2, 64, 64), bf16, **(FUSED | {"on": ("linear_state", "write")})),
    case((1, 33, 1, 128, 20), bf16, **(FUSED | {"on": ("linear_state", "write")}), masked=True),
    case((1, 101, 1, 72, 132), bf16, **(FUSED | {"on": ("linear_state", "write")}), masked=True, packed=True),
    case((1, 50, 1, 128, 128), bf16, **(FUSED | {"on": ("linear_state", "write")}), packed=True),
]
SMALL = [  # where a block has 99 KB of shared memory
    case((1, 35, 3, 16, 16), bf16, **FUSED),
    case((1, 18, 1, 32, 32), bf16, **GATED, masked=True, packed=True),
    case((1, 18, 1, 64, 40), bf16),
    # Every second state is saved.
    case((2, 43, 2, 40, 24), bf16, **FUSED, on=("linear_state",), masked=True, packed=True),
    case((1, 18, 1, 72, 24), bf16, on=("linear_state",)),
]


@pytest.mark.parametrize(  # every second problem with the last warps ahead
    ("architecture", "problem", "backwards"),
    [(a, each, bool(i % 2)) for a, problems in ((900, PROBLEMS), (890, SMALL)) for i, each in enumerate(problems)],
    ids=str,
)
def test_the_gpu_source_equals_the_float64_reference(
    architecture: int, problem: Case, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_host_compiler()
    monkeypatch.setattr(matrix_native, "load", matrix_native.load.__wrapped__)  # each architecture has its own
    flags = [f"{flag.partition('=')[0]}={architecture}" if "CUDA_ARCH" in flag else flag for flag in EMULATED]
    monkeypatch.setattr(build, "_EMULATED_FLAGS", tuple(flags))
    monkeypatch.setattr(matrix_spec, "much_shared", lambda _: architecture == 900)
    if backwards:
        monkeypatch.setenv("EMULATED_BACKWARDS", "1")
    report = verify(matrix.spec(), "emulated", cases=[problem], opcheck=False)
    assert report.passed, "\n".join(failures(report))


@pytest.mark.parametrize(
    ("place", "planted"),
    [
        ("matrix_state_numbers.cuh", (("R % 8 == 0 && N % 8 == 0", "R % 8 == 0"), ("static_assert(N % VW == 0);", ""))),
        ("cuda_pipeline.h", (("piece_kq = largest_power(N * sz, 16)", "piece_kq = 16"),)),
    ],
    ids=["a typed pointer", "an instruction"],
)
def test_a_misaligned_address_is_a_fault_with_its_place(
    place: str, planted: tuple[tuple[str, str], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_host_compiler()
    shutil.copytree(elman_csrc.get_include(), tmp_path / "include")
    plan = tmp_path / "include/elman/matrix_state_plan.cuh"
    for sound, wrong in planted:
        assert sound in plan.read_text()
        plan.write_text(plan.read_text().replace(sound, wrong))
    monkeypatch.setattr(elman_csrc, "get_include", lambda: tmp_path / "include")
    monkeypatch.setattr(matrix_native, "load", matrix_native.load.__wrapped__)
    [fault] = verify(matrix.spec(), "emulated", cases=[case((1, 18, 2, 124, 3), bf16)], opcheck=False).faults
    assert re.search(
        rf"misaligned address 0x[0-9a-f]+: {place}:\d+ needs a multiple of 16 .*\(thread \d+ of block 0\)", fault
    )
