"""GRU, LSTM and sLSTM with their input product, and recurrences of slots, microseconds per time step.

On a GPU, torch.nn's run in float16, the only dtype with cuDNN's persistent kernels; FlashRNN's GRU is not fused. The GRU with
the reset gate before the product has no peer. sLSTM has one head or four, like FlashRNN's. E2 and E23: the recurrence of 8
slots, beside E1's at 1536.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from elman_baselines.rnn import gru, lstm, slstm
from elman_baselines.rnn.op import slstm_gates
from harness import Row, Run, Setting, leaves
from torch import Tensor

from .dense import Inputs, flashrnn, kernel_of

KINDS = {"gru": (gru, torch.nn.GRU, 1), "lstm": (lstm, torch.nn.LSTM, 2)}


class Layer:
    """One layer with the weights of torch.nn's."""

    def __init__(self, setting: Setting, kind: str, steps: int, batch: int, width: int) -> None:
        self.setting, self.kind = setting, kind
        self.run, module, self.states = KINDS[kind]
        self.theirs = module(width, width, device=setting.device)
        self.x = setting.randn(steps, batch, width)
        self.h0 = [torch.zeros(batch, width, device=setting.device) for _ in range(self.states)]

    def ours(self) -> Run:
        weights = {n: p.to(self.setting.dtype) for n, p in self.theirs.named_parameters()}
        of = leaves(u=self.x, **weights)
        return Run(lambda: self.run(of["u"], tuple(of.values())[1:], *self.h0)[0], of)

    def torch_nn(self) -> Run:
        dtype = torch.float32 if self.setting.tiny else torch.float16
        layer = self.theirs.to(dtype)
        of = {**leaves(u=self.x.to(dtype)), **dict(layer.named_parameters())}
        return Run(lambda: layer(of["u"])[0], of, steps=True)

    def flashrnn(self) -> Run:
        """FlashRNN's LSTM equals ours and torch.nn's; its GRU has four biases and another order of gates."""
        weights = {n: p.detach() for n, p in self.theirs.to(self.setting.dtype).named_parameters()}
        r, v = (weights[f"weight_{n}_l0"] for n in ("hh", "ih"))
        width, lstm = r.shape[1], self.kind == "lstm"
        b = weights["bias_ih_l0"] + weights["bias_hh_l0"] if lstm else self.x.new_zeros(4 * width)
        run = flashrnn(self.kind, self.x, r.view(-1, width, width), v=v, b=b)
        return Run(run.forward, run.leaves, run.as_ours, peer_of="ours" if lstm else "")

    def reset_before(self) -> Run:
        width = self.x.shape[-1]
        drawn = [
            self.setting.randn(*s) * (0.45 / width**0.5) for s in ((3 * width, width), (3 * width, width), (3 * width,))
        ]
        of = leaves(u=self.x, v=drawn[0], w=drawn[1], b=drawn[2])
        return Run(lambda: gru(of["u"], tuple(of.values())[1:], *self.h0)[0], of)


class SLSTM:
    """One recurrence of sLSTM, with sigmoid forget gates near 1."""

    def __init__(self, setting: Setting, steps: int, batch: int, width: int, heads: int) -> None:
        self.kernel, self.columns, self.heads = slstm_gates, width // heads, heads
        self.x, self.b = setting.randn(steps, batch, width), setting.randn(4 * width)
        self.b.view(heads, 4, -1)[:, 1] += 3
        self.v, self.w = (setting.randn(4 * width, n) * (0.45 / n**0.5) for n in (width, self.columns))
        self.zeros = [torch.zeros(batch, width, device=setting.device)] * 4

    def ours(self) -> Run:
        of = leaves(u=self.x, v=self.v, w=self.w)
        return Run(lambda: slstm(self.kernel, of["u"], (of["v"], of["w"], self.b), self.zeros)[0], of)

    def flashrnn(self) -> Run:
        return flashrnn("slstm", self.x, self.w.view(self.heads, 4, -1, self.columns), v=self.v, b=self.b)


def slots(setting: Setting, steps: int, batch: int, width: int) -> dict[str, Callable[[], Run]]:
    def e2() -> Run:
        of = leaves(
            u=setting.randn(steps, batch, 8 * width), w=setting.randn(8, width, width) * (0.45 / width**0.5),
            h0=setting.randn(batch, 8 * width, dtype=torch.float32),
        )  # fmt: skip
        kernel = kernel_of("e2")
        return Run(lambda: kernel(*of.values())[0], of)

    def e23() -> Run:
        from elman_e23.op import SLOTS
        from elman_e23.op import e23 as run

        of = leaves(
            x=setting.randn(steps, batch, width), w=setting.randn(width, width) * (0.45 / width**0.5),
            v=setting.randn(width, width) * (0.45 / width**0.5), h0=setting.randn(batch, width, dtype=torch.float32) * 0,
            tape=setting.randn(batch, SLOTS, width, dtype=torch.float32),
        )  # fmt: skip

        def forward() -> Tensor:
            return run(*of.values(), of["tape"][0])[0]

        return Run(forward, of)

    def e1() -> Run:
        return Inputs(setting, steps, batch, 3 * width).ours(kernel_of("e1"))

    return {"e2 with 8 slots": e2, "e23 with 8 slots": e23, "e1 of three times the width": e1}


def rows(setting: Setting) -> Iterator[Row]:
    steps, batch = (8, 4) if setting.tiny else (512, 32)
    for kind in KINDS:
        for width in (16,) if setting.tiny else (512, 768, 1024):
            layer = Layer(setting, kind, steps, batch, width)
            ours: dict[str, Callable[[], Run]] = {"ours": layer.ours}
            if kind == "gru":
                ours["reset before"] = layer.reset_before
            peers: dict[str, Callable[[], Run]] = {f"torch.nn.{kind.upper()}": layer.torch_nn}
            if not setting.tiny and width != 768:
                peers["FlashRNN fused"] = layer.flashrnn
            yield from setting.contest(ours, peers, per=steps, layer=kind, T=steps, B=batch, d=width)
    for heads in (1, 4):
        for width in (16,) if setting.tiny else (512, 768, 1024):
            of = SLSTM(setting, steps, batch, width, heads)
            sizes = {"T": steps, "B": batch, "d": width, "heads": heads}
            yield from setting.contest(
                {"ours": of.ours}, {"FlashRNN fused": of.flashrnn}, per=steps, layer="slstm", **sizes
            )
    width = 16 if setting.tiny else 512
    yield from setting.contest(slots(setting, steps, batch, width), {}, per=steps, T=steps, B=batch, d=width)
