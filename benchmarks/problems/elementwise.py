"""Elementwise recurrences, microseconds of a whole sequence.

`gate` is h = f h' + (1 - f) x, y = h; fla's fused_recurrent_hgrn is given log f and (1 - f) x, which are not timed. `layer` is
E65 after the map that makes its two streams; pararnn-torch's ParaRNN over ParaNLRU is the same map and recurrence without the
self-gate, solved by Newton's method in parallel over time; `the map alone` is the product that both contain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from harness import HERE, Row, Run, Setting, leaves
from torch import Tensor, nn

from elman_core.kernels import ElementwiseKernel
from elman_core.nn import gate, linears
from elman_core.registry import get_variant

VARIANTS = ("diagonal", "e34", "e61", "e62", "e64", "e65", "e67", "e68")


def plain_step(h: Tensor, a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    keep, write = gate(a)
    h = keep * h + write * x
    return h, h


plain_gate = ElementwiseKernel("plain_gate", header=HERE / "plain_gate_cell.h", step=plain_step, streams=("a", "x"))


class Inputs:
    def __init__(self, setting: Setting, batch: int, steps: int, width: int) -> None:
        self.setting, self.shape = setting, (steps, batch, width)
        self.a, self.x = setting.randn(*self.shape), setting.randn(*self.shape)

    def ours(self, kernel: ElementwiseKernel) -> Run:
        # Slices of one tensor, as the joined product of a mixer leaves them.
        count = len(kernel.cell.streams)
        parts = torch.cat(
            [self.a, self.x, *(self.setting.randn(*self.shape) for _ in range(count - 2))][:count], -1
        ).split(self.shape[-1], -1)
        vectors = {n: torch.full(self.shape[-1:], 0.5, device=self.setting.device) for n in kernel.cell.vectors}
        of = leaves(
            **dict(zip(kernel.cell.streams, parts, strict=True)),
            **vectors,
            h0=torch.zeros(self.shape[1:], device=self.setting.device),
        )
        return Run(lambda: kernel(*of.values())[0], of)

    def fla(self) -> Run:
        from fla.ops.hgrn import fused_recurrent_hgrn

        a, x = self.a.transpose(0, 1), self.x.transpose(0, 1)
        of = leaves(write=x * torch.sigmoid(-a), log=F.logsigmoid(a))
        return Run(
            lambda: fused_recurrent_hgrn(*of.values())[0], of, {"y": lambda y: y.transpose(0, 1)}, peer_of="gate"
        )

    def layer(self) -> Run:
        from elman_e65.op import e65

        width = self.shape[-1]
        maps = [nn.Linear(width, width, device=self.setting.device, dtype=self.setting.dtype) for _ in range(2)]
        delta, h0 = (torch.full(s, 0.5, device=self.setting.device) for s in ((width,), self.shape[1:]))
        of = {
            **leaves(x=self.x, delta=delta, h0=h0),
            **{f"{i}.{n}": p for i, m in enumerate(maps) for n, p in m.named_parameters()},
        }
        return Run(lambda: e65(*linears(maps, of["x"]), of["delta"], of["h0"])[0], of)

    def pararnn(self) -> Run:
        from pararnn import ParaRNN
        from pararnn.cells import ParaNLRU

        width = self.shape[-1]
        model = ParaRNN(ParaNLRU(width, width), solver="newton").to(self.setting.device, self.setting.dtype)
        of = {**leaves(x=self.x.transpose(0, 1)), **dict(model.named_parameters())}
        return Run(lambda: model(of["x"]), of, peer_of="")  # without E65's self-gate

    def map_alone(self) -> Run:
        linear = nn.Linear(self.shape[-1], 2 * self.shape[-1], device=self.setting.device, dtype=self.setting.dtype)
        of = {**leaves(x=self.x), **dict(linear.named_parameters())}
        return Run(lambda: linear(of["x"]), of)


def rows(setting: Setting) -> Iterator[Row]:
    for batch, steps, width in [(4, 8, 16)] if setting.tiny else [(32, 512, 1024), (8, 4096, 1024)]:
        made = Inputs(setting, batch, steps, width)
        ours: dict[str, Callable[[], Run]] = {
            "gate": partial(made.ours, plain_gate),
            "layer": made.layer,
            "the map alone": made.map_alone,
        }
        for name in VARIANTS:
            form = get_variant(name).mixer.form_of(get_variant(name).make_config())
            ours[name] = partial(made.ours, form.kernel)
        peers = {"fla fused_recurrent_hgrn": made.fla, "pararnn-torch ParaNLRU layer": made.pararnn}
        yield from setting.contest(ours, peers, B=batch, T=steps, d=width)
