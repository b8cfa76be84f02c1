"""Schedule-free AdamW with its counts on the device: the package's own function, and a Triton kernel of it."""

import pytest
import torch
from schedulefree import AdamWScheduleFree
from triton_helpers import compare_interpreted, needs_triton

from elman_core.training.optim.schedule_free import COUNTS, ScheduleFree, update

RATES = [0.0, 1e-3, 3e-3, 1e-2, 1e-2, 2e-3, 1e-2, 0.0, 1e-2, 5e-3] * 4
BETAS = (0.9, 0.999)


def parameters(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (3, 4), (9,), ()]
    return [torch.nn.Parameter(torch.randn(s, generator=draw, dtype=dtype)) for s in shapes]


def groups(params):
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]


def gradients(params, step):
    draw = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=draw, dtype=p.dtype)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 3e-6), (torch.float64, 1e-13)])
def test_it_is_the_packages_optimizer(dtype, close):
    mine, theirs = parameters(dtype), parameters(dtype)
    one, two = ScheduleFree(groups(mine), 1e-3, BETAS), AdamWScheduleFree(groups(theirs), lr=1e-3, betas=BETAS)
    two.train()
    for step, lr in enumerate(RATES):
        for group in one.param_groups:
            group["lr"].fill_(lr)
        for group in two.param_groups:
            group["lr"] = lr
        gradients(mine, step)
        gradients(theirs, step)
        one.step()
        two.step()
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=close, atol=close)
        assert one.state[p].keys() == two.state[q].keys()
        for name, tensor in one.state[p].items():
            torch.testing.assert_close(tensor, two.state[q][name], rtol=close, atol=close)
    for group, other in zip(one.param_groups, two.param_groups, strict=True):
        assert {n: float(group[n]) for n in COUNTS} == pytest.approx({n: float(other[n]) for n in COUNTS}, rel=1e-14)
        assert group.keys() == other.keys()


def test_a_step_that_failed_changes_no_bit_and_counts_nothing():
    params = parameters()
    optimizer = ScheduleFree(groups(params), 1e-2, BETAS)
    for step in range(2):
        gradients(params, step)
        optimizer.step()
    tensors = [optimizer.counts, *params, *(t for p in params for t in optimizer.state[p].values())]
    before = [t.detach().clone() for t in tensors]
    optimizer.found_inf = torch.ones(())
    params[0].grad.fill_(torch.nan)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    optimizer.found_inf = torch.zeros(())
    gradients(params, 2)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before[1:], tensors[1:], strict=True))
    assert optimizer.counts[0].tolist() == [3, 3]


def test_gradients_stay_and_a_closure_is_refused():
    params = parameters()
    optimizer = ScheduleFree(groups(params), 1e-2, BETAS)
    gradients(params, 0)
    params[1].grad = None
    kept, still = [None if p.grad is None else p.grad.clone() for p in params], params[1].detach().clone()
    optimizer.step()
    assert all(p.grad is g is None or torch.equal(p.grad, g) for p, g in zip(params, kept, strict=True))
    assert torch.equal(params[1], still)
    with pytest.raises(NotImplementedError, match="closure"):
        optimizer.step(lambda: 0.0)


def compare(device: str) -> None:
    """The Triton kernel against plain PyTorch in float64, then what a failed step leaves."""
    from elman_core.training.optim import schedule_free_triton

    torch.manual_seed(0)
    factors = torch.tensor([0.3, -0.004, 0.01, 0.05], dtype=torch.float64, device=device)
    numbers = (0.999, 0.1, 1e-8)
    ok, failed = torch.zeros((), device=device), torch.ones((), device=device)
    for size, dtype, close in ((3, torch.float32, 2e-6), (2500, torch.float32, 2e-6), (1024, torch.bfloat16, 1e-2)):
        y, g, z = (torch.randn(size, device=device).to(dtype) for _ in range(3))
        v = torch.rand(size, device=device).to(dtype)
        exact = [t.double() for t in (y, g, v, z)]
        before = [t.clone() for t in exact]
        schedule_free_triton.update(y, g, v, z, factors, failed, *numbers)
        assert all(torch.equal(a, b.double()) for a, b in zip(before, (y, g, v, z), strict=True))
        schedule_free_triton.update(y, g, v, z, factors, ok, *numbers)
        update(*exact, factors, ok, *numbers)
        for found, expected in zip((y, g, v, z), exact, strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=close, atol=close)


@needs_triton
def test_the_kernel_is_the_plain_update_under_tritons_interpreter():
    compare_interpreted(__file__)


@pytest.mark.gpu
def test_the_kernel_is_the_plain_update_on_a_gpu():
    compare("cuda")


@pytest.mark.gpu
def test_an_update_on_a_gpu_is_that_on_a_cpu_and_a_cuda_graph_holds_it():
    cpu, gpu = parameters(), [torch.nn.Parameter(p.detach().cuda()) for p in parameters()]
    one, two = ScheduleFree(groups(cpu), 1e-2, BETAS), ScheduleFree(groups(gpu), 1e-2, BETAS)
    two.found_inf = torch.zeros((), device="cuda")
    for p in gpu:
        p.grad = torch.zeros_like(p)
    graph = None
    for step in range(6):
        gradients(cpu, step)
        one.step()
        for p, q in zip(cpu, gpu, strict=True):
            q.grad.copy_(p.grad)
        if step < 2:
            two.step()
            continue
        if graph is None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                two.step()
        graph.replay()
    for p, q in zip(cpu, gpu, strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-5, atol=1e-6)
    assert two.counts[0].tolist() == [6, 6]
