"""Autocast around the forward, the backward or both changes no gradient of an operator; one of each family, on a CPU."""

import dataclasses
import itertools

import pytest
import torch
from elman_authors import grids
from elman_authors.cli.build import chosen_kernels
from elman_authors.testing.kernel import need_host_compiler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *itertools.product(["e1", "e42", "e63c", "e61"], ["torch", "cpu"]),
        *((n, "cpu") for n in ("e88", "m2rnn", "causal_conv")),
    ],
)
def test_gradients_are_those_of_plain_pytorch_wherever_autocast_is_on(name, backend, dtype):
    (spec,) = (s for s in chosen_kernels([], None, shared=True) if s.name == name)
    if backend == "cpu":
        need_host_compiler()
    case = next(c for c in grids.problems(spec, backend) if c.dtype == torch.float32 and not c.masked)
    case = dataclasses.replace(case, dtype=dtype)
    inputs = spec.make_inputs(case, torch.Generator().manual_seed(0))
    named = {n: x.requires_grad_() for n, x in inputs.items() if x is not None and x.is_floating_point()}

    def gradients(backend, forward=False, backward=False):
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            outputs = spec.call(backend, inputs, case.options).values()
        above = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) for y in outputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=backward):
            return torch.autograd.grad(outputs, named.values(), above)

    wanted, made = gradients("reference"), gradients(backend)
    for where in itertools.product((False, True), repeat=2):
        assert all(map(torch.equal, gradients(backend, *where), made)), where
    for n, x, y in zip(named, made, wanted, strict=True):
        assert (x.double() - y.double()).norm() <= 8 * torch.finfo(dtype).eps * y.double().norm(), n
