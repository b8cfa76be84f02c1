"""E23's kernels on emulated clusters of blocks: the code that a GPU runs, on any machine."""

import pytest
from elman_e23.op import KERNEL

from elman_core.kernels.verify import failures, verify
from elman_core.testing.kernel import need_host_compiler


@pytest.mark.parametrize("backwards", [False, True])
def test_the_gpu_source_equals_the_reference(backwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    need_host_compiler()
    if backwards:  # the last warps and blocks ahead
        monkeypatch.setenv("EMULATED_BACKWARDS", "1")
    report = verify(KERNEL.spec(), "emulated")
    assert report.passed, "\n".join(failures(report))
