"""The dense kernels on a GPU: they do not hang, they say what went wrong, a CUDA graph holds them, and plans tell the truth.

Their numbers are the business of `elman verify` and of the plugins' contracts; races and overruns of test_kernels_sanitized.py.
"""

import ctypes
import importlib.util
from dataclasses import replace
from math import ceil
from pathlib import Path
from time import monotonic

import pytest
import torch

from elman_core.kernels import build, launch
from elman_core.kernels.dense import native as dense_run
from elman_core.kernels.dense.plan import plan, shared_bytes
from elman_core.kernels.dense.spec import FAMILY
from elman_core.registry.errors import KernelError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("elman_e42") is None, reason="elman-e42 is not installed"),
]
T, D = 64, 1536  # wide enough for the grid exchange, where blocks wait for each other through memory


@pytest.fixture(autouse=True)
def kernels_are_required(monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "require")


@pytest.fixture
def kernel():
    from elman_e42.op import e42 as dense

    return dense


@pytest.fixture
def faults(kernel):
    """The functions of dense_gpu_faults.cu, compiled with the cell."""
    bare = dense_run.extension(kernel.cell, replace(grid_plan(), spill=0), torch.bfloat16, D)
    source = replace(
        bare,
        name="dense_gpu_faults",
        binding=Path(__file__).with_name("dense_gpu_faults.cu"),
        include=(*bare.include, bare.binding.parent),
    )
    library = ctypes.CDLL(str(build.build(source, build.local_arch(source))))
    library.hold.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
    return library


def grid_plan(batch: int = 8):
    return plan((T, batch, D), torch.bfloat16, dense_run._device(0))


def problem(batch: int = 8, width: int = D, dtype: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    u = torch.randn(T, batch, width, generator=generator).to("cuda", dtype)
    w = (torch.randn(width, width, generator=generator) * (0.45 / width**0.5)).to("cuda", dtype)
    return u, w, torch.randn(batch, width, generator=generator).cuda()


def hold_half(faults, seconds: float, stream: torch.cuda.Stream) -> None:
    device = dense_run._device(0)
    status = faults.hold(device.processors // 2, device.shared_bytes, int(seconds * 1e9), stream.cuda_stream)
    assert status == 0


@pytest.mark.parametrize("seconds", [0.3, 3.0], ids=["shorter than the timeout", "longer than the timeout"])
def test_another_kernel_on_half_the_multiprocessors_delays_but_never_hangs_or_corrupts(kernel, faults, seconds):
    inputs = problem(32)
    expected = [x.clone() for x in kernel(*inputs, backend="cuda")]
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    hold_half(faults, seconds, other)
    start = monotonic()
    outputs = kernel(*inputs, backend="cuda")
    torch.cuda.synchronize()
    assert monotonic() - start < seconds + 2 * dense_run.TIMEOUT_NS * 1e-9 + 5
    try:
        dense_run.check_errors(torch.device("cuda", 0))
    except KernelError:
        assert seconds * 1e9 > dense_run.TIMEOUT_NS
    else:
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_a_block_that_never_runs_ends_in_an_error_and_in_nan_outputs(kernel, faults):
    u, w, h0 = problem()
    chosen = grid_plan()
    history, y, last = u.new_empty(T + 1, *u.shape[1:]), torch.empty_like(u), torch.empty_like(h0)
    module = launch.opened(dense_run.extension(kernel.cell, chosen, u.dtype, D), FAMILY)
    call = module.call(
        u=u, w=w, history=history, y=y, h0=h0, last=last, error=dense_run.error_word(u.device), stream=launch.stream(u),
        rows=chosen.rows, groups=chosen.groups, delay=chosen.delay, timeout_ns=200_000_000,
    )  # fmt: skip
    start = monotonic()
    assert faults.forward_with_a_block_missing(ctypes.c_void_p(call.address)) == 0
    torch.cuda.synchronize()
    assert monotonic() - start < 5
    assert last[:, : D // 2].isnan().all()
    with pytest.raises(KernelError, match="timed out waiting"):
        kernel(u, w, h0, backend="cuda")
    y, _ = kernel(u, w, h0, backend="cuda")  # the error is told once, and the kernel goes on working
    assert y.isfinite().all()


def test_a_grid_that_cannot_be_resident_is_refused_before_launch(kernel, monkeypatch):
    u, w, h0 = problem(128)
    too_many = replace(grid_plan(), rows=8, groups=16)
    module = launch.opened(dense_run.extension(kernel.cell, too_many, u.dtype, D), FAMILY)
    monkeypatch.setattr(dense_run, "ready", lambda *_: (module, too_many))
    with pytest.raises(KernelError, match="needs 16 groups of 24 blocks on the GPU together, and this GPU holds"):
        kernel(u, w, h0, backend="cuda")
    torch.cuda.synchronize()


@pytest.mark.parametrize("width", [512, D, 2064], ids=["cluster", "grid", "steps"])
def test_a_cuda_graph_replays_forward_and_backward(kernel, width):
    u, w, h0 = (x.requires_grad_() for x in problem(16, width))
    weights = torch.randn_like(u)

    def run():
        y, last = kernel(u, w, h0, backend="cuda")
        return y, last, *torch.autograd.grad((y, last), (u, w, h0), (weights, torch.ones_like(last)))

    replays_equal(run)


@pytest.mark.parametrize("width", [512, D, 2064], ids=["cluster", "grid", "steps"])
def test_tied_weights_are_the_product_and_the_kernel_and_a_cuda_graph_replays_them(kernel, width):
    from elman_e42.op import e42

    x, w, h0 = problem(16, width)
    leaves = [t.requires_grad_() for t in (x, w, torch.randn(width, device="cuda", dtype=w.dtype), h0)]
    weights = torch.randn_like(x)

    def run(backend):
        x, w, b, h0 = leaves
        y, last = e42(x, w, h0, v=w, b=b, silu=True, backend=backend)
        return y, last, *torch.autograd.grad((y, last), leaves, (weights, torch.ones_like(last)))

    for found, expected in zip(run("cuda"), run("torch"), strict=True):
        assert float((found - expected).norm() / expected.norm()) < 2e-2
    kind = dense_run.plan_for(e42._tied.cell, 16, width, x.dtype, 0).kind
    assert (kind == "steps") == (width == 2064)
    replays_equal(lambda: run("cuda"))


def replays_equal(run):
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        expected = [x.detach().clone() for x in run()]
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for x in outputs:
        x.detach().fill_(float("nan"))
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a.detach(), b) for a, b in zip(outputs, expected, strict=True))


def test_nan_in_the_input_comes_out_as_nan_in_its_batch_row_alone(kernel):
    for width in (512, D):
        u, w, h0 = problem(16, width)
        u[5, 3, 7] = float("nan")
        y, last = kernel(u, w, h0, backend="cuda")
        assert y[:5].isfinite().all()
        assert last[3].isnan().all()
        assert last[torch.arange(16, device="cuda") != 3].isfinite().all()
    dense_run.check_errors(torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "width"), [(32, 512), (32, 1024), (32, D), (64, D), (300, 1280)])
def test_the_plan_knows_the_shared_memory_and_what_fits(kernel, dtype, batch, width):
    chosen = dense_run.plan_for(kernel.cell, batch, width, dtype, 0)
    fit, bytes_there = dense_run.capacity(kernel.cell, chosen, dtype, width, chosen.tiles_each(batch))
    assert bytes_there == shared_bytes(chosen, ceil(width / 256), 4 // dtype.itemsize, batch)
    assert fit >= (1 if chosen.kind == "cluster" else chosen.groups)


def test_a_device_that_does_not_hold_a_plan_gets_the_next_one(kernel, monkeypatch):
    u, w, h0 = problem(7, 480)
    expected, _ = kernel(u, w, h0, backend="cuda")
    really, refused = dense_run.capacity, []

    def capacity(kernel, chosen, *rest):
        if chosen.kind in refused:
            return 0, 0
        return really(kernel, chosen, *rest)

    monkeypatch.setattr(dense_run, "capacity", capacity)
    for kind in ("cluster", "grid", "steps"):
        dense_run.plan_for.cache_clear()
        dense_run.ready.cache_clear()
        assert dense_run.plan_for(kernel.cell, *u.shape[1:], u.dtype, 0).kind == kind
        y, _ = kernel(u, w, h0, backend="cuda")
        torch.testing.assert_close(y, expected, rtol=0.05, atol=0.02)
        refused.append(kind)
    dense_run.plan_for.cache_clear()
    dense_run.ready.cache_clear()


def test_an_unsupported_width_is_refused_before_launch(kernel):
    u, w, h0 = problem(4, 24)
    with pytest.raises(KernelError, match="multiples of 16"):
        kernel(u, w, h0, backend="cuda")
