"""Gated dense cells for tests: a form whose backward is given a, and one that finds its candidate again from the states."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from elman_core.kernels import DenseKernel
from elman_core.nn import full_precision

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


def make_both(folder: Path) -> dict[str, DenseKernel]:
    """By form."""
    return {form: make(form, folder, form == "given") for form in FORMS}
