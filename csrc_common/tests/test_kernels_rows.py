"""Row recurrences: their GPU source on emulated threads against float64, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import LIBRARY, compile_emulated

from elman_core.kernels import rows
from elman_core.kernels.launch import open_module
from elman_core.kernels.rows import case
from elman_core.kernels.spec import Case
from elman_core.kernels.verify import failures, verify
from elman_core.registry import ConfigError, KernelError
from elman_core.testing.kernel import need_host_compiler

kernel = pytest.importorskip("elman_m2rnn.op").m2rnn
bf16, f16 = torch.bfloat16, torch.float16
PROBLEMS = [
    case((2, 35, 2, 16, 16), bf16, masked=True, packed=True),
    case((1, 17, 2, 64, 16), bf16, shared=True),
    case((1, 18, 1, 32, 32), bf16, strided=True),
    case((1, 1, 3, 16, 16), f16, bare=True),
    case((1, 34, 1, 16, 32), f16, masked=True, packed=True),
]


@pytest.mark.parametrize("late", [False, True], ids=["copies-at-once", "copies-as-late-as-they-may-be"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_gpu_source_equals_the_float64_reference(
    problem: Case, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_host_compiler()
    if late:
        monkeypatch.setenv("EMULATED_BACKWARDS", "1")

    def module(*what: Any) -> Any:
        given, path = rows.extension(*what[:-1]), tmp_path / "made.so"
        if not path.exists():
            compile_emulated(given, given.binding, path, *LIBRARY)
        return open_module(path, "rows")

    monkeypatch.setattr(rows, "_module", module)
    spec = kernel.spec()

    def call(backend: str, inputs: Any, options: Any) -> Any:
        if backend == "reference":
            return spec.call(backend, inputs, options)
        operator, arguments = spec.op("cuda", inputs, options)  # type: ignore[misc]
        return dict(zip(("o", "S"), operator(*arguments), strict=False))

    report = verify(
        replace(spec, call=call, portable=("emulated",)), "emulated", cases=[problem], opcheck=problem is PROBLEMS[0]
    )
    assert report.passed, "\n".join(failures(report))


def test_sizes_without_a_kernel_and_odd_numbers_of_heads_are_refused() -> None:
    for dtype, K, V in ((bf16, 8, 16), (bf16, 16, 48), (bf16, 48, 32), (torch.float32, 16, 16)):
        with pytest.raises(KernelError, match=f"no kernel for K={K} V={V}"):
            rows.extension("m2rnn", dtype, K, V)
    x = torch.zeros(1, 2, 2, 4)
    with pytest.raises(ConfigError, match="q and k have 2 heads beside v with 3"):
        kernel(x, x, torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3), torch.zeros(3, 4, 4))
