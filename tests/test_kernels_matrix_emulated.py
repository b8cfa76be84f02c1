"""The GPU source of the matrix-state kernels on the processor, by emulated threads (emulated_gpu/), within verify's limits.

It shows which lane holds what and which fragment goes where, for every launch plan. Not their time, not a GPU's own tanh, and
no race that only threads at the same time would have.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from elman_core.kernels import matrix_native, matrix_plan, matrix_state, toolchain
from elman_core.kernels.matrix_build import Maps, Size
from elman_core.kernels.matrix_spec import case
from elman_core.kernels.spec import Case
from elman_core.kernels.verify import failures, verify
from elman_core.testing.kernel import need_host_compiler

matrix = pytest.importorskip("elman_e88.op").matrix
HERE = Path(__file__).parent
FUSED, GATED = str(Maps(True, True, "mamba", "given")), str(Maps(True, True, "mamba", "sigmoid"))
bf16 = torch.bfloat16
EVERY = [
    case((1, 33, 3, 16, 16), bf16),
    case((1, 18, 1, 32, 24), bf16, maps=GATED, write=True, masked=True),
]
ODD = [case((1, 17, 1, rows, 11), bf16, linear=rows == 8, maps=FUSED, bare=True) for rows in (8, 24)]
HALF = [case((1, 18, 1, 16, 16), torch.float16, maps=FUSED)]
PLAIN = [
    case((1, 18, 2, 32, 20), torch.float32, write=True, masked=True),
    case((1, 17, 1, 64, 72), bf16),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`load` of the op: g++ with the emulation's headers before CUDA's."""
    need_host_compiler()
    folder = tmp_path_factory.mktemp("emulated")

    @cache
    def load(kernel: Any, target: str, size: Size) -> Any:
        extension = kernel.extension_for("cuda", size)
        made = folder / f"{extension.name}.so"
        command = [str(toolchain.find_host_compiler()), "-x", "c++", "-std=c++17", "-O1", "-fPIC", "-shared"]
        command += ["-fvisibility=hidden", "-Wno-unknown-pragmas", f"-I{HERE / 'emulated_gpu'}"]
        command += [f"-I{folder}" for folder in extension.include]
        command += [f"-D{name}={value}" for name, value in extension.defines]
        command += [f'-DELMAN_CELL_HEADER="{extension.header}"', str(extension.binding), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return matrix_native.open_library(made)

    return load


def emulated_spec() -> Any:
    """The kernel's spec with a back end "emulated": the op as on a GPU, on tensors of the processor."""
    spec = matrix.spec()

    def call(backend: str, inputs: Any, options: Any) -> Any:
        if backend != "emulated":
            return spec.call(backend, inputs, options)
        operator, arguments = spec.op("cuda", inputs, options)
        o, state, _ = operator(*arguments)
        return {"o": o, "S": state}

    return replace(spec, call=call, portable=("emulated",))


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        *product(matrix_plan.PLANS, EVERY),
        *product(matrix_plan.PLANS, ODD),
        *product(matrix_plan.PLANS, HALF),
    ],
    ids=str,
)
def test_every_plan_equals_the_float64_reference(
    plan: str, problem: Case, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_state, "_load", compiled)
    asked = replace(problem, options={**problem.options, "plan": plan})
    report = verify(emulated_spec(), "emulated", cases=[asked], opcheck=False)
    assert report.passed, "\n".join(failures(report))


@pytest.mark.parametrize("problem", PLAIN, ids=str)
def test_what_does_without_tensor_cores_equals_the_float64_reference(
    problem: Case, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_state, "_load", compiled)
    report = verify(emulated_spec(), "emulated", cases=[problem], opcheck=False)
    assert report.passed, "\n".join(failures(report))
