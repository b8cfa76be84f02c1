"""The recurrences of E74 that have kernels, by the names that `mixer.RULES` gives them."""

from pathlib import Path
from typing import Any

from elman_core.kernels import Maps, MatrixKernel

from . import reference

INPUTS: dict[str, tuple[Any, dict[str, Any]]] = {  # the reference, and what the cell is given beside q, k and v
    "delta": (reference.delta, {}),
    "read": (reference.read, {"vectors": ("z",)}),
    "sized": (reference.sized, {"params": ("d_g", "b_g"), "elementwise": True}),
    "simple": (reference.simple, {"scalars": ("alpha",)}),
    "ema": (reference.ema, {"lines": ("alpha",), "params": ("b_alpha",)}),
    "residual": (reference.residual, {"params": ("rho",), "elementwise": True}),
    "ntm": (reference.ntm, {"lines": ("erase", "write"), "params": ("b_e", "b_w"), "elementwise": True}),
    "retrieved_gate": (reference.gated, {"lines": ("gate",), "params": ("b_g",)}),
}
KERNELS = {
    name: MatrixKernel(
        f"e74_{name}",
        header=Path(__file__).parent / "csrc" / "e74_cell.h",
        cell=f"elman::e74::{name.title().replace('_', '')}",
        reference=step,
        options=("linear_state",),
        maps=(Maps((), ("k",)),),
        **inputs,
    )
    for name, (step, inputs) in INPUTS.items()
}
