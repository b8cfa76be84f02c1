"""E23's kernels on emulated clusters of blocks: the code that a GPU runs, on any machine."""

import pytest
import torch
from elman_authors.testing.kernel import need_host_compiler
from elman_e23 import op

from elman_core.kernels import Case, KernelError
from elman_core.kernels.verify import failures, verify


@pytest.mark.parametrize(
    ("case", "backwards"), [(case, i != 1) for i, case in enumerate(op.KERNEL.spec().emulated)], ids=str
)
def test_the_gpu_source_equals_the_reference(case: Case, backwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    need_host_compiler()
    if backwards:  # the last warps and blocks ahead
        monkeypatch.setenv("EMULATED_BACKWARDS", "1")
    report = verify(op.KERNEL.spec(), "emulated", cases=[case], opcheck=not backwards)
    assert report.passed, "\n".join(failures(report))


def test_more_rows_than_clusters_of_a_grid_are_refused() -> None:
    need_host_compiler()
    assert op._prepared(torch.float32, 65535 * 8, 96, None, False)[1] == 8
    with pytest.raises(KernelError, match="takes B up to 524280, not 524281"):
        op._prepared(torch.float32, 65535 * 8 + 1, 96, None, False)
