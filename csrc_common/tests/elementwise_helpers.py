"""Elementwise modules through the launcher, and the same recurrence in PyTorch. T time, B batch, d width, S states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from opened import Opened
from torch import Tensor

from elman_core.kernels.elementwise.spec import FAMILY

Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], Tensor]]


@dataclass
class Inputs:
    """Of one problem. Streams (T, B, d), vectors (d,), h0 and g_last (S, B, d), initial (S, d), marks (T, B) uint8."""

    streams: list[Tensor]
    vectors: list[Tensor]
    h0: Tensor
    gy: Tensor
    g_last: Tensor
    mask: Tensor | None = None
    starts: Tensor | None = None
    initial: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """What has a gradient."""
        found = {f"stream {k}": x for k, x in enumerate(self.streams)}
        found |= {f"vector {k}": x for k, x in enumerate(self.vectors)}
        return found | {"h0": self.h0} | ({} if self.initial is None else {"initial": self.initial})


@dataclass(frozen=True)
class Problem:
    steps: int
    batch: int
    width: int
    masked: bool = False
    starts: bool = False
    learned: bool = False  # the initial state, of documents that start
    sliced: bool = False  # streams are slices of one tensor, and so are their gradients

    def inputs(self, counts: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu") -> Inputs:
        """Random ones, of a cell with these numbers of streams, vectors and states."""
        streams, vectors, states = counts
        steps, rows, width = self.steps, self.batch, self.width
        generator = torch.Generator().manual_seed(steps * 1000 + rows * 100 + width)
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def random(*shape: int, of: torch.dtype = wide) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(of).to(device)

        def marks(share: float) -> Tensor:
            return (torch.rand(steps, rows, generator=generator) < share).to(torch.uint8).to(device)

        if self.sliced:
            made = list(random(steps, rows, width * streams, of=dtype).split(width, -1))
        else:
            made = [random(steps, rows, width, of=dtype) for _ in range(streams)]
        return Inputs(
            made,
            [random(width) * 0.5 for _ in range(vectors)],
            random(states, rows, width),
            random(steps, rows, width, of=dtype),
            random(states, rows, width),
            marks(0.7) if self.masked else None,
            marks(0.15) if self.starts else None,
            random(states, width) if self.learned else None,
        )


class Module(Opened):
    family = FAMILY

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        *self.counts, self.interval = (self.library.ask("declares", i) for i in range(4))

    def describe(self, inputs: Inputs) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The arguments of both directions, and the outputs among them, NaN for now."""
        first = inputs.streams[0]
        steps, rows, width = first.shape
        states, dtype = len(inputs.h0), inputs.h0.dtype

        def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.full(shape, torch.nan, dtype=of, device=first.device)

        outputs = {
            "y": empty(steps, rows, width, of=first.dtype),
            "last": empty(states, rows, width),
            "checkpoints": empty(-(-steps // self.interval), states, rows, width),
            "dstream": empty(steps, rows, width * len(inputs.streams), of=first.dtype),
            "dh0": empty(states, rows, width),
            "dvector": empty(len(inputs.vectors), rows, width),
            "dinitial": empty(states, rows, width),
        }
        given = {name: getattr(inputs, name) for name in ("gy", "h0", "g_last", "mask", "starts", "initial")}
        given |= {"stream": inputs.streams, "vector": inputs.vectors, **outputs}
        return given | {"dstream": outputs["dstream"].split(width, -1)}, outputs

    def run(self, inputs: Inputs) -> dict[str, Tensor]:
        """Forward and backward: y, last and the gradients of `inputs.tensors()`."""
        call, outputs = self.describe(inputs)
        for direction in ("forward", "backward"):
            said = self.call(direction, call)
            assert said is None, said
        width, shares = inputs.streams[0].shape[2], outputs["dvector"].sum(1)
        found = {"y": outputs["y"], "last": outputs["last"], "d h0": outputs["dh0"]}
        found |= {f"d stream {k}": x for k, x in enumerate(outputs["dstream"].split(width, -1))}
        found |= {f"d vector {k}": x for k, x in enumerate(shares)}
        return found | ({} if inputs.initial is None else {"d initial": outputs["dinitial"].sum(1)})


def reference(step: Step, given: Inputs, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """What `Module.run` returns, by a loop over time in `dtype` and autograd."""
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in given.tensors().items()}
    streams = [x for name, x in leaves.items() if name.startswith("stream")]
    vectors = [x for name, x in leaves.items() if name.startswith("vector")]
    h, ys = list(leaves["h0"]), []
    initial = leaves.get("initial", torch.zeros_like(leaves["h0"][:, 0]))
    for t in range(streams[0].shape[0]):
        if given.starts is not None:
            begins = given.starts[t].bool()[:, None]
            h = [torch.where(begins, r, x) for r, x in zip(initial, h, strict=True)]
        new, y = step(h, [x[t] for x in streams], vectors)
        if given.mask is not None:
            kept = given.mask[t].bool()[:, None]
            new, y = [torch.where(kept, n, x) for n, x in zip(new, h, strict=True)], torch.where(kept, y, 0)
        h = new
        ys.append(y)
    y, last = torch.stack(ys), torch.stack(h)
    loss = (y * given.gy.to(dtype)).sum() + (last * given.g_last.to(dtype)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    found = {"y": y.detach(), "last": last.detach()}
    return found | {f"d {name}": g for name, g in zip(leaves, grads, strict=True)}


def too_far(
    found: dict[str, Tensor], single: dict[str, Tensor], exact: dict[str, Tensor], more: float = 0.0
) -> dict[str, tuple[float, float]]:
    """Errors above twice those of PyTorch in the same dtypes plus 4 eps, and the limit: |x - exact| / |exact| of each tensor.

    Args:
        single: the reference in float32 (float64 for float64), rounded to the dtypes of `found` here.
        more: what the arithmetic may err beyond that of float32.
    """
    assert found.keys() == single.keys() == exact.keys()
    errors = {}
    for name, x in found.items():
        size = exact[name].norm().clamp(min=1e-30)
        error, usual = (float((v.double() - exact[name]).norm() / size) for v in (x, single[name].to(x.dtype)))
        limit = 2 * usual + 4 * torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps + more
        if not error <= limit:
            errors[name] = (error, limit)
    return errors
