"""Add and RMS norm: the equation, its gradient by hand, layouts, and the Triton kernels under Triton's interpreter."""

import itertools

import pytest
import torch
from triton_helpers import compare_interpreted, interprets_loops, needs_triton

from elman_core.nn import add_rms_norm


def by_definition(x, residual, weight, eps):
    stream = x if residual is None else residual + x
    return weight * stream * (stream.square().mean(-1, keepdim=True) + eps).rsqrt(), stream


def drawn(*shape, dtype=torch.float64, grad=True):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


@pytest.mark.parametrize("shape", [(2, 5, 7), (3, 8), (2, 1, 3, 4)])
@pytest.mark.parametrize("adds", [True, False])
def test_the_gradient_by_hand_is_that_of_the_definition(shape, adds):
    torch.manual_seed(0)
    x, residual, weight = drawn(*shape), drawn(*shape) if adds else None, drawn(shape[-1])
    inputs = [t for t in (x, residual, weight) if t is not None]
    ours, theirs = add_rms_norm(x, residual, weight, 1e-3), by_definition(x, residual, weight, 1e-3)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    above = [torch.randn(shape, dtype=torch.float64) for _ in range(2)]
    for used in ([0], [1], [0, 1]):  # what reads n alone, the stream alone, both
        got, expected = (
            torch.autograd.grad(
                [out[i] for i in used], inputs, [above[i] for i in used], retain_graph=True, allow_unused=True
            )
            for out in (ours, theirs)
        )
        for a, b in zip(got, expected, strict=True):
            if b is None:
                assert a is None
            else:
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_gradient_of_the_gradient_is_refused():
    x, weight = drawn(3, 4), drawn(4)
    normed, _ = add_rms_norm(x, None, weight, 1e-5)
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(normed.sum(), x, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_are_sound(dtype):
    torch.manual_seed(0)
    x = drawn(5, 2, 8, dtype=dtype, grad=False).transpose(0, 1).requires_grad_()
    residual, weight = drawn(2, 5, 8, dtype=torch.float32), drawn(8, dtype=torch.float32)
    torch.library.opcheck(torch.ops.elman.add_rms_norm.default, (x, residual, weight, 1e-5, dtype))
    torch.library.opcheck(torch.ops.elman.add_rms_norm.default, (residual, None, weight, 1e-5, dtype))


def test_time_major_branches_stay_time_major_and_the_stream_stays_as_it_is():
    x = drawn(5, 2, 8, dtype=torch.bfloat16, grad=False).transpose(0, 1).requires_grad_()
    residual, weight = drawn(2, 5, 8, dtype=torch.float32), drawn(8, dtype=torch.float32)
    normed, stream = add_rms_norm(x, residual, weight, 1e-5, torch.bfloat16)
    assert normed.stride() == x.stride() == (8, 16, 1)
    assert stream.is_contiguous()
    torch.autograd.backward([normed, stream], [torch.randn(5, 2, 8).transpose(0, 1).bfloat16(), torch.randn(2, 5, 8)])
    assert x.grad.stride() == x.stride()
    assert (x.grad.dtype, residual.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    torch.testing.assert_close(x.grad, residual.grad.bfloat16(), rtol=0, atol=0)


def test_autocast_does_not_reach_inside():
    x, residual, weight = (drawn(*s, dtype=torch.float32) for s in ((4, 9), (4, 9), (9,)))
    plain = add_rms_norm(x, residual, weight, 1e-5, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        cast = add_rms_norm(x, residual, weight, 1e-5, torch.bfloat16)
        grads = torch.autograd.grad([*cast], [x, residual, weight], [torch.ones_like(t) for t in cast])
    expected = torch.autograd.grad([*plain], [x, residual, weight], [torch.ones_like(t) for t in plain])
    assert all(torch.equal(a, b) for a, b in zip((*cast, *grads), (*plain, *expected), strict=True))


# the kernels -------------------------------------------------------------------------------------------------------------

SHAPES = [(2, 5, 16), (3, 4, 37), (7, 8), (1, 1, 300), (2, 2, 2, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layouts(shape, dtype):
    """The same numbers in the memory orders that models produce."""
    x = torch.randn(shape).to(dtype)
    yield x
    yield x.transpose(-1, -2).contiguous().transpose(-1, -2)  # channels first
    if len(shape) > 3:
        yield x.transpose(1, 2).contiguous().transpose(1, 2)
    if len(shape) == 3:
        yield x.transpose(0, 1).contiguous().transpose(0, 1)
        yield torch.cat((x, x), -1)[..., : shape[-1]]


def compare(device: str) -> None:
    """Every shape, dtype and layout through the kernels against float64 and against plain PyTorch, and twice."""
    from elman_core.nn import add_norm, add_norm_triton

    torch.manual_seed(0)
    for shape, dtype, adds in itertools.product(SHAPES, DTYPES, (True, False)):
        for x in layouts(shape, dtype):
            x = x.to(device)
            residual = torch.randn_like(x, dtype=torch.float32)
            weight = torch.randn(shape[-1], device=device)
            source = x if adds else residual
            out = dtype
            normed, stream, rho = add_norm_triton.add_norm(source, residual if adds else None, weight, 1e-5, out)
            expected, wide = by_definition(
                x.double() if adds else residual.double(), residual.double() if adds else None, weight, 1e-5
            )
            eps = torch.finfo(out).eps
            assert (normed.dtype, normed.stride()) == (out, torch.empty_like(source).stride())
            assert (normed.double() - expected).abs().max() <= 4 * eps * expected.abs().max()
            assert torch.equal(stream, residual + x if adds else residual)
            dn = torch.randn_like(normed)
            for d_stream in (torch.randn(shape, device=device), None):
                strides = torch.empty_like(x).stride()
                d_x = add_norm._empty_gradient(stream, dtype if adds else torch.float32, strides)
                d, dw = add_norm_triton.add_norm_backward(dn, d_stream, stream, rho, weight, d_x)
                wide = wide.detach().requires_grad_()
                gain = weight.double().requires_grad_()
                n64 = by_definition(wide, None, gain, 1e-5)[0]
                d64, dw64 = torch.autograd.grad(n64, (wide, gain), dn.double())
                d64 = d64 if d_stream is None else d64 + d_stream
                assert (d.double() - d64).abs().max() <= 16 * 2**-23 * (1 + d64.abs().max())
                assert (dw.double() - dw64).abs().max() <= 16 * 2**-23 * (1 + dw64.abs().max())
                if d_x.numel():
                    assert ((d_x.double() - d).abs() <= eps * d.abs() + 1e-7).all()  # the interpreter cuts bfloat16 off
                    assert d_x.stride() == strides
                again = add_norm_triton.add_norm_backward(dn, d_stream, stream, rho, weight, torch.empty_like(d_x))
                assert all(torch.equal(a, b) for a, b in zip(again, (d, dw), strict=True))


@needs_triton
@interprets_loops
def test_the_kernels_under_the_interpreter():
    compare_interpreted(__file__)


@pytest.mark.gpu
def test_the_kernels_on_a_gpu():
    compare("cuda")
