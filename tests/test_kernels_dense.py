"""The op of a dense cell: dtypes, autocast, fake tensors, compilation. That its numbers are right is the contract's matter."""

from collections.abc import Callable
from contextlib import nullcontext
from math import ceil
from typing import Any

import pytest
import torch
from elman_e1.op import e1 as e1_dense
from elman_e42.op import e42 as e42_dense
from torch import Tensor

from elman_core.kernels import DenseKernel, dispatch
from elman_core.kernels.dense import native, portable
from elman_core.kernels.dense.plan import Device, plan, shared_bytes
from elman_core.registry import ConfigError, KernelError

T, B, D = 6, 3, 8
both = pytest.mark.parametrize("kernel", [e1_dense, e42_dense], ids=lambda k: k.name)


def inputs(kernel: DenseKernel, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """u, extras, w, h0."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = [(T, B, D)] * (1 + len(kernel.cell.extras)) + [(D, D), (B, D)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    made[-2] *= 0.8 / D**0.5
    return [x.to(state if i == len(made) - 1 else dtype).requires_grad_() for i, x in enumerate(made)]


def gradients(function: Callable[..., Any], given: list[Tensor]) -> list[Tensor]:
    y, last = function(*given)
    return list(torch.autograd.grad((y.float() ** 2).sum() + last.sum(), given))


@pytest.mark.parametrize("what", ["readout", "update"])
def test_a_step_that_takes_other_arguments_is_refused_where_the_kernel_is_made(what):
    cell = {"header": e1_dense.cell.header, "reference": e1_dense.cell.reference, "readout": lambda h, _h_prev, _z: h}
    said = rf"^e999: {what}\(h, h_prev, z\): (too many|missing)"
    for wrong in (lambda h, _h_prev: h, lambda h, _h_prev, _z, _more: h):
        with pytest.raises(ConfigError, match=said):
            DenseKernel("e999", **cell | {what: wrong}, extras=("z",))


@both
def test_a_cpu_takes_plain_pytorch_and_never_the_test_instrument(kernel, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    monkeypatch.setattr(native, "source", lambda *_: pytest.fail("nothing may be compiled"))
    assert kernel.backend("cpu", D) == "torch, or cpu where that pays"
    made = kernel(*inputs(kernel))
    wanted = kernel(*inputs(kernel), backend="torch")
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


@both
def test_what_a_gpu_will_run_is_said_without_compiling(kernel, monkeypatch):
    monkeypatch.setattr(native, "source", lambda *_: pytest.fail("nothing may be compiled"))
    monkeypatch.delenv("ELMAN_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "_decided", {})
    assert kernel.backend("cuda:0", D) == "cuda, compiled at its first use"
    dispatch._decided[kernel.name, 0, torch.bfloat16, "auto", B, D, 1, False] = True
    assert kernel.backend("cuda:0", D) == "cuda"
    assert kernel.backend("cuda:1", D) == "cuda, compiled at its first use"
    monkeypatch.setenv("ELMAN_KERNELS", "off")
    assert kernel.backend("cuda:0", D) == "torch (ELMAN_KERNELS=off)"


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_results_have_the_dtypes_that_are_promised(kernel, dtype):
    state = torch.float64 if dtype == torch.float64 else torch.float32
    given = inputs(kernel, dtype)
    y, last = kernel(*given)
    assert (y.dtype, last.dtype) == (dtype, state)
    for x, g in zip(given, gradients(kernel, given), strict=True):
        assert (g.dtype, g.shape) == (x.dtype, x.shape)


@both
def test_16_bit_inputs_are_computed_in_float32(kernel):
    """The same rounded numbers, given in float32, give the same state to the last bit."""
    given = inputs(kernel, torch.bfloat16)
    y, last = kernel(*given)
    y32, last32 = kernel(*(x.float() for x in given))
    assert torch.equal(last, last32)
    assert torch.equal(y, y32.to(torch.bfloat16))


@both
def test_float32_weights_beside_16_bit_inputs_keep_their_gradient_in_float32(kernel):
    given = inputs(kernel, torch.bfloat16)
    given[-2] = given[-2].detach().float().requires_grad_()
    assert gradients(kernel, given)[-2].dtype == torch.float32


@both
def test_a_weight_that_wants_no_gradient_gets_none(kernel):
    given = inputs(kernel)
    given[-2] = given[-2].detach()
    y, _ = kernel(*given)
    y.sum().backward()
    assert given[-2].grad is None
    assert given[0].grad is not None


@both
def test_gradients_of_gradients_are_refused_with_the_way_out(kernel):
    given = inputs(kernel)
    y, _ = kernel(*given)
    with pytest.raises(NotImplementedError, match="backend='reference'"):
        torch.autograd.grad(y.sum(), given[0], create_graph=True)
    y, _ = kernel(*given, backend="reference")
    (first,) = torch.autograd.grad((y**2).sum(), given[0], create_graph=True)
    assert torch.autograd.grad(first.sum(), given[0])[0].abs().max() > 0


@both
def test_the_choice_of_a_kernel_is_a_constant_of_a_compiled_graph(kernel, monkeypatch):
    """What a GPU's tensors go through; here with kernels off, which needs no GPU."""
    monkeypatch.setenv("ELMAN_KERNELS", "off")
    monkeypatch.setattr(dispatch, "_decided", {})

    def choose(x: Tensor) -> Tensor:
        return x + (2 if dispatch.runs(kernel.name, x, int(x.shape[1]), int(x.shape[2])) else 1)

    x = torch.zeros(T, B, D)
    assert torch.equal(torch.compile(choose, fullgraph=True, backend="aot_eager")(x), x + 1)
    assert list(dispatch._decided) == [(kernel.name, None, torch.float32, "off", B, D)]


@both
def test_the_recurrence_is_one_operation_of_a_compiled_graph(kernel):
    """However long the sequence: a loop that a compiler unrolls costs minutes at T = 512."""
    seen = []

    def look(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.append([n.target for n in graph.graph.nodes if n.op == "call_function"])
        return graph

    torch.compile(lambda *a: kernel(*a), fullgraph=True, backend=look)(*inputs(kernel))
    [targets] = seen
    assert targets.count(kernel.op) == 1
    assert not {torch.addmm, torch.mm, torch.tanh} & set(targets)


def test_an_unknown_back_end_and_a_missing_tensor_are_named():
    with pytest.raises(ConfigError, match="backend must be auto, torch, cuda, host or reference, not 'fast'"):
        e42_dense(*inputs(e42_dense), backend="fast")
    with pytest.raises(ConfigError, match=r"e1 takes \(u, z, w, h0, mask=None, starts=None\), not 2 tensors"):
        e1_dense(*inputs(e1_dense)[:2])


def test_a_back_end_refuses_tensors_of_another_device():
    with pytest.raises(KernelError, match="backend 'cuda' cannot run on tensors on cpu"):
        e42_dense(*inputs(e42_dense), backend="cuda")


def test_an_empty_sequence_is_refused():
    u, w, h0 = inputs(e42_dense)
    with pytest.raises(ConfigError, match="every size at least 1"):
        e42_dense(u[:0], w, h0)
    with pytest.raises(ConfigError, match=r"u must be float64, .*not torch.int64"):
        e42_dense(u.long(), w, h0)


@pytest.mark.parametrize("places", [6, 7, 8, 20, 21])
def test_a_long_product_in_float32_is_a_sum_of_short_ones(places, monkeypatch):
    generator = torch.Generator().manual_seed(places)
    a, b = torch.randn(3, places, generator=generator), torch.randn(places, 4, generator=generator)
    monkeypatch.setattr(portable, "LONGEST_SUM", 7)
    taken = []
    monkeypatch.setattr(torch, "addmm", lambda c, x, y: taken.append(x.shape[1]) or c + x @ y)
    made = portable.product(a, b, torch.float32)
    torch.testing.assert_close(made, (a.double() @ b.double()).float())
    assert sum(taken) == max(0, places - 7)
    assert max(taken, default=0) <= 7


@both
@pytest.mark.parametrize("training", [True, False])
def test_a_size_is_verified_before_it_is_used_trained_or_not(kernel, training, monkeypatch):
    """With stand-ins for the GPU, the compiler and the checker."""
    asked = []
    monkeypatch.setattr(torch.cuda, "device", lambda _index: nullcontext())
    monkeypatch.setattr(type(dispatch._kernels[kernel.name]), "prepare", lambda *_: "a plan")
    monkeypatch.setattr(
        dispatch, "ensure_verified", lambda spec, cases, plan: asked.append((spec.name, *map(str, cases), plan))
    )
    monkeypatch.setattr(dispatch, "_decided", {})
    monkeypatch.delenv("ELMAN_KERNELS", raising=False)
    with torch.set_grad_enabled(training):
        like = torch.empty(0, dtype=torch.bfloat16)
        assert [dispatch.runs(kernel.name, like, B, D) for _ in range(2)] == [True, True]
    assert asked == [(kernel.name, f"T=64 B={B} d={D} bfloat16", "a plan")]


# launch plans: which shapes run how, on which device -----------------------------------------------------------------


H200 = Device(132, 232448, (9, 0))
A100 = Device(108, 166912, (8, 0))
SLICE = Device(16, 232448, (9, 0))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (16, 48, 64, 272, 512, 640, 768, 1024, 1280, 1536, 2048)


@pytest.mark.parametrize("device", [H200, A100, SLICE], ids=["h200", "a100", "slice"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_batch_row_is_in_exactly_one_tile_and_every_group_has_one(device, dtype):
    for width in WIDTHS:
        for batch in (1, 3, 8, 31, 32, 33, 64, 100, 256, 511, 512):
            found = plan((5, batch, width), dtype, device)
            if found.kind == "steps":
                continue
            tiles = ceil(batch / found.rows)
            assert 1 <= found.rows <= 8 * found.wide
            assert found.wide == 1 or (found.kind == "tiles" and dtype != torch.float32)
            assert 1 <= found.groups <= tiles
            assert found.kind == "tiles" or found.groups == tiles


@pytest.mark.parametrize("device", [H200, A100, SLICE], ids=["h200", "a100", "slice"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_that_wait_for_each_other_fit_on_the_device_together(device, dtype):
    for width in range(16, 4097, 16):
        for batch in (1, 32, 512):
            found = plan((5, batch, width), dtype, device)
            if found.kind in ("grid", "tiles"):
                assert found.groups * found.parts <= device.processors
            if found.kind == "cluster":
                assert found.parts <= 16
                assert device.capability >= (9, 0)
            if found.kind != "steps":
                assert shared_bytes(found, ceil(width / 256), 4 // dtype.itemsize, batch) <= device.shared_bytes


def test_the_plan_depends_on_the_sizes_alone_and_not_on_the_number_of_steps():
    for width in WIDTHS:
        assert plan((1, 32, width), torch.bfloat16, H200) == plan((65536, 32, width), torch.bfloat16, H200)


@pytest.mark.parametrize(
    ("width", "batch", "launch"),
    [
        (512, 32, "cluster: 11 groups of 8 blocks, tiles of 3 rows"),
        (768, 32, "cluster: 7 groups of 12 blocks, tiles of 5 rows"),
        (1024, 32, "cluster: 7 groups of 16 blocks, tiles of 5 rows"),
        (1024, 64, "grid: 8 groups of 16 blocks, tiles of 8 rows"),
        (1536, 64, "tiles: 5 groups of 24 blocks, tiles of 7 rows"),
        (1024, 256, "tiles: 8 groups of 16 blocks, tiles of 16 rows"),
    ],
)
def test_shapes_of_published_figures_keep_the_launches_that_were_measured(width, batch, launch):
    assert str(plan((512, batch, width), torch.bfloat16, H200)) == launch


def test_widths_that_do_not_fit_on_the_chip_run_step_by_step():
    assert plan((512, 32, 4096), torch.bfloat16, H200).kind == "steps"
    assert plan((512, 32, 2048), torch.bfloat16, Device(16, 232448, (9, 0))).kind == "steps"


def test_clusters_need_hopper():
    assert plan((512, 32, 512), torch.bfloat16, H200).kind == "cluster"
    assert plan((512, 32, 512), torch.bfloat16, A100).kind in ("grid", "tiles")


@pytest.mark.parametrize(
    ("sizes", "dtype", "device", "says"),
    [
        ((5, 2, 24), torch.bfloat16, H200, "multiples of 16 up to 4096, not 24"),
        ((5, 2, 4112), torch.bfloat16, H200, "multiples of 16 up to 4096, not 4112"),
        ((5, 2, 64), torch.float64, H200, "bfloat16, float16 or float32, not torch.float64"),
        ((5, 2, 64), torch.bfloat16, Device(40, 65536, (7, 5)), "8.0 or newer, not 7.5"),
        ((65536, 65536, 64), torch.bfloat16, H200, "B ≤ 65535"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_is(sizes, dtype, device, says):
    with pytest.raises(KernelError, match=says):
        plan(sizes, dtype, device)
