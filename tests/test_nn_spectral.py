"""Spectral normalisation: what it scales to, when its vectors move, and that nothing else moves them."""

import copy
import pickle
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, stack_module_state, vmap

from elman_core.nn import CausalConv, LowRank, SpectralNorm, scaled_once


class Scaled(nn.Module):
    def __init__(self, width=32, radius=0.9):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.spectral = SpectralNorm(width, radius)
        self.reset()

    def reset(self):
        nn.init.xavier_uniform_(self.weight, 0.1)
        self.spectral.reset()

    def forward(self, x):
        return x @ self.spectral(self.weight).T


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def vectors(module):
    return module.spectral.u.clone(), module.spectral.v.clone()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def step_(module, size=0.003):
    with torch.no_grad():
        module.weight.add_(size * torch.randn_like(module.weight))


def test_fifteen_iterations_find_most_of_the_norm_and_training_the_rest():
    module = Scaled(256).train()
    effective = torch.linalg.matrix_norm(module.spectral(module.weight), 2).item()
    assert 0.9 <= effective < 0.9 * 1.05
    for _ in range(60):
        step_(module, 1e-5)
        module(torch.randn(1, 256))
    assert torch.linalg.matrix_norm(module.spectral(module.weight), 2).item() == pytest.approx(0.9, rel=1e-3)


def test_a_new_weight_is_used_alike_in_evaluation_and_training():
    module, x = Scaled().eval(), torch.randn(2, 32)
    assert not module.spectral.u.any(), "until it is used, nothing is known of the weight"
    fresh = module(x)
    assert torch.equal(module.train()(x), fresh)
    assert torch.equal(module.eval()(x), fresh)


@pytest.mark.parametrize("training", [False, True])
def test_it_compiles_in_one_graph_before_and_after_its_first_use(training):
    module, x = Scaled().train(training), torch.randn(2, 32)
    expected = copy.deepcopy(module)(x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(x), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.view(-1)[5].add_(1e-3),
        lambda w: w.neg_(),
        lambda w: w.copy_(w.T.clone()),
        lambda w: w.copy_(w.roll(1, 0)),
        lambda w: w.mul_(1 + 2**-20),
    ],
    ids=["one element", "sign", "transpose", "rows", "scale"],
)
def test_any_change_of_the_weight_is_noticed(change):
    module = Scaled().train()
    module(torch.randn(1, 32))
    before = module.spectral.seen.clone()
    with torch.no_grad():
        change(module.weight)
    module(torch.randn(1, 32))
    assert not torch.equal(module.spectral.seen, before)


@pytest.mark.parametrize("started", [False, True])
def test_evaluation_changes_nothing(started):
    module, x = Scaled().train(), torch.randn(2, 32)
    if started:
        module(x)
    step_(module)
    module.eval()
    before = copy.deepcopy(module.state_dict())
    module(x)
    assert all(torch.equal(before[n], v) for n, v in module.state_dict().items())


def test_the_backward_uses_the_vectors_of_its_own_forward():
    """A round between forward and backward, as gradient accumulation over changed weights would do, disturbs nothing."""
    module, x = Scaled().train(), torch.randn(2, 32)
    loss = module(x).square().sum()
    expected = torch.autograd.grad(loss, module.weight, retain_graph=True)[0]
    module.spectral.start(torch.randn(32, 32))
    assert torch.equal(torch.autograd.grad(loss, module.weight)[0], expected)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_copy_computes_the_same_wherever_it_lies_in_memory(offset):
    module, x = Scaled(24).train(), torch.randn(2, 24)
    step_(module)
    module(x)
    loaded = Scaled(24).train()
    loaded.load_state_dict(module.state_dict())
    memory = torch.empty(24 * 24 + offset)[offset:]  # as a tensor in the middle of a mapped file
    loaded.weight = nn.Parameter(memory.view(24, 24).copy_(module.weight.detach()))
    assert torch.equal(loaded.spectral(loaded.weight), module.spectral(module.weight))
    for one in (module, loaded):
        with torch.no_grad():
            one.weight.mul_(1.1)
    assert torch.equal(loaded.spectral(loaded.weight), module.spectral(module.weight))
    assert same(vectors(module), vectors(loaded))


@pytest.mark.parametrize("made_of", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copied_module_computes_the_same(made_of):
    module, x = Scaled().train(), torch.randn(2, 32)
    module(x)
    assert torch.equal(made_of(module).eval()(x), module.eval()(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_model_moves_its_vectors_by_the_same_rule(dtype):
    module, x = Scaled().to(dtype).train(), torch.randn(2, 32, dtype=dtype)
    module(x)  # the cast changed the bits of the weight
    first = vectors(module)
    module(x)
    assert same(vectors(module), first)
    step_(module, 0.01)
    module(x)
    assert not same(vectors(module), first)
    effective = module.spectral(module.weight)
    assert effective.dtype == dtype
    assert torch.linalg.matrix_norm(effective.double(), 2).item() == pytest.approx(0.9, rel=0.1)


def test_autocast_does_not_reach_the_iteration():
    module = Scaled().train()
    step_(module)
    other = copy.deepcopy(module)
    with torch.autocast("cpu", torch.bfloat16):
        inside = module.spectral(module.weight)
    assert torch.equal(inside, other.spectral(other.weight))


def test_vectors_that_come_from_the_meta_device_are_looked_at_again():
    """As where weights are kept on a disk until they are used: a model that was never trained has none there either."""
    module, x = Scaled(), torch.randn(2, 32)
    expected = copy.deepcopy(module).eval()(x)
    with torch.device("meta"):
        other = Scaled().eval()
    other.load_state_dict(module.state_dict(), assign=True)
    assert torch.equal(other(x), expected)
    with torch.device("meta"):
        other = Scaled().train().eval()
    other.weight = nn.Parameter(module.weight.detach())
    for name, buffer in module.spectral.named_buffers():
        setattr(other.spectral, name, buffer)
    assert torch.equal(other(x), expected)


def test_a_computed_weight_is_scaled_under_inference_mode_too():
    scaled, left, right = Scaled(), torch.randn(32, 4), torch.randn(4, 32)
    with torch.no_grad():
        expected = scaled.eval().spectral(left @ right)
    with torch.inference_mode(), scaled_once(scaled):
        for _ in range(2):
            assert torch.equal(scaled.spectral(left @ right), expected)


def test_a_product_of_low_rank_is_formed_once_while_it_is_held_and_anew_when_a_factor_changes():
    weight = LowRank(6, 2).eval()
    weight.reset(0.5)
    with torch.no_grad(), scaled_once(weight):
        first = weight()
        assert weight() is first
        weight.v.mul_(2)
        torch.testing.assert_close(weight(), 2 * first)
    with torch.no_grad():
        assert weight() is not weight(), "held beyond its time"


@pytest.mark.parametrize("training", [False, True])
def test_vectors_are_constant_in_forward_mode_too(training):
    weight = torch.randn(6, 6)

    def product(w):
        return (SpectralNorm(6, 0.9).train(training).compute(w) * weight.t()).sum()

    with forward_ad.dual_level():
        along = forward_ad.unpack_dual(product(forward_ad.make_dual(weight, weight.t()))).tangent
    leaf = weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(product(leaf), leaf)
    torch.testing.assert_close(along, (gradient * weight.t()).sum())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_models_side_by_side_under_vmap_compute_what_each_computes_alone(started, training):
    modules, x = [Scaled().double().train() for _ in range(3)], torch.randn(3, 2, 32, dtype=torch.float64)
    if started:
        for module in modules:
            module(x[0])
            step_(module)
    for module in modules:
        module.train(training)
    parameters, buffers = stack_module_state(modules)
    one = copy.deepcopy(modules[0])
    made = vmap(lambda p, b, x: functional_call(one, (p, b), (x,)))(parameters, buffers, x)
    wanted = torch.stack([module(rows) for module, rows in zip(modules, x, strict=True)])
    close = {"rtol": 5e-3, "atol": 5e-3} if started and training else {}  # 15 iterations instead of three
    torch.testing.assert_close(made, wanted, **close)
    assert buffers["spectral.seen"].any().item() == (started or training)
    assert [*map(bool, modules[0].spectral.seen)] == [*map(bool, buffers["spectral.seen"][0])]


def test_vectors_of_another_model_do_not_count_as_its_own():
    module, x = Scaled().train(), torch.randn(2, 32)
    wanted = copy.deepcopy(module).eval()(x)
    others = {name: buffer.clone() for name, buffer in module.named_buffers()}
    functional_call(module, others, (x,))
    assert others["spectral.seen"].any()
    assert not module.spectral.seen.any()
    assert torch.equal(module.eval()(x), wanted)


def test_taps_of_a_convolution_are_cast_once_in_a_generation():
    conv = CausalConv(6, 3, dim=1).bfloat16().eval()
    x, cast = torch.randn(2, 5, 6).bfloat16(), Mock(wraps=conv.wide.compute)
    conv.wide.compute = cast
    with torch.no_grad():
        expected = conv(x)
        with scaled_once(conv):
            found = [conv(x) for _ in range(3)]
            assert cast.call_count == 2
            conv.weight.mul_(2)
            assert not torch.equal(conv(x)[0], expected[0])
    assert cast.call_count == 3
    for y, window in found:
        assert torch.equal(y, expected[0])
        assert torch.equal(window, expected[1])
