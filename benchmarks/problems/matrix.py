"""Recurrences of matrix states, microseconds for a whole sequence, forward as training runs it and backward.

`matrix`: every cell with the maps that its variant trains with, inputs as `elman verify` draws them; E88 without its maps (q,
k, v and the decay given) and from packed projections, with SiLU, L2 norm and decay inside ("e88 packed"); `large`: with write
gate and a separate V, with and without tanh. `matrix-peers`: E97 beside Emender's Triton kernels and M²RNN beside xma's, from
checkouts that EMENDER_TREE and XMA_TREE name; both keep their states in bfloat16. xma tunes its kernels over warps and stages,
here up to 8 and 2, a third of its list. `rules`: a decoding step of the linear rules, ours with the cells of the tests and
fla's fused_recurrent functions, from CUDA graphs of 64 steps; gates are given. They are compared after one step.
`rules-whole`: the rules with a decay per channel, over 32K and 128K tokens with the heads of their papers; ours includes the
decay's exponential, fla's chunks use their fast form for decays that are bounded below.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from elman_e14.op import e14
from elman_e70.op import e70
from elman_e73 import op as e73
from elman_e75.op import e75
from elman_e88.op import e88
from elman_e97.op import e97, e97_raw
from harness import HERE, Row, Run, Setting, agreement, captured, leaves
from torch import Tensor

from elman_core.kernels import Maps, MatrixKernel
from elman_core.kernels.matrix.problems import case
from elman_core.kernels.matrix.spec import FAMILY

CELLS = {
    "e75": e75, "e70": e70, "e14": e14, "e73 column": e73.column, "e73 row": e73.row, "e73 full": e73.full,
    "e73 delta": e73.delta, "e97": e97, "e97 raw": e97_raw,
}  # fmt: skip
ALL = [(32, 512, 32, 16), (32, 512, 8, 32), (32, 512, 2, 64)]  # B, T, H, N
E88 = [
    *ALL, (8, 512, 83, 32), (32, 512, 24, 24), (32, 512, 8, 64), (32, 512, 4, 128), (8, 2048, 32, 16), (1, 16384, 32, 16)
]  # fmt: skip
LARGE = [(64, 512, 5, 64, 256), (64, 512, 5, 128, 256), (64, 512, 16, 64, 64)]  # with V
E97_SHAPES = [(32, 512, 32, 16), (32, 512, 32, 32), (4, 2048, 216, 32)]
M2RNN_SHAPES = [(4, 2048, 370, 370, 16, 16), (2, 2048, 759, 1, 64, 16)]  # B, T, H, heads of q and k, N, V


def drawn(setting: Setting, kernel: MatrixKernel, shape: tuple[int, ...], maps: Maps, packed: bool) -> Run:
    """A kernel with random inputs."""
    B, T, H, N = shape
    problem = case((B, T, H, N, N), setting.dtype, maps=maps, fused=packed, bare=True)
    made = FAMILY.draw(kernel.cell, problem, torch.Generator().manual_seed(0))
    inputs = {n: None if x is None else x.to(setting.device) for n, x in made.items()}
    of = {n: x.requires_grad_() for n, x in inputs.items() if x is not None and x.is_floating_point()}
    call = kernel.spec().call
    backend = "cuda" if setting.device.type == "cuda" else "reference"
    return Run(lambda: call(backend, inputs, problem.options)["o"], of)


def matrix(setting: Setting) -> Iterator[Row]:
    for B, T, H, N in [(2, 4, 2, 8)] if setting.tiny else E88:
        shape = (B, T, H, N)
        ours: dict[str, Callable[[], Run]] = {
            "e88": partial(drawn, setting, e88, shape, Maps(), False),
            "e88 packed": partial(drawn, setting, e88, shape, e88.cell.maps[0], True),
        }
        if setting.tiny or shape in ALL:
            ours |= {
                n: partial(drawn, setting, k, shape, k.cell.maps[0], n.startswith("e97")) for n, k in CELLS.items()
            }
        yield from setting.contest(ours, {}, B=B, T=T, H=H, N=N)
    for B, T, H, N, V in [(2, 4, 2, 8, 4)] if setting.tiny else LARGE:
        of = leaves(
            q=setting.randn(B, T, H, N), k=setting.randn(B, T, H, N), v=setting.randn(B, T, H, V), a=setting.randn(B, T, H),
            write=setting.randn(B, T, H), a_log_H=setting.randn(H, dtype=torch.float32),
            dt_bias_H=setting.randn(H, dtype=torch.float32) - 4,
        )  # fmt: skip

        def large(linear: bool, of: dict[str, Tensor] = of) -> Run:
            *given, a_log, dt_bias = of.values()
            named: dict[str, Any] = {"a_log_H": a_log, "dt_bias_H": dt_bias, "maps": e88.cell.maps[0]}
            return Run(lambda: e88(*given, linear_state=linear, **named)[0], of)

        ours = {"e88 large": partial(large, False), "e88 large, no tanh": partial(large, True)}
        yield from setting.contest(ours, {}, B=B, T=T, H=H, N=N, V=V)


# beside the kernels of their authors -------------------------------------------------------------------------------------


def tree(name: str) -> str:
    """A checkout of a peer.

    Raises:
        ImportError: the environment names none.
    """
    if name not in os.environ:
        raise ImportError(f"{name} names no checkout of the peer")
    return os.environ[name]


def emender(setting: Setting, x: dict[str, Tensor]) -> Run:
    """Emender's E97: w is given after its sigmoid, the decay in bf16, T first."""
    for name in ("ndm", "ndm/triton"):  # the packages themselves are not run, for they load every model
        package: Any = types.ModuleType(name.replace("/", "."))
        package.__path__ = [f"{tree('EMENDER_TREE')}/{name}"]
        sys.modules[package.__name__] = package
    module = import_module("ndm.triton.e88_triton_backward")
    gate = torch.sigmoid(x["w"].detach())
    y = leaves(**{**x, "w": gate, "decay": x["decay"].to(setting.dtype)})
    B, _, H, N = x["q"].shape
    start = torch.zeros(B, H, N, N, device=setting.device, dtype=setting.dtype)

    def forward() -> Tensor:
        q, k, erase, v, w, decay = (y[n].transpose(0, 1) for n in ("q", "k", "erase", "v", "w", "decay"))
        out = module.e88_triton(
            start, k, v, q, decay, normalize_kq=True, apply_silu_qkv=True, erase_gate=erase, value_write_gate=w
        )
        return out[0].transpose(0, 1)

    slope = gate.float() * (1 - gate.float())
    return Run(forward, y, {"w": lambda g: g * slope})


def xma(setting: Setting, x: dict[str, Tensor]) -> Run:
    """xma's M²RNN, with fewer settings to choose from."""
    sys.path.insert(0, tree("XMA_TREE"))
    within = "xma.layers.m2rnn.triton_implementation"
    forward, backward = (import_module(f"{within}.{name}") for name in ("forward", "backward"))
    for kernel in (
        forward._m2rnn_forward_triton_kernel, forward._m2rnn_forward_no_output_triton_kernel,
        backward._m2rnn_backward_triton_kernel
    ):  # fmt: skip
        kernel.configs = [c for c in kernel.configs if c.num_warps <= 8 and c.num_stages <= 2]
    op = import_module("xma.layers.m2rnn").m2rnn
    y = leaves(**{**x, "f": x["f"].to(setting.dtype)})
    return Run(lambda: op(y["q"], y["k"], y["v"], y["w"], y["f"])[0], y)


def matrix_peers(setting: Setting) -> Iterator[Row]:
    from elman_m2rnn.op import m2rnn

    for B, T, H, N in [(2, 4, 2, 8)] if setting.tiny else E97_SHAPES:
        q, k, v, w = (setting.randn(B, T, H, N) for _ in range(4))
        decay = (0.5 + 0.5 * torch.rand(B, T, H, device=setting.device)).bfloat16().float()
        x = leaves(q=q, k=k, erase=torch.sigmoid(setting.randn(B, T, H, N)), v=v, w=w, decay=decay)
        maps = Maps(("q", "k", "v"), ("q", "k"))
        run = Run(lambda x=x, maps=maps: e97(*x.values(), maps=maps)[0], x)  # type: ignore[misc]
        yield from setting.contest(
            {"ours": lambda run=run: run}, {"Emender": partial(emender, setting, x)}, cell="e97", B=B, T=T, H=H, N=N
        )  # type: ignore[misc]
    for B, T, H, G, N, V in [(2, 4, 4, 1, 8, 4)] if setting.tiny else M2RNN_SHAPES:
        q, k = (F.normalize(setting.randn(B, T, G, N), dim=-1) for _ in range(2))
        f = 1 - 0.5 * torch.rand(B, T, H, device=setting.device).square().bfloat16().float()
        w = 0.9 * torch.linalg.qr(setting.randn(H, V, V, dtype=torch.float32))[0].to(
            setting.dtype
        )  # larger ones make a chaos of rounding
        x = leaves(q=q, k=k, v=setting.randn(B, T, H, V), f=f, w=w)
        run = Run(lambda x=x: m2rnn(*x.values())[0], x)  # type: ignore[misc]
        yield from setting.contest(
            {"ours": lambda run=run: run}, {"xma": partial(xma, setting, x)}, cell="m2rnn", B=B, T=T, H=H, G=G, N=N, V=V
        )  # type: ignore[misc]


# a step of decoding ------------------------------------------------------------------------------------------------------

Step = tuple[Tensor, Tensor]
"""The output and the state after it."""


def rules(setting: Setting) -> Iterator[Row]:
    sys.path.insert(0, str(HERE.parent / "tests"))
    from linear_cells import CELLS as MADE

    from .fla_rules import RULES

    heads, keys, values, steps = (2, 8, 4, 4) if setting.tiny else (5, 128, 256, 64)
    for name, rule in RULES.items():
        # under a name of its own: tests make kernels in the same process, too
        kernel = MADE[name].kernel(f"step_{name}", setting.folder)
        for samples in (1, 2) if setting.tiny else (1, 8, 64):
            x = rule.draw(samples, 1, heads, keys, values, setting.dtype, setting.device.type)
            given = rule.ours(x)  # decays in float32, as fla has them
            first = setting.randn(samples, heads, keys, values, dtype=torch.float32)

            def ours(
                s: Tensor, k: MatrixKernel = kernel, x: dict[str, Tensor] = x, given: dict[str, Any] = given
            ) -> Step:
                return k(x["q"], x["k"], state_BHNV=s, maps=Maps(), **given)

            def theirs(s: Tensor, x: dict[str, Tensor] = x, rule: Any = rule) -> Step:
                return rule.theirs("fused_recurrent", x, s)

            def measured(step: Callable[[Tensor], Step], peer: bool, first: Tensor = first) -> Row:
                def repeated() -> None:
                    state = first
                    for _ in range(steps):
                        state = step(state)[1]

                with torch.no_grad():
                    row = agreement(Run(lambda: ours(first)[0], {}), Run(lambda: step(first)[0], {})) if peer else {}
                    timed = captured(repeated).replay if setting.device.type == "cuda" else repeated
                    return row | {"step": setting.us(timed, steps)}

            shape = {"rule": name, "samples": samples, "heads": heads, "keys": keys, "values": values}
            yield setting.row(lambda: measured(ours, False), **shape, who="ours", kind="ours")
            if setting.peers:
                yield setting.row(lambda: measured(theirs, True), **shape, who="fla", kind="peer", peer_of="ours")


# whole sequences of the linear rules -------------------------------------------------------------------------------------

LEAST = -0.6065306597126334
"""The least logarithm of a decay in RWKV-7, -exp(-1/2)."""


def rules_whole(setting: Setting) -> Iterator[Row]:
    sys.path.insert(0, str(HERE.parent / "tests"))
    from linear_cells import CELLS as MADE

    from .fla_rules import RULES

    for name, heads, keys in (("kimi_delta", 8, 128), ("gdn2", 8, 128), ("rwkv7", 16, 64)):
        rule, kernel = RULES[name], MADE[name].kernel(f"whole_{name}", setting.folder)
        H, N = (2, 8) if setting.tiny else (heads, keys)
        for B, T in [(2, 5)] if setting.tiny else [(16, 2048), (64, 2048)]:
            drawn = rule.draw(B, T, H, N, N, setting.dtype, setting.device.type)
            x = leaves(
                **{n: y.clamp(min=LEAST) if rule.inputs.get(n, ("", ""))[1] == "log" else y for n, y in drawn.items()}
            )
            start = torch.zeros(B, H, N, N, device=setting.device)
            safe: dict[str, Any] = {"safe_gate": True} | (
                {"lower_bound": LEAST, "chunk_size": 64} if name == "rwkv7" else {}
            )

            def ours(x: dict[str, Tensor] = x, rule: Any = rule, kernel: MatrixKernel = kernel) -> Run:
                return Run(lambda: kernel(x["q"], x["k"], maps=Maps(), **rule.ours(x))[0], x)

            def theirs(x: dict[str, Tensor] = x, rule: Any = rule, start: Tensor = start, safe: Any = safe) -> Run:
                return Run(lambda: rule.theirs("chunk", x, start, **safe)[0], x)

            yield from setting.contest({"ours": ours}, {"fla": theirs}, rule=name, B=B, T=T, H=H, N=N)
