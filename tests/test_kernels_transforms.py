"""torch.func and forward-mode derivatives: what they give is true, or they are refused; never zeros in silence."""

import pytest
import torch
import torch.nn.functional as F
from elman_e42.op import e42 as dense
from elman_e88.op import e88 as matrix
from torch.func import functional_call, grad, jvp, vmap

from elman_core.kernels import Maps
from elman_core.kernels.decode import native as decode_native
from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.nn import add_rms_norm, linear_cross_entropy
from elman_core.nn.joined import joined


def dense_inputs(T=5, B=2, d=6):
    torch.manual_seed(0)
    return torch.randn(T, B, d), torch.randn(d, d) * 0.2, torch.randn(B, d)


def matrix_inputs(B=2, T=5, H=2, N=4, V=3):
    torch.manual_seed(0)
    q, k = F.normalize(torch.randn(2, B, T, H, N), dim=-1)
    return q, k, torch.randn(B, T, H, V), torch.rand(B, T, H)


@pytest.mark.parametrize(("variant", "options"), [("e1", {}), ("e42", {}), ("e88", {"n_heads": 2, "n_state": 8})])
def test_gradients_of_every_sample_and_along_a_direction_are_those_of_backward(variant, options):
    torch.manual_seed(0)
    config = LadderConfig(variant=variant, options=options, hidden_size=16, num_hidden_layers=2)
    model = LadderForCausalLM(config).double().eval()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    tokens = torch.randint(256, (2, 8))

    def loss(parameters, row):
        return functional_call(model, (parameters, buffers), (row[None],), {"return_loss": True})

    each = vmap(grad(loss), (None, 0))(parameters, tokens)
    for i, row in enumerate(tokens):
        wanted = torch.autograd.grad(loss(parameters, row), list(parameters.values()))
        for made, one in zip(each.values(), wanted, strict=True):
            torch.testing.assert_close(made[i], one)
        along = sum((a * b).sum() for a, b in zip(parameters.values(), wanted, strict=True))
        made = jvp(lambda p, row=row: loss(p, row), (parameters,), (parameters,))[1]
        torch.testing.assert_close(made, along.to(made.dtype))


def test_the_heads_loss_and_a_norm_without_a_stream_have_every_derivative():
    torch.manual_seed(0)
    x, weight, targets = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, -100, 4])
    made = jvp(lambda x: linear_cross_entropy(x, weight, targets), (x,), (x,))[1]
    wanted = jvp(lambda x: F.cross_entropy(x @ weight.t(), targets, reduction="sum"), (x,), (x,))[1]
    torch.testing.assert_close(made, wanted)
    made = jvp(lambda x: add_rms_norm(x, None, weight[0], 1e-5)[0], (x,), (x,))[1]
    torch.testing.assert_close(made, jvp(lambda x: F.rms_norm(x, (4,), weight[0], 1e-5), (x,), (x,))[1])


@pytest.mark.parametrize(
    "transform",
    [grad, lambda f: lambda x: jvp(f, (x,), (x,))[1], vmap, lambda f: vmap(grad(f))],
    ids=["grad", "jvp", "vmap", "vmap of grad"],
)
def test_maps_in_one_product_have_every_derivative(transform):
    torch.manual_seed(0)
    modules, x = [torch.nn.Linear(8, n).double() for n in (16, 3)], torch.randn(2, 4, 8, dtype=torch.float64)
    made, wanted = (
        transform(lambda x, run=run: sum(y.square().sum() for y in run(x)))(x)
        for run in (lambda x: joined(modules, x), lambda x: [module(x) for module in modules])
    )
    torch.testing.assert_close(made, wanted)


@pytest.mark.parametrize("transform", [grad, lambda f: lambda x: jvp(f, (x,), (x,))], ids=["grad", "jvp"])
def test_a_back_end_that_was_named_is_refused_and_says_what_there_is(transform):
    u, w, h0 = dense_inputs()
    q, k, v, decay = matrix_inputs()
    with pytest.raises(NotImplementedError, match=r"e42: torch\.func .* backend='auto' or 'reference'"):
        transform(lambda w: dense(u, w, h0, backend="torch")[0].sum())(w)
    with pytest.raises(NotImplementedError, match=r"e88: torch\.func .* backend='auto' or 'reference'"):
        transform(lambda v: matrix(q, k, v, decay, maps=Maps(), backend="host")[0].sum())(v)


def test_dual_tensors_outside_of_torch_func_keep_their_tangent():
    u, w, h0 = dense_inputs()
    with torch.autograd.forward_ad.dual_level():
        y, _ = dense(torch.autograd.forward_ad.make_dual(u, u), w, h0)
        made = torch.autograd.forward_ad.unpack_dual(y).tangent
    torch.testing.assert_close(made, jvp(lambda u: dense(u, w, h0, backend="reference")[0], (u,), (u,))[1])


def test_few_rows_leave_forward_mode_to_torch():
    class OnGPU:
        is_cuda, dtype = True, torch.bfloat16

    with torch.no_grad():
        assert decode_native.alone(OnGPU())
        with torch.autograd.forward_ad.dual_level():
            assert not decode_native.alone(OnGPU())
