"""The op of gated cells, by the baselines' LSTM and GRU: gradients, compilation, plans, refusals."""

from __future__ import annotations

import pytest
import torch
from torch.func import jvp
from torch.utils.checkpoint import checkpoint

from elman_core.kernels import GatesKernel
from elman_core.kernels.gates.native import rows_of
from elman_core.registry import ConfigError, KernelError
from elman_core.testing.kernel import need_host_compiler

rnn = pytest.importorskip("elman_baselines.rnn.op")
T, B, D = 4, 2, 3
KERNELS = pytest.mark.parametrize("kernel", [rnn.gru_gates, rnn.lstm_gates], ids=["gru", "lstm"])


def inputs(kernel, dtype=torch.float32):
    """u, w, b and the states."""
    generator = torch.Generator().manual_seed(0)
    gates = kernel.cell.gates * D
    shapes = [(T, B, gates), (gates, D), (gates,), *[(B, D)] * len(kernel.cell.states)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


@KERNELS
@pytest.mark.parametrize("backend", ["torch", "host"])
def test_without_a_bias_it_is_the_reference(kernel, backend):
    need_host_compiler()
    u, w, _, *states = inputs(kernel, torch.float64)
    found = []
    for way in (backend, "reference"):
        outputs = kernel(u, w, None, *states, backend=way)
        found.append([*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), [u, w, *states])])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


@KERNELS
def test_compiled_and_recomputed_it_gives_the_same_gradients(kernel):
    def loss(*given):
        y, *states = kernel(*given)
        return (y * y).sum() + sum(s.sum() for s in states)

    given = inputs(kernel)
    wanted = torch.autograd.grad(loss(*given), given)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for made in (compiled(*given), checkpoint(loss, *given, use_reentrant=False)):
        for x, y in zip(torch.autograd.grad(made, given), wanted, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("batch", "groups", "rows"), [(32, 2, 16), (32, 4, 8), (3, 4, 1), (70, 4, 9), (33, 2, 9), (1, 2, 1)]
)
def test_rows_are_spread_over_as_few_launches_as_there_must_be(batch, groups, rows):
    found = rows_of(batch, groups)
    assert found == rows
    launches = -(-batch // (groups * 16))
    assert found <= 16
    assert found * groups * launches >= batch


def test_sizes_without_a_kernel_are_named(monkeypatch):
    cell, device = rnn.lstm_gates, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert cell.supports(device, torch.bfloat16, 1024)
    assert not cell.supports(torch.device("cpu"), torch.bfloat16, 1024)
    for dtype, width, said in (
        (torch.float32, 512, "store bfloat16 and float16, not torch.float32"),
        (torch.bfloat16, 200, "multiples of 64 up to 1024, not 200"),
        (torch.float16, 1088, "multiples of 64 up to 1024, not 1088"),
    ):
        with pytest.raises(KernelError, match=said):
            cell.spec().builds("cuda", "sm_90", (width,), (dtype,))
        assert not cell.supports(device, dtype, width)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not cell.supports(device, torch.bfloat16, 1024)


def test_a_header_that_differs_from_python_is_refused():
    need_host_compiler()
    cell = rnn.gru_gates.cell
    wrong = GatesKernel(
        "gru_wrong", header=cell.header, cell=cell.type, step=cell.reference, gates=3, kept=3, splits=True
    )
    with pytest.raises(ConfigError, match="differ in gates, kept, memory or splits"):
        wrong(*inputs(wrong), backend="host")


def test_what_cannot_be_is_refused():
    kernel, given = rnn.lstm_gates, inputs(rnn.lstm_gates)
    with pytest.raises(ConfigError, match=r"lstm: c must be a tensor \(2, 3\), not None"):
        kernel(*given[:-1])
    with pytest.raises(ConfigError, match="u must be"):
        kernel(given[0][..., 1:], *given[1:])
    with pytest.raises(KernelError, match="takes no starts of documents"):
        kernel(*given, starts=torch.zeros(T, B, dtype=torch.bool), backend="host")
    y, *_ = kernel(*given)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), given[0], create_graph=True)
    y, _ = jvp(lambda u: kernel(u, *given[1:])[0], (given[0],), (given[0],))  # the reference
    torch.testing.assert_close(y, kernel(*given)[0])
