"""Several linear maps as one product: the values and gradients of the maps one by one, alone and inside a mixer."""

import sys

import pytest
import torch
from torch import nn

from elman_core.nn import aligned, joined, linears
from elman_core.registry import get_variant

LINEAR = sys.modules["elman_core.nn.linear"]  # `linear` of the package is a function


@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_the_maps(bias):
    torch.manual_seed(0)
    modules = [nn.Linear(7, n, bias).double() for n in (5, 1, 8)]
    x = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    above = [torch.randn(3, 4, m.out_features, dtype=torch.float64) for m in modules]
    inputs = [x, *(p for m in modules for p in m.parameters())]
    alone = [m(x) for m in modules]
    together = joined.joined(modules, x)
    assert [(y.storage_offset(), *y.stride()) for y in together] == [(0, 96, 24, 1), (8, 96, 24, 1), (16, 96, 24, 1)]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b)
    found = torch.autograd.grad(together, inputs, above)
    for a, b in zip(found, torch.autograd.grad(alone, inputs, above), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_that_lie_side_by_side_are_one():
    whole = torch.randn(3, 4, 24)
    parts = whole.split([8, 12, 4], -1)
    found = joined.side_by_side(parts)
    assert found.data_ptr() == whole.data_ptr()
    assert torch.equal(found, whole)
    inner = joined.side_by_side(parts[:2])
    assert torch.equal(inner, whole[..., :20])
    assert inner.stride() == whole.stride()
    for other in (
        [parts[1], parts[0]],  # in another order
        [parts[0], parts[2]],  # with a gap
        [parts[0], parts[1].clone()],
        [parts[0], parts[1].double()],
        [parts[0], torch.randn(3, 4, 20)[..., 8:]],
        [x.expand(3, 4, -1) for x in torch.randn(12).split([8, 4])],  # rows that overlap
        [x.transpose(1, 2) for x in torch.randn(3, 24, 4).split([8, 16], 1)],
    ):
        assert joined.side_by_side(other) is None


def test_thin_wide_and_missing_gradients_are_those_of_the_maps():
    torch.manual_seed(0)
    modules = [nn.Linear(7, n).double() for n in (136, 3, 129, 200)]
    x = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    inputs = [x, *(p for m in modules for p in m.parameters())]
    above = [torch.randn(3, 4, m.out_features, dtype=torch.float64) for m in modules]
    found = torch.autograd.grad(joined.joined(modules, x)[1:], inputs, above[1:], materialize_grads=True)
    expected = torch.autograd.grad([m(x) for m in modules[1:]], inputs, above[1:], materialize_grads=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_padded_product_has_zeros_behind_it_and_the_gradients_of_the_map():
    torch.manual_seed(0)
    module = nn.Linear(7, 13, bias=False).double()
    x = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    y, plain = joined.padded(module.weight, x), module(x)
    assert y.shape == (3, 4, 16)
    assert not y[..., 13:].any()
    torch.testing.assert_close(y[..., :13], plain)
    above = torch.randn_like(plain)
    found = torch.autograd.grad(y[..., :13], (x, module.weight), above)
    for a, b in zip(found, torch.autograd.grad(plain, (x, module.weight), above), strict=True):
        torch.testing.assert_close(a, b)


def test_only_rows_that_would_begin_at_odd_places_are_padded(monkeypatch):
    x = torch.ones(2, 3, 4)
    assert aligned(nn.Linear(4, 12, bias=False), x).shape[-1] == 12, "on a CPU"
    monkeypatch.setattr(LINEAR, "many_rows", lambda _: True)
    assert aligned(nn.Linear(4, 12, bias=False), x).shape[-1] == 16
    assert aligned(nn.Linear(4, 16, bias=False), x).shape[-1] == 16
    assert aligned(nn.Linear(4, 12), x).shape[-1] == 12, "a bias"
    assert aligned(nn.Sequential(nn.Linear(4, 12, bias=False)), x).shape[-1] == 12, "an adapter"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_takes_the_same_weights_before_they_are_copied(dtype):
    torch.manual_seed(0)
    modules = [nn.Linear(16, n, bias=False).to(dtype) for n in (8, 5)]
    x = torch.randn(4, 16, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        alone, together, wide = [m(x) for m in modules], joined.joined(modules, x), joined.padded(modules[1].weight, x)
    for a, b in zip((*together, wide[..., :5]), (*alone, alone[1]), strict=True):
        assert a.dtype == b.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
        torch.testing.assert_close(a, b)
    found, expected = (
        torch.autograd.grad(sum(y.float().sum() for y in ys), modules[0].weight)[0] for ys in (together, alone)
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("inside", [False, True])
def test_a_backward_inside_autocast_is_the_one_outside(inside):
    torch.manual_seed(0)
    modules, x = [nn.Linear(16, n) for n in (136, 200)], torch.randn(4, 16, requires_grad=True)
    inputs, found = [x, *(p for m in modules for p in m.parameters())], []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss = sum(y.float().square().sum() for y in joined.joined(modules, x))
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            found.append(torch.autograd.grad(loss, inputs))
    assert all(map(torch.equal, *found))


OPTIONS = {
    "plain": {},
    "conv, gate, write gate": {"use_conv": True, "use_gate": True, "use_write_gate": True},
    "tied, simple decay": {"tie_kv": True, "decay": "simple", "value_residual": True},
    "weighted heads": {"head_mix": "input_weighted", "use_gate": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_mixer_reads_views_of_one_product(options, monkeypatch):
    torch.manual_seed(0)
    variant = get_variant("e88")
    mixer = variant.branch(0)(12, variant.make_config({"n_heads": 2, "n_state": 4, **options}), 0).double()
    x = torch.randn(3, 5, 12, dtype=torch.float64, requires_grad=True)
    above = torch.randn(3, 5, 12, dtype=torch.float64)

    def gradients():
        y = mixer(x)[0]
        named = dict(mixer.named_parameters())
        made = torch.autograd.grad(y, [x, *named.values()], above)
        return {"y": y, "x": made[0], **dict(zip(named, made[1:], strict=True))}

    alone, sizes = gradients(), []
    monkeypatch.setattr(LINEAR, "joins", lambda modules, _x: sizes.append(len(modules)) or True)
    together = gradients()
    assert sizes == [len(mixer.projections)]
    assert sizes[0] > 1
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_are_not_passed_by(hook, monkeypatch):
    monkeypatch.setattr(LINEAR, "joins", lambda *_: True)
    seen = []
    modules = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    getattr(modules[1], hook)(lambda *_: seen.append(True))
    sum(y.sum() for y in linears(modules, torch.ones(2, 3, 4, requires_grad=True))).backward()
    assert seen == [True]
