"""The equation as a test: outputs, states and every gradient equal an oracle in NumPy that the plugin writes one step of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core.extension import WrapperMixer, config_to_dict

from .harness import Harness, Options, clone, rounded
from .oracle import Arrays, Form, Row

LIMIT = 1e-9
"""Relative to the norm of a tensor, in float64."""
SIZES: tuple[Options, ...] = (
    {},
    {"expansion": 0.5, "use_conv": True, "d_conv": 2},
    {"expansion": 1.5, "use_conv": True, "dropout": 0.4},
)
"""Options of the wrapper under which every variant is compared, beside its own."""
MASK_BT = torch.tensor([[c == "1" for c in row] for row in ("1111111", "0011111", "1011001")])
STARTS_BT = torch.tensor([[c == "1" for c in row] for row in ("0001001", "0010000", "0100010")])


class EquationContract(Harness):
    """Inside the wrapper (`elman_core.nn.WrapperMixer`), a plugin's test class defines `step` and `step_gradient`, as
    `elman_authors.testing.oracle.Cell` describes them. Outside it, `row(o, p, x_TD, start, begins)`, an object as `oracle.Row`.
    """

    equations: ClassVar[Sequence[Options]] = ()
    """Sets of options for this test alone, beside `options`."""

    initial: ClassVar[Mapping[str, str]] = {}
    """{state: parameter} for states that start with a learned value."""

    def test_outputs_and_every_gradient_equal_the_equation(self) -> None:
        wrapped = issubclass(self.declared().branch(0), WrapperMixer)
        if not wrapped and not hasattr(self, "row"):
            pytest.skip("not in the wrapper: the variant's own tests hold its equation")
        for name in ("step", "step_gradient") if wrapped else ():
            assert hasattr(self, name), f"write {name}: one step of the equation in NumPy, and its derivative"
        sizes = ({**self.options[0], **s} for s in SIZES if wrapped)
        for opts in (*self.options, *sizes, *self.equations):
            for mask_BT, starts_BT, given, training in (
                (None, None, True, False),
                (MASK_BT, None, True, True),
                (None, STARTS_BT, True, True),
                (MASK_BT, STARTS_BT, False, False),
            ):
                said = f"{dict(opts)}, masked={mask_BT is not None}, packed={starts_BT is not None}, {training=}"
                self._compare(opts, mask_BT, starts_BT, given, training, said)

    def _compare(
        self, opts: Options, mask_BT: Tensor | None, starts_BT: Tensor | None, given: bool, training: bool, said: str
    ) -> None:
        mixer: Any = self.make(opts).train(training)
        rows, steps = MASK_BT.shape
        x_BTD = self.input(steps, rows).requires_grad_()
        start = {n: v.requires_grad_() for n, v in clone(self.state(mixer.eval(), rows)).items()}
        dropout, keep_BTI = getattr(mixer.train(training), "dropout", None), None
        if dropout is not None:
            keep_BTI = np.ones((rows, steps, mixer.out_proj.in_features))

            def drawn(module: nn.Dropout, inputs: tuple[Tensor], _y: Tensor) -> Tensor:
                kept = F.dropout(torch.ones_like(inputs[0]), module.p, module.training)  # y / input says nothing of a 0
                keep_BTI[...] = kept.movedim(mixer.time, 1)
                return inputs[0] * kept

            dropout.register_forward_hook(drawn)
        y_BTD, end = mixer(x_BTD, start if given else None, mask_BT, starts_BT)
        if keep_BTI is not None and training and mixer.config.dropout:
            assert 0.0 in keep_BTI, "dropout left everything"
        on_BT = torch.ones(rows, steps, dtype=torch.bool) if mask_BT is None else mask_BT
        g_out = torch.randn_like(y_BTD) * on_BT[..., None]
        g_end = {n: torch.randn_like(v) for n, v in end.items()}
        names = [*(n for n, _ in mixer.named_parameters()), "x", *(f"start {n}" for n in start)]
        leaves = [*mixer.parameters(), x_BTD, *start.values()]
        loss = (y_BTD * g_out).sum() + sum((end[n] * g_end[n]).sum() for n in end)
        gradients = dict(zip(names, torch.autograd.grad(loss, leaves, allow_unused=True), strict=True))

        p = {n: v.detach().double().numpy() for n, v in mixer.state_dict().items()}
        grads = {n: np.zeros_like(p[n]) for n, _ in mixer.named_parameters()}
        expected = {n: np.zeros_like(v.detach().numpy()) for n, v in {"y": y_BTD, "x": x_BTD}.items()}
        expected |= {f"end {n}": np.zeros(v.shape) for n, v in end.items()}
        expected |= {f"start {n}": np.zeros(v.shape) for n, v in start.items()}
        for b in range(rows):
            on = on_BT[b].numpy()
            starts = np.zeros(steps, bool) if starts_BT is None else starts_BT[b].numpy()
            begins = np.diff(np.cumsum(starts)[on], prepend=0) > 0  # at this position or at a masked one just before it
            begins[0] |= not given
            at_start: Arrays = {n: v[b].detach().numpy() for n, v in start.items()}
            known = config_to_dict(mixer.config), p, x_BTD[b].detach().numpy()[on], at_start, begins
            if keep_BTI is None:
                row = self.row(*known)  # type: ignore[attr-defined]
            else:
                row = Row(self, Form.of(mixer), *known, keep_BTI[b][on])  # type: ignore[arg-type]
            expected["y"][b, on] = row.out
            of_x, of_start = row.backward(grads, g_out[b].numpy()[on], {n: g[b].numpy() for n, g in g_end.items()})
            expected["x"][b, on] = of_x
            for n, value in row.end.items():
                expected[f"end {n}"][b], expected[f"start {n}"][b] = value, of_start[n]
        results = {
            **{f"end {n}": v.detach() for n, v in end.items()},
            "y": torch.where(on_BT[..., None], y_BTD, 0).detach(),
        }
        for name, gradient in {**results, **gradients}.items():
            _assert_equal(name, gradient, {**expected, **grads}[name], said)


def _assert_equal(name: str, tensor: Tensor | None, expected: np.ndarray, said: str) -> None:
    size = float(np.linalg.norm(expected))
    actual = np.zeros_like(expected) if tensor is None else tensor.numpy()
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape} ({said})"
    error = float(np.linalg.norm(actual - expected))
    what = name if name in ("y", "x") or name.startswith(("end", "start")) else f"the gradient of {name}"
    left_out = ", as the test's derivative leaves it out" if what != name and not size else ""
    why = left_out or rounded(error / max(size, 1e-12))
    assert error <= LIMIT * size or max(error, size) < 1e-12, (
        f"{what} differs from the equation by {error:.1e}, where its norm is {size:.1e}{why} ({said})"
    )
