"""The kernels of a CPU: against float64, with starts of documents and masks, and when "auto" takes them."""

from __future__ import annotations

import pytest
import torch

from elman_core.kernels import dispatch
from elman_core.kernels.rows.spec import case as rows_case
from elman_core.kernels.verify import failures, verify
from elman_core.testing.kernel import need_host_compiler

m2rnn = pytest.importorskip("elman_m2rnn.op").m2rnn
PROBLEMS = [
    (m2rnn, rows_case((2, 35, 3, 12, 20), torch.float32, masked=True, packed=True)),
    (m2rnn, rows_case((1, 18, 1, 16, 16), torch.bfloat16, strided=True, shared=True)),
]


@pytest.mark.parametrize(("kernel", "problem"), PROBLEMS, ids=lambda x: getattr(x, "name", str(x)))
def test_a_kernel_of_a_cpu_equals_the_float64_reference(kernel, problem):
    need_host_compiler()
    report = verify(kernel.spec(), "cpu", cases=[problem])
    assert report.passed, "\n".join(failures(report))


def test_auto_takes_the_kernel_where_it_pays_whatever_the_batch(monkeypatch):
    need_host_compiler()
    monkeypatch.setattr(dispatch, "_decided", {})
    monkeypatch.setenv("ELMAN_VERIFY", "skip")
    monkeypatch.setenv("ELMAN_KERNELS", "auto")
    H, K, decided = 16, 16, dispatch._decided

    def run(B, T, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(4, T, H, K, generator=generator)[:B].to(dtype) for _ in range(3))
        return m2rnn(q, k, v, torch.full((B, T, H), 0.9), torch.eye(K).expand(H, K, K))[0]

    run(1, 63)
    assert not decided
    assert m2rnn.backend("cpu", K, K) == "cpu, compiled at its first use; reference for short texts"
    alone, together = run(1, 64), run(4, 64)
    assert list(decided.values()) == [True]
    assert m2rnn.backend("cpu", K, K) == "cpu"
    assert torch.equal(alone, together[:1])
    run(1, 64, torch.float16)
    assert len(decided) == 1
    monkeypatch.setenv("ELMAN_KERNELS", "off")
    torch.testing.assert_close(run(1, 64), alone)
    assert list(decided.values()) == [True, False]
