"""The causal convolution: its GPU source on emulated threads, and on a GPU, against the sum written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from elman_authors import grids
from elman_authors.testing.kernel import need_gpu, need_host_compiler

from elman_core.kernels.causal_conv import native, op
from elman_core.kernels.causal_conv.portable import reference
from elman_core.kernels.causal_conv.spec import first_use
from elman_core.kernels.spec import Case, KernelSpec
from elman_core.kernels.verify import failures, verify
from elman_core.registry import KernelError

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture
def emulated() -> KernelSpec:
    """The kernel's spec. Its operator is emulated for tensors of the processor."""
    need_host_compiler()
    return op.Kernel().spec()


@pytest.mark.parametrize("late", [False, True], ids=["copies-at-once", "copies-as-late-as-they-may-be"])
@pytest.mark.parametrize(("taps", "dtype"), [(4, bf16), (4, f32), (2, f16), (7, bf16), (12, f32)], ids=str)
def test_the_gpu_source_equals_the_sum(
    taps: int, dtype: torch.dtype, late: bool, emulated: KernelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        monkeypatch.setenv("EMULATED_BACKWARDS", "1")
    more = [
        ((1, 2, 64), {"masked": True}),
        ((18, 5, 40), {"bare": True}),
        ((33, 3, 40), {"strided": True, "options": {"silu": True}}),
    ]
    sizes = [Case(dict(zip("TBCK", (*of, taps), strict=True)), dtype, **special) for of, special in more]
    cases = [*first_use(dtype, taps), *(replace(c, options={"bias": True, **c.options}) for c in sizes)]
    report = verify(emulated, "emulated", cases=cases, opcheck=(taps, late) == (4, False))
    assert report.passed, list(failures(report))


@pytest.mark.parametrize("windowed", [False, True], ids=["no-window", "window"])
@pytest.mark.parametrize("taps", [4, 7])
def test_padding_longer_than_a_chunk_is_skipped_on_both_sides(taps: int, windowed: bool, emulated: KernelSpec) -> None:
    x, weight = torch.randn(510, 3, 24), torch.randn(24, taps)
    window = torch.randn(3, taps - 1, 24) if windowed else None
    mask = torch.zeros(510, 3, dtype=torch.bool)
    mask[170:177] = mask[215:218] = mask[3, 1] = mask[460:462, 1] = mask[140:150, 2] = True
    starts = torch.zeros_like(mask)
    starts[200] = starts[300, 0] = True  # in padding; the second one with nothing but padding behind it
    starts[145, 2] = True
    for given in (None, starts):
        results = []
        for run in (lambda *given: op._op(*given, "cuda"), lambda *given: op._op(*given, "cpu"), reference):
            leaves = [p.clone().requires_grad_() for p in (x, weight, window) if p is not None]
            y, last = run(*leaves[:2], None, *(leaves[2:] or [None]), mask, given, True)
            y = y * mask[..., None]
            results.append((y, last, *torch.autograd.grad(y.sin().sum() + (last + 1).sin().sum(), leaves)))
        for found, on_cpu, right in zip(*results, strict=True):
            torch.testing.assert_close(found, right)
            torch.testing.assert_close(on_cpu, right)


def test_a_step_of_decoding_may_write_its_window_in_place_and_says_what_is_missing(emulated: KernelSpec) -> None:
    module = native.module(bf16, 4, "cuda", -1)
    x, weight, window = torch.randn(1, 3, 40).to(bf16), torch.randn(40, 4), torch.randn(3, 3, 40)
    given = {"x": x, "weight": weight, "window": window, "y": torch.empty_like(x)}
    wanted = torch.cat((window[:, 1:], x.float().transpose(0, 1)), 1)
    module.run("forward", **given, last=window)
    torch.testing.assert_close(window, wanted)
    for direction, changed, said in (
        ("forward", {"weight": None}, "weight is missing"),
        ("backward", {}, "dy is missing"),
        ("forward", {"weight": weight[:3]}, r"weight must be \(40, K\), not \(3, 4\)"),
        ("forward", {"bias": torch.ones(40).bfloat16()}, "bias has the wrong dtype, torch.bfloat16"),
    ):
        with pytest.raises(KernelError, match=said):
            module.run(direction, **{**given, **changed})


def test_compiled_and_recomputed_it_gives_the_same_gradients(emulated: KernelSpec) -> None:
    x, weight = torch.randn(9, 3, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)

    def loss(x: Any, weight: Any) -> Any:
        y, last = op._op(x, weight, None, None, None, None, True, "cuda")
        return (y * y).sum() + last.sum()

    checkpointed: Callable[..., Any] = torch.utils.checkpoint.checkpoint
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    wanted = torch.autograd.grad(loss(x, weight), (x, weight))
    for made in (compiled(x, weight), checkpointed(loss, x, weight, use_reentrant=False)):
        for found, right in zip(torch.autograd.grad(made, (x, weight)), wanted, strict=True):
            torch.testing.assert_close(found, right)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(loss(x, weight), x, create_graph=True)


def test_auto_takes_every_layout_of_x_and_every_dtype_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    need_host_compiler()
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    monkeypatch.setattr(op.dispatch, "pays", lambda *_: True)
    draw = torch.Generator().manual_seed(0)
    apart = torch.randn(20, 8, 3, generator=draw).transpose(1, 2)
    overlapping = apart.flatten().as_strided(apart.shape, (1, 60, 1))
    for x in (
        apart,
        apart.contiguous(),
        apart[:, :1].expand(20, 3, 8),
        apart[:, :, 1:2],
        apart.transpose(0, 1),
        overlapping,
    ):
        for dtype in (f32, torch.float64):
            given = (
                x.detach().requires_grad_(),
                torch.randn(x.shape[2], 4, generator=draw, dtype=dtype).requires_grad_(),
            )
            results = []
            for y, last in (op.causal_conv(*given), reference(*given, None, None, None, None, False)):
                results.append((y, last, *torch.autograd.grad(y.square().sum() + last.sum(), given)))
            for made, wanted in zip(*results, strict=True):
                torch.testing.assert_close(made, wanted)


def test_taps_without_a_kernel_are_refused() -> None:
    with pytest.raises(KernelError, match="2 to 64 taps, not 65"):
        native.extension(taps=65)


@pytest.mark.gpu
def test_a_gpu_equals_the_sum() -> None:
    need_gpu()
    report = grids.verify(op.Kernel().spec(), "cuda")
    assert report.passed, list(failures(report))
