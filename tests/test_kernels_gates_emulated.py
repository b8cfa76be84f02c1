"""Gated kernels on an emulated GPU: the code that a GPU runs, with its exchanges between blocks, on any machine."""

import pytest
import torch
from elman_authors.testing.kernel import need_host_compiler

from elman_core.kernels import Case, GatesKernel
from elman_core.kernels.dense.plan import Device
from elman_core.kernels.gates import native
from elman_core.kernels.verify import failures, verify

rnn = pytest.importorskip("elman_baselines.rnn.op")


@pytest.mark.parametrize(
    "kernel", [rnn.lstm_gates, rnn.gru_gates, rnn.gru_before_gates, rnn.slstm_gates], ids=lambda k: k.name
)
def test_the_gpu_source_equals_the_reference_with_the_last_blocks_ahead(
    kernel: GatesKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_host_compiler()
    monkeypatch.setenv("EMULATED_BACKWARDS", "1")
    few = kernel.spec().emulated[:: 2 if kernel.cell.inner else 1]
    report = verify(kernel.spec(), "emulated", cases=few, opcheck=False)
    assert report.passed, "\n".join(failures(report))
    monkeypatch.setattr(native, "settled", native.settled.__wrapped__)
    monkeypatch.setattr(native, "_device", lambda _: Device(9, 227 << 10, (9, 0)))  # holds two groups of blocks
    case = Case.of("TBd", (3, 43, 64), torch.bfloat16)  # of eleven rows each, in two launches
    report = verify(kernel.spec(), "emulated", cases=[case], opcheck=False)
    assert report.passed, "\n".join(failures(report))
