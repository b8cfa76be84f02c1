"""Cells whose backward is given a: a gated update keeps its candidate's digits. T time, B batch, d width."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from elman_authors import grids
from elman_authors.testing.kernel import need_host_compiler

from elman_core.kernels import Case, DenseKernel
from elman_core.kernels.verify import failures, verify
from elman_core.nn import full_precision
from elman_core.registry import ConfigError

# h = (1 - g) h' + g tanh(a), g = sigmoid(e): once with a, once with the candidate found again from the states.
CELL = """
#pragma once
#include <elman/dense_cell.h>
namespace {name} {{
struct Cell {{
  static constexpr int extras = 1;
  static constexpr bool uses_prev = true;
  {trait}
  template <class Math, class T>
  static ELMAN_HD elman::DenseOut<T> forward(T a, T prev, const T* e) {{
    const T g = T(1) / (T(1) + exp(-e[0])), h = prev + g * (Math::tanh(a) - prev);
    return {{h, h}};
  }}
  template <class Math, class T>
  static ELMAN_HD elman::DenseGrad<T, extras> backward(T gy, T gh, T h, T prev, {argument} const T* e) {{
    const T g = T(1) / (T(1) + exp(-e[0])), total = gy + gh, c = {candidate};
    return {{total * g * (T(1) - c * c), total * (T(1) - g), {{total * (c - prev) * g * (T(1) - g)}}}};
  }}
}};
}}
"""
FORMS = {
    "given": {"trait": "static constexpr bool uses_a = true;", "argument": "T a,", "candidate": "Math::tanh(a)"},
    "found": {"trait": "", "argument": "", "candidate": "prev + (h - prev) / g"},
}
NUMBERS = itertools.count()


@full_precision
def gated_reference(u, gate, w, h0, mask=None, starts=None):
    h, states = h0, []
    for t in range(u.shape[0]):
        h = h if starts is None else torch.where(starts[t, :, None], 0.0, h)
        new = h + gate[t].sigmoid() * (torch.tanh(h @ w.T + u[t]) - h)
        h = new if mask is None else torch.where(mask[t, :, None], new, h)
        states.append(h)
    return torch.stack(states), h


def make(form: str, folder: Path, uses_a: bool) -> DenseKernel:
    name = f"made_up_gate_{form}_{uses_a:d}_{next(NUMBERS)}"  # an operator's name is taken for the life of a process
    header = folder / f"{name}.h"
    header.write_text(CELL.format(name=name, **FORMS[form]))
    return DenseKernel(
        name,
        header=header,
        cell=f"{name}::Cell",
        reference=gated_reference,
        update=lambda a, h, gate: h + gate.sigmoid() * (torch.tanh(a) - h),
        readout=lambda h, _before, _gate: h,
        extras=("gate",),
        uses_a=uses_a,
    )


SHAPE = {"T": 40, "B": 3, "d": 16}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gates")
    return {form: make(form, folder, form == "given") for form in FORMS}


def nearly_shut(kernel, logit: float):
    """Its spec, with gates that let about exp(-logit) in."""
    spec = kernel.spec()

    def make_inputs(case, generator):
        inputs = spec.make_inputs(case, generator)
        return {**inputs, "gate": inputs["gate"] - logit}

    return dataclasses.replace(spec, make_inputs=make_inputs)


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_a_gated_cell_that_is_given_a_passes_the_quick_grid(kernels, backend):
    need_host_compiler()
    report = grids.verify(kernels["given"].spec(), backend, opcheck=backend == "host")
    assert report.passed, list(failures(report))
    assert {row.tensor for row in report.rows} == {"y", "h_T", "d u", "d gate", "d w", "d h0"}


def test_what_it_is_given_for_is_the_digits_of_the_candidate(kernels):
    """Gradients from what a forward keeps in 16 bits, as a GPU does, against those from what it computed."""
    need_host_compiler()
    case, worst = Case(SHAPE, torch.float64), {}
    for form, kernel in kernels.items():
        inputs = nearly_shut(kernel, 5.0).make_inputs(case, torch.Generator().manual_seed(0))
        u, gate, w, h0 = (inputs[n] for n in ("u", "gate", "w", "h0"))
        y, last, *kept = kernel.op(u, gate, w, h0, None, None, "host")
        backward = getattr(torch.ops.elman, f"dense_{kernel.name}_backward")
        exact, rounded = (
            backward(torch.ones_like(y), torch.ones_like(last), gate, w, None, None, *states, "host")
            for states in (kept, [x.bfloat16().double() for x in kept])
        )
        worst[form] = float((rounded[0] - exact[0]).norm() / exact[0].norm())
    assert worst["given"] < 2**-8
    assert worst["found"] > 20 * worst["given"]


def test_a_header_and_a_kernel_that_differ_are_refused(tmp_path):
    need_host_compiler()
    u, gate, h0 = torch.randn(2, 1, 4), torch.randn(2, 1, 4), torch.zeros(1, 4)
    for form, says in (("given", False), ("found", True)):
        with pytest.raises(
            ConfigError, match=rf"made_up_gate_{form}_{says:d}_\d+.h says uses_a = {not says}, Python {says}"
        ):
            make(form, tmp_path, says)(u, gate, torch.eye(4), h0, backend="host")


def test_its_shapes_are_known_without_running_it(kernels):
    u, w, h0 = torch.randn(3, 2, 4, device="meta"), torch.randn(4, 4, device="meta"), torch.randn(2, 4, device="meta")
    for form, shape in (("given", (3, 2, 4)), ("found", (0, 2, 4))):
        *_, a = kernels[form].op(u, u, w, h0, None, None, "cuda")
        assert a.shape == shape


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_too_in_every_kind_of_launch(kernels, dtype):
    sizes = [(33, 8, 64), (33, 8, 512), (20, 32, 1536), (9, 300, 1280), (7, 4, 2064)]
    cases = [Case(dict(zip("TBd", size, strict=True)), dtype, masked=i % 2 == 1) for i, size in enumerate(sizes)]
    report = verify(nearly_shut(kernels["given"], 4.0), "cuda", cases=cases)
    assert report.passed, list(failures(report))
