"""Norm and gate at the end of a mixer: the equation, slices, and the Triton kernels under Triton's interpreter."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from triton_helpers import compare_interpreted, interprets_loops, needs_triton

from elman_core.nn import RMSNorm
from elman_core.nn.gated import gated
from elman_core.nn.joined import side_by_side


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("has_norm", [False, True])
def test_it_is_the_norm_of_each_head_times_the_gate(activation, has_norm):
    torch.manual_seed(0)
    norm = RMSNorm(4).double() if has_norm else None
    if norm is not None:
        torch.nn.init.normal_(norm.weight)
    o, wide = torch.randn(2, 5, 3, 4, dtype=torch.float64), torch.randn(2, 5, 20, dtype=torch.float64)
    wanted = defined(o, wide[..., 4:16], None if norm is None else norm.weight, activation == "silu")
    torch.testing.assert_close(gated(o, wide[..., 4:16], activation, norm), wanted)
    half = gated(o.bfloat16(), wide[..., 4:16].bfloat16(), activation)
    assert torch.equal(half, gated(o.bfloat16().float(), wide[..., 4:16].bfloat16().float(), activation).bfloat16())


SIZES = [((2, 5, 3), 4, 20), ((1, 1, 2), 24, 48), ((3, 50, 7), 48, 400), ((70, 2), 128, 256)]
"""Tokens and heads, width of a head, width of what the gate is a slice of."""


def compare(device: str, sizes=SIZES) -> None:
    """The kernels and autograd of the definition, in float64, at 2e-6 of the largest value, or 1e-2 in bfloat16."""
    torch.manual_seed(0)
    for (leading, width, wide), silu, has_norm, dtype in itertools.product(
        sizes, [False, True], [False, True], [torch.float32, torch.bfloat16]
    ):
        o = torch.randn(*leading, width, device=device).to(dtype)
        whole = torch.randn(*leading[:-1], wide, device=device).to(dtype)
        given = [o, whole, *([torch.randn(width, device=device)] if has_norm else []), torch.randn_like(o)]
        found, again = (gradients(by_kernel, silu, *given) for _ in range(2))
        limit = 2e-6 if dtype == torch.float32 else 1e-2
        for made, wanted in zip(found, gradients(defined, silu, *(x.double() for x in given)), strict=True):
            assert (made.double() - wanted).abs().max() <= limit * wanted.abs().max(), (leading, width, silu, has_norm)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        # With the map behind: what the backward makes again is what was there, bit for bit.
        out, above = torch.randn(5, leading[-1] * width, device=device).to(dtype), torch.randn_like(whole[..., :5])
        kept, made = (gradients(run, silu, *given[:-1], above, out=out) for run in (by_kernel_and_map, by_kernel))
        assert all(torch.equal(a, b) for a, b in zip(kept, made, strict=True))
        # Gate and o from one product: the same numbers, and gradients side by side, as that product's backward wants them.
        both = torch.cat((whole[..., -leading[-1] * width :], o.flatten(-2)), -1).requires_grad_()
        gate, beside = both.chunk(2, -1)
        y = by_kernel(beside.unflatten(-1, (-1, width)), gate, *(given[2:-1] or [None]), silu)
        parts = torch.autograd.grad(y, (gate, beside), given[-1], retain_graph=True)
        assert torch.equal(y, found[0])
        assert torch.equal(parts[0], found[2][..., whole.shape[-1] - gate.shape[-1] :])
        assert torch.equal(parts[1].unflatten(-1, (-1, width)), found[1])
        assert gate.numel() == gate.shape[-1] or side_by_side(parts) is not None
    # A backward inside autocast is the one outside.
    o, gate, out, above = (
        torch.randn(s, device=device, requires_grad=True) for s in ((5, 3, 4), (5, 12), (7, 12), (5, 7))
    )
    found = []
    for on in (False, True):
        y = by_kernel(o, gate, None, True, out)
        with torch.autocast(device, torch.bfloat16, enabled=on):
            found.append(torch.autograd.grad(y, (o, gate, out), above))
    assert all(map(torch.equal, *found))


def gradients(run, silu, *given, out=None):
    """y of o and of a gate that ends a wider tensor, and the gradients of all; the last of `given` arrives at y."""
    o, whole, *weight = leaves = [x.detach().requires_grad_() for x in given[:-1]]
    gate, behind = whole[..., whole.shape[-1] - o.shape[-1] * o.shape[-2] :], []
    if out is not None:
        behind = [out.detach().requires_grad_()]
    y = run(o, gate, weight[0] if weight else None, silu, *behind)
    return [y, *torch.autograd.grad(y, [*leaves, *behind], given[-1])]


def by_kernel(o, gate, weight, silu, out=None):
    from elman_core.nn.gated_triton import Gated

    return Gated.apply(o, gate, weight, out, silu, 1e-5)


def by_kernel_and_map(o, gate, weight, silu, out):
    return F.linear(by_kernel(o, gate, weight, silu).flatten(-2), out)


def defined(o, gate, weight, silu):
    n = o if weight is None else F.rms_norm(o, o.shape[-1:], weight, 1e-5)
    logit = gate.unflatten(-1, o.shape[-2:])
    return n * (F.silu(logit) if silu else torch.sigmoid(logit))


@needs_triton
@interprets_loops
def test_the_kernels_interpreted():
    compare_interpreted(__file__)


@pytest.mark.gpu
def test_the_kernels_on_a_gpu():
    compare("cuda", [*SIZES, ((8, 512, 32), 32, 4160)])
    o = torch.randn(2, 3, 4, 8, device="cuda", requires_grad=True)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(gated(o, o.flatten(2), "silu").sum(), o, create_graph=True)
