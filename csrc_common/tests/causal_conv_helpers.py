"""Modules of the causal convolution through the launcher, and the same sum written out. T time, B batch, C channels, K taps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from opened import Opened
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    steps: int
    batch: int
    width: int
    taps: int = 4
    silu: bool = True
    carried: bool = True  # a window comes in, and a gradient of the last one
    masked: bool = False
    starts: bool = False
    sliced: bool = False  # x, and its gradient, are slices of a wider tensor

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.steps * 1000 + self.batch * 100 + self.width)

        def random(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(*shape, generator=generator).to(of).to(device)

        def marks(share: float) -> Tensor:
            return (torch.rand(self.steps, self.batch, generator=generator) < share).to(torch.uint8).to(device)

        steps, rows, width, window = self.steps, self.batch, self.width, (self.batch, self.taps - 1, self.width)
        x = (
            random(steps, rows, 3 * width, of=dtype)[..., width : 2 * width]
            if self.sliced
            else random(steps, rows, width, of=dtype)
        )
        return {
            "x": x,
            "weight": random(width, self.taps) * 0.5,
            "bias": random(width) if self.silu else None,
            "window": random(*window) if self.carried else None,
            "dy": random(steps, rows, width, of=dtype),
            "dlast": random(*window) if self.carried else None,
            "mask": marks(0.6) if self.masked else None,
            "starts": marks(0.1) if self.starts else None,
        }


class Module(Opened):
    family = "causal_conv"

    def describe(self, given: dict[str, Any], silu: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The arguments of both directions, and the outputs among them, NaN for now."""
        x, taps = given["x"], given["weight"].shape[1]
        steps, rows, width = x.shape

        def empty(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
            return torch.full(shape, torch.nan, dtype=of, device=x.device)

        outputs = {
            "y": empty(steps, rows, width, of=x.dtype),
            "last": empty(rows, taps - 1, width),
            "dx": empty(steps, rows, x.stride(1), of=x.dtype)[..., :width],
            "dwindow": empty(rows, taps - 1, width),
            "shares": empty(self.library.ask("shares", steps, rows, width), taps + 1, width),
        }
        return {**given, **outputs, "silu": silu}, outputs

    def run(self, given: dict[str, Any], silu: bool) -> dict[str, Tensor]:
        call, outputs = self.describe(given, silu)
        for direction in ("forward", "backward"):
            said = self.call(direction, call)
            assert said is None, said
        sums = outputs["shares"].sum(0)
        found = {name: outputs[name] for name in ("y", "last", "dx")} | {"dweight": sums[:-1].t(), "dbias": sums[-1]}
        return found | ({"dwindow": outputs["dwindow"]} if given["window"] is not None else {})


def reference(given: dict[str, Any], silu: bool, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """What `Module.run` returns, row by row and step by step in `dtype`, by autograd."""
    x, weight = (given[name].detach().to(dtype, copy=True).requires_grad_() for name in ("x", "weight"))
    (steps, rows, width), taps = x.shape, weight.shape[1]
    bias = (torch.zeros(width) if given["bias"] is None else given["bias"]).to(x).detach().requires_grad_()
    window = (torch.zeros(rows, taps - 1, width) if given["window"] is None else given["window"]).to(x)
    window = window.detach().requires_grad_()
    y, last = [[x.new_zeros(width)] * rows for _ in range(steps)], []
    for b in range(rows):
        seen = list(window[b])
        for t in range(steps):
            if given["starts"] is not None and given["starts"][t, b]:
                seen = [x.new_zeros(width)] * (taps - 1)
            if given["mask"] is None or given["mask"][t, b]:
                seen.append(x[t, b])
                z = sum((weight[:, j] * u for j, u in enumerate(seen[-taps:])), bias)
                y[t][b] = z * torch.sigmoid(z) if silu else z
        last.append(torch.stack(seen[len(seen) - taps + 1 :]))
    made, kept = torch.stack([torch.stack(row) for row in y]), torch.stack(last)
    loss = (made * given["dy"].to(dtype)).sum()
    if given["dlast"] is not None:
        loss = loss + (kept * given["dlast"].to(dtype)).sum()
    grads = torch.autograd.grad(loss, (x, weight, bias, window), materialize_grads=True)
    found = {"y": made.detach(), "last": kept.detach()}
    found |= dict(zip(("dx", "dweight", "dbias"), grads, strict=False))
    return found | ({"dwindow": grads[3]} if given["window"] is not None else {})
