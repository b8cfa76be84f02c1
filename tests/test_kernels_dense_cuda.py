"""What Python does around a dense launch, without a GPU: the host build of the cell stands in, by the same interface."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
from gated_cells import make_both

from elman_core.kernels import build
from elman_core.kernels.dense import cuda as dense_cuda
from elman_core.kernels.dense import host as dense_host
from elman_core.kernels.dense import native as dense_native
from elman_core.kernels.dense.plan import Plan
from elman_core.testing.kernel import need_host_compiler

T, B, D = 6, 3, 16


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return make_both(tmp_path_factory.mktemp("gates"))


@pytest.fixture
def no_gpu(monkeypatch):
    """A launch plan for everything, and a stream and a device that do nothing."""
    need_host_compiler()
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(dense_cuda, "error_word", lambda _: 0)
    monkeypatch.setattr(dense_cuda, "plan_for", lambda *_: Plan("grid", rows=8, groups=1))

    def library(cell, _plan, dtype, _width):
        extension = dense_native.extension(cell, "host")
        made = dense_native.open_library(build.build(extension, build.local_arch(extension)), cell)
        short = str(dtype).removeprefix("torch.")
        return types.SimpleNamespace(
            elman_dense_forward=getattr(made, f"elman_dense_forward_{short}"),
            elman_dense_backward=getattr(made, f"elman_dense_backward_{short}"),
        )

    monkeypatch.setattr(dense_cuda, "_library", library)


def problem(cell, masked):
    draw = torch.Generator().manual_seed(0)
    shapes = [(T, B, D)] * (1 + len(cell.extras)) + [(D, D), (B, D), (T, B, D), (B, D)]
    u, *extras, w, h0, gy, g_last = (torch.randn(s, generator=draw) / (4 if s == (D, D) else 1) for s in shapes)
    mask = torch.rand(T, B, generator=draw) > 0.3 if masked else None
    return (u.transpose(0, 1).contiguous().transpose(0, 1), extras, w, h0, mask), (gy, g_last)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["given", "found", "e1", "e42"])
def test_a_launch_is_given_and_gives_what_the_host_build_does(no_gpu, kernels, name, masked):
    cell = (kernels[name] if name in kernels else pytest.importorskip(f"elman_{name}.op").__dict__[name]).cell
    (u, extras, w, h0, mask), (gy, g_last) = problem(cell, masked)
    y, last, history, multiplied, a = dense_cuda.forward(cell, u, extras, w, h0, mask)
    expected = dense_host.forward(cell, u, extras, w, h0, mask)
    for mine, theirs in zip((y, last, history, a), expected, strict=True):
        assert torch.equal(mine, theirs)
    assert multiplied is history
    assert a.shape == ((T, B, D) if name == "given" else (0,))
    da, dextras, dh0, dx, db = dense_cuda.backward(cell, gy, g_last, extras, w, history, a, mask)
    made = dense_host.backward(cell, gy, g_last, extras, w, history, a, mask)
    for mine, theirs in zip((da, *dextras, dh0), (made[0], *made[1], made[2]), strict=True):
        assert torch.equal(mine, theirs)
    assert dx is None
    assert db is None
