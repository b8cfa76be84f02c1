"""Row recurrences: their GPU source on emulated threads against float64, and what is refused."""

from __future__ import annotations

import pytest
import torch
from elman_authors.testing.kernel import need_host_compiler

from elman_core.kernels.rows import native
from elman_core.kernels.rows.spec import case
from elman_core.kernels.spec import Case
from elman_core.kernels.verify import failures, verify
from elman_core.registry import ConfigError, KernelError

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
    problem: Case, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_host_compiler()
    if late:
        monkeypatch.setenv("EMULATED_BACKWARDS", "1")
    report = verify(kernel.spec(), "emulated", cases=[problem], opcheck=problem is PROBLEMS[0])
    assert report.passed, "\n".join(failures(report))


@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_what_is_not_finite_stays_behind_its_step_and_in_its_document(
    dtype: torch.dtype,
) -> None:
    need_host_compiler()
    # All within the eight steps from 8, which are multiplied at once. A document begins at `ends`.
    bad, ends, T = 9, 12, 24
    inputs = kernel.spec().make_inputs(case((1, T, 1, 16, 16), dtype, packed=True), torch.Generator().manual_seed(1))
    inputs["starts"] = torch.arange(T)[None] == ends
    given, state, marks = list(inputs.values())[:5], inputs["S0"], [inputs["mask"], inputs["starts"]]
    dy = torch.ones_like(given[2])

    def run(dy: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
        o, last, saved = kernel.op(*given, state, *marks, True, "cuda")
        backward = torch.ops.elman.rows_m2rnn_backward
        dq, dk, dv, df, *_ = backward(dy, torch.zeros_like(last), *given, *marks, saved, "cuda")
        return [o, dq, dk, dv, df]

    expected = run(dy, *given)
    assert all(x.isfinite().all() for x in expected)
    for where in range(5):  # q, k, v, f; dy
        for value in (float("nan"), float("inf")):
            changed = [x.clone() for x in (*given[:4], dy)]
            changed[where][0, bad, 0, ...] = value
            made = run(changed[4], *changed[:4], given[4])
            assert not all(x.isfinite().all() for x in made)
            for x, y in zip(made, expected, strict=True):
                assert torch.equal(x[:, ends:], y[:, ends:])
            for x, y in zip(made[:2], expected, strict=False):
                assert torch.equal(x[:, :bad], y[:, :bad])
            if where == 4:
                assert torch.equal(made[0], expected[0])


def test_sizes_without_a_kernel_and_odd_numbers_of_heads_are_refused() -> None:
    for dtype, K, V in ((bf16, 8, 16), (bf16, 16, 48), (bf16, 48, 32), (torch.float32, 16, 16)):
        with pytest.raises(KernelError, match=f"no kernel for K={K} V={V}"):
            native.extension("m2rnn", dtype, K, V)
    x = torch.zeros(1, 2, 2, 4)
    with pytest.raises(ConfigError, match="q and k have 2 heads beside v with 3"):
        kernel(x, x, torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3), torch.zeros(3, 4, 4))
