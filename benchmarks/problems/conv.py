"""The causal convolution of a layer, microseconds: four taps, no bias, with and without SiLU; x in 16 bits, weights in float32.

x is (B, T, C), whole or the first C columns of a wider tensor, as a joined product of several maps leaves it. `copy` reads and
writes the bytes of x and y (backward: of x and both gradients). In `half padding`, half of each row is padding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from importlib import import_module

import torch
from harness import Row, Run, Setting, leaves

from elman_core.kernels.causal_conv.op import causal_conv

SHAPES = [(64, 512, 3072), (64, 512, 2560), (32, 512, 1024), (4, 4096, 2048), (1, 16384, 2048)]
BESIDE = 1280  # columns beside x


def contenders(
    setting: Setting, shape: tuple[int, int, int], sliced: bool, silu: bool
) -> tuple[dict[str, Callable[[], Run]], dict[str, Callable[[], Run]]]:
    B, T, C = shape
    x, weight = setting.randn(B, T, C + BESIDE * sliced), 0.5 * setting.randn(C, 4, dtype=torch.float32)
    activation = "silu" if silu else None

    def run(call: Callable[..., torch.Tensor]) -> Run:
        of = leaves(x=x[..., :C], weight=weight)
        return Run(lambda: call(*of.values()), of)

    def ours() -> Run:
        return run(lambda x, w: causal_conv(x.transpose(0, 1), w, silu=silu)[0].transpose(0, 1))

    def half() -> Run:
        mask = (torch.arange(T, device=setting.device) < T // 2)[:, None].repeat(1, B)
        return run(lambda x, w: causal_conv(x.transpose(0, 1), w, mask_TB=mask, silu=silu)[0].transpose(0, 1))

    def causal_conv1d() -> Run:
        call = import_module("causal_conv1d").causal_conv1d_fn
        return run(lambda x, w: call(x.transpose(1, 2), w, activation=activation).transpose(1, 2))

    def fla() -> Run:
        call = import_module("fla.modules.causal_conv1d").causal_conv1d
        return run(lambda x, w: call(x, w, activation=activation)[0])

    def torch_nn() -> Run:
        def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = torch.nn.functional.conv1d(x.transpose(1, 2), w[:, None].to(x.dtype), groups=C, padding=3)[..., :T]
            return (torch.nn.functional.silu(y) if silu else y).transpose(1, 2)

        return run(call)

    padded = {} if sliced or not silu else {"half padding": half}
    return {"ours": ours, **padded}, {"causal-conv1d": causal_conv1d, "fla": fla, "torch conv1d": torch_nn}


def rows(setting: Setting) -> Iterator[Row]:
    for shape in [(2, 8, 32)] if setting.tiny else SHAPES:
        copies = [
            torch.empty(2, half * math.prod(shape) // 2, dtype=setting.dtype, device=setting.device) for half in (2, 3)
        ]
        times = [setting.us(lambda x=x: x[0].copy_(x[1])) for x in copies]  # type: ignore[misc]
        yield {"who": "copy", "shape": shape, **dict(zip(("forward", "backward"), times, strict=True))}
        for sliced, silu in itertools.product((True, False), repeat=2):
            yield from setting.contest(*contenders(setting, shape, sliced, silu), shape=shape, sliced=sliced, silu=silu)
