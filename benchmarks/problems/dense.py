"""Dense recurrences, microseconds per time step.

Ours is the whole op as training calls it. Forward: exchange buffers cleared, y (of E1 with its gate) and the final state
written. Backward: all gradients (u, z, W, h_0), with the one product for dW. `plain` is the peers' function, h = tanh(W h +
u), y = h; `e42 tied` is what E42 trains with, W (h + x) + b. Other dense variants are timed if --only names them.

Peers: one cuBLAS product and one pointwise kernel a step; cuDNN's RNN, whose figures include the product W_x x; FlashRNN's
Elman, which compiles a kernel for each shape and whose backward waits for the device before its products. torch.nn.LSTM does
four times the work. Peers that launch step by step are also recorded as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import HERE, Row, Run, Setting, leaves
from torch import Tensor

from elman_core.kernels import DenseKernel
from elman_core.nn import dense_reference
from elman_core.registry import list_variants, resolve

from . import flashrnn_cuda13

SHAPES = [(512, 32), (512, 64), (768, 32), (1024, 32), (1024, 64), (1280, 32), (1536, 32), (1536, 64), (2048, 32)]
LARGE = [(1024, 256), (1280, 256), (4096, 32)]
FLASHRNN_SHAPES = [(512, 32), (1024, 32)]
T = 512


@dense_reference
def plain_reference(a: Tensor, _h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(a)
    return h, h


plain = DenseKernel(
    "plain", header=HERE / "plain_cell.h", cell="elman::plain::Cell", reference=plain_reference,
    update=lambda a, _h: torch.tanh(a), readout=lambda h, _h: h,
)  # fmt: skip


def kernel_of(name: str) -> DenseKernel:
    """The kernel of a dense variant."""
    found = resolve(name)
    kernel = getattr(found.variant.branch(0)(64, found.config, 0), "kernel", None)
    if not isinstance(kernel, DenseKernel):
        raise SystemExit(f"{name} has no dense recurrence")
    return kernel


class Inputs:
    """u, W and h_0 of one shape; ours and the peers compute on the same numbers."""

    def __init__(self, setting: Setting, steps: int, batch: int, width: int) -> None:
        self.setting, self.steps, self.batch, self.width = setting, steps, batch, width
        self.u, self.w = setting.randn(steps, batch, width), setting.randn(width, width) * (0.45 / width**0.5)
        self.h0 = setting.randn(batch, width, dtype=torch.float32) * 0

    def ours(self, kernel: DenseKernel, dtype: torch.dtype | None = None) -> Run:
        extras = {e: self.setting.randn(*self.u.shape, dtype=dtype) for e in kernel.cell.extras}
        of = leaves(u=self.u.to(dtype or self.u.dtype), **extras, w=self.w.to(dtype or self.w.dtype), h0=self.h0)
        return Run(lambda: kernel(*of.values())[0], of, steps=True)

    def tied(self, kernel: DenseKernel) -> Run:
        of = leaves(x=self.u, w=self.w, h0=self.h0, b=self.setting.randn(self.width, dtype=torch.float32))
        return Run(lambda: kernel(of["x"], of["w"], of["h0"], v=of["w"], b=of["b"], silu=True)[0], of, steps=True)

    def cublas(self) -> Run:
        """Per step, a product that adds u, and tanh; backward: two pointwise kernels and a product."""
        of = leaves(u=self.u, w=self.w)
        return Run(lambda: PerStep.apply(of["u"], of["w"]), of, peer_of="plain", steps=True)

    def torch_nn(self, kind: str, dtype: torch.dtype) -> Run:
        """cuDNN's on a GPU. Its input matrix is the identity, so it computes the function of `plain`."""
        from elman_baselines.rnn.op import packed_for_cudnn

        layer = getattr(torch.nn, kind)(self.width, self.width, device=self.setting.device, dtype=dtype)
        with torch.no_grad():
            if kind == "RNN":
                for name, value in (
                    ("weight_ih_l0", torch.eye(self.width)),
                    ("weight_hh_l0", self.w),
                    ("bias_ih_l0", 0),
                    ("bias_hh_l0", 0),
                ):
                    getattr(layer, name).copy_(torch.as_tensor(value))
            if (
                dtype == torch.bfloat16
            ):  # flatten_parameters does nothing for it: cuDNN would be given copies at every call
                weights = list(layer.parameters())
                for mine, packed in zip(weights, packed_for_cudnn(weights), strict=True):
                    mine.data = packed
        of = {
            "u": leaves(u=self.u.to(dtype))["u"],
            "w": layer.weight_hh_l0,
            **{n: p for n, p in layer.named_parameters() if n != "weight_hh_l0"},
        }
        return Run(lambda: layer(of["u"])[0], of, peer_of="plain" if kind == "RNN" else "", steps=True)

    def flashrnn(self) -> Run:
        return flashrnn("elman", self.u, self.w[None])


class PerStep(torch.autograd.Function):
    """h = tanh(W h + u) with one product per step."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, w: Tensor) -> Tensor:
        history = torch.zeros(u.shape[0] + 1, *u.shape[1:], device=u.device, dtype=u.dtype)
        for t in range(u.shape[0]):
            torch.addmm(u[t], history[t], w.t(), out=history[t + 1])
            history[t + 1].tanh_()
        ctx.save_for_backward(history, w)
        return history[1:]

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        history, w = ctx.saved_tensors
        da, r = torch.empty_like(gy), torch.zeros_like(gy[0])
        for t in range(gy.shape[0] - 1, -1, -1):
            r.add_(gy[t])
            torch.ops.aten.tanh_backward.grad_input(r, history[t + 1], grad_input=da[t])
            torch.mm(da[t], w, out=r)
        return da, torch.mm(da.flatten(0, 1).t(), history[:-1].flatten(0, 1))


def flashrnn(function: str, x_TBI: Tensor, w_Gdd: Tensor, v: Tensor | None = None, b: Tensor | None = None) -> Run:
    """FlashRNN's fused recurrence; with v, behind its input product. w_Gdd, v: gate by gate; w (H, G, c, c), v (H G c, I) and b
    (H G c) have heads, head by head.

    Raises:
        ImportError: it is not installed. RuntimeError: its kernels do not compile, or no launch fits.
    """
    from flashrnn import flashrnn as run

    w_HGcc = w_Gdd if w_Gdd.dim() == 4 else w_Gdd[None]
    heads, gates, width = w_HGcc.shape[:3]

    def by_gate(x: Tensor) -> Tensor:
        return x.unflatten(0, (heads, gates, -1)).transpose(0, 1)

    given = {} if v is None else {"v": by_gate(v).flatten(0, 2).contiguous()}
    of = leaves(u=x_TBI.transpose(0, 1).contiguous(), w=w_HGcc.transpose(0, 1).contiguous(), **given)
    bias = by_gate(x_TBI.new_zeros(heads * gates * width) if b is None else b.to(x_TBI.dtype)).contiguous()

    def forward() -> Tensor:
        wx = (F.linear(of["u"], of["v"]) if v is not None else of["u"]).view(*of["u"].shape[:2], gates, heads, width)
        return run(wx, of["w"], bias, function=function, backend="cuda_fused", dtype="bfloat16")[0]

    flashrnn_cuda13.prepare()
    try:
        y = forward()
    except RuntimeError as error:
        raise RuntimeError(flashrnn_cuda13.why_not(error) or str(error)) from error
    to_ours: dict[str, Callable[[Tensor], Tensor]] = {
        "y": lambda y: (y[0] if y.dim() == 5 else y).flatten(2).transpose(0, 1),
        "u": lambda g: g.transpose(0, 1),
        "w": lambda g: g.transpose(0, 1).reshape(-1, width),
        "v": lambda g: g.unflatten(0, (gates, heads, -1)).transpose(0, 1).flatten(0, 2),
    }
    del y
    return Run(forward, of, to_ours, peer_of="plain" if function == "elman" else "ours")


def rows(setting: Setting) -> Iterator[Row]:
    from elman_e1.op import e1
    from elman_e42.op import e42

    others = [name for name in setting.only if name in list_variants() and name not in ("e1", "e42")]
    for width, batch in [(16, 4)] if setting.tiny else SHAPES + LARGE:
        steps = 8 if setting.tiny else T
        made = Inputs(setting, steps, batch, width)
        ours: dict[str, Callable[[], Run]] = {
            "e1": partial(made.ours, e1), "e42": partial(made.ours, e42), "plain": partial(made.ours, plain),
            "e42 tied": partial(made.tied, e42), "plain fp16": partial(made.ours, plain, torch.float16),
            **{name: partial(made.ours, kernel_of(name)) for name in others},
        }  # fmt: skip
        peers: dict[str, Callable[[], Run]] = {"cuBLAS per step": made.cublas}
        for kind in ("RNN", "LSTM"):
            for dtype in {setting.dtype, torch.float32 if setting.tiny else torch.float16}:
                peers[f"torch.nn.{kind} {str(dtype).removeprefix('torch.')}"] = partial(made.torch_nn, kind, dtype)
        if setting.tiny:
            del ours["plain fp16"]
        elif (width, batch) in FLASHRNN_SHAPES:
            peers["FlashRNN fused"] = made.flashrnn
        yield from setting.contest(ours, peers, per=steps, T=steps, B=batch, d=width)
