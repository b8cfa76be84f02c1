"""The recurrence of E23: one launch of csrc/e23.cuh on a GPU (sm_90 and newer), the reference elsewhere.

The kernel takes 8 slots, widths that are multiples of 32 up to 512, bfloat16, float16 and float32.
T time, B batch, d width, N slots of the tape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import (
    Case,
    Compiled,
    Extension,
    KernelError,
    KernelSpec,
    KernelUnavailableError,
    check_errors,
    choose,
    document_starts,
    emulated,
    error_word,
    first_steps,
    in_words,
    load,
    operator,
    padding_mask,
    product,
    register,
    shipped,
)

from .reference import e23_reference

HERE = Path(__file__).parent
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SLOTS, STEP, WIDEST, MOST_CLUSTERS, TIMEOUT_NS = 8, 32, 512, 65535, 2_000_000_000
INPUTS = ("u", "w_h", "w_w", "h", "tape", "mask", "starts", "initial")


def extension(dtype: torch.dtype = torch.bfloat16, width: int = WIDEST, packed: bool = False) -> Extension:
    """The kernel's source for one dtype and width; packed: for calls with starts of documents.

    Raises:
        KernelError: the shared sources are not installed.
    """
    name = f"e23_{str(dtype).removeprefix('torch.')}_{width}" + "_packed" * packed
    return shipped(name, HERE / "csrc" / "e23_cuda.cu", python=True, DTYPE=dtype, WIDTH=width, PACKED=int(packed))


@cache
def _prepared(dtype: torch.dtype, batch: int, width: int, index: int | None, packed: bool) -> tuple[Any, int]:
    """The module for the current device (index None: an emulated GPU), and the batch rows of a cluster of blocks.

    Raises:
        KernelError: it cannot be built, or the GPU holds no such cluster.
    """
    if index is not None and torch.cuda.get_device_capability() < (9, 0):
        raise KernelUnavailableError("e23: its kernel needs compute capability 9.0 or newer")
    made = extension(dtype, width, packed)
    module: Any = load(emulated(made) if index is None else made)
    if not (rows := module.rows(batch)):
        raise KernelUnavailableError(f"e23: this GPU holds no cluster of {width // STEP} blocks")
    if batch > MOST_CLUSTERS * rows:
        raise KernelError(f"e23: its kernel takes B up to {MOST_CLUSTERS * rows}, not {batch}")
    return module, rows


def arguments(main: Tensor, mask: Tensor | None, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Those of `Args` in csrc/e23.cuh, in its order. `tensors`: without main and the mask."""
    return [*tensors[:2], main, *tensors[2:4], None if mask is None else mask.contiguous(), *tensors[4:]]


def _run(
    backward: bool, main: Tensor, mask: Tensor | None, tensors: Sequence[Tensor | None], marks: Sequence[Tensor | None]
) -> None:
    """marks: starts, the initial tape and its gradient, contiguous."""
    steps, batch, width = main.shape
    with torch.cuda.device(main.device) if main.is_cuda else nullcontext():
        module, rows = _prepared(main.dtype, batch, width, main.device.index, marks[0] is not None)
        given, more = (
            [0 if x is None else x.data_ptr() for x in some] for some in (arguments(main, mask, tensors), marks)
        )
        stream = torch.cuda.current_stream().cuda_stream if main.is_cuda else 0
        module.run(backward, [*given, error_word(main.device), *more], rows, steps, batch, TIMEOUT_NS, stream)


def _forward(
    u: Tensor, w_h: Tensor, w_w: Tensor, h: Tensor, tape: Tensor, mask: Any, starts: Any, initial: Any, keep: bool
) -> list[Tensor]:
    outputs = _fake_forward(u, w_h, w_w, h, tape, mask, starts, initial, keep)
    y, h_T, tape_T, history, *kept = outputs
    weights = [w.to(u.dtype).contiguous() for w in (w_h, w_w)]
    kept_or_not = [x if keep else None for x in kept]
    states = (h.contiguous(), tape.contiguous())
    marks = (*(None if x is None else x.contiguous() for x in (starts, initial)), None)
    _run(False, u.contiguous(), mask, [*weights, *states, history, *kept_or_not, y, None, h_T, tape_T], marks)
    return outputs


def _fake_forward(u: Tensor, _h: Any, _w: Any, h: Tensor, tape: Tensor, *marks: Any) -> list[Tensor]:
    *_, keep = marks
    (steps, batch, width), slots = u.shape, tape.shape[1]
    kept: list[Tensor] = [u.new_empty(steps, batch, slots, width), u.new_empty(steps, batch, width)]
    kept += [h.new_empty(steps, batch, slots) for _ in range(2)]
    kept = kept if keep else [x.new_empty(0) for x in kept]
    states = [x.new_empty(x.shape) for x in (h, tape)]
    return [u.new_empty(u.shape), *states, u.new_empty(steps + 1, batch, width), *kept]


def _backward(gy: Tensor, g_h: Tensor, g_tape: Tensor, w_h: Tensor, w_w: Tensor, *rest: Any) -> list[Tensor]:
    *kept, mask, starts = rest  # history, tape, w, reads, writes
    outputs = _fake_backward(gy, g_h, g_tape, starts)
    du, dw, dh, dtape, dinitial = outputs
    weights = [w.to(gy.dtype).contiguous() for w in (w_h, w_w)]
    arriving = (g_h.contiguous(), g_tape.contiguous())
    marks = (None if starts is None else starts.contiguous(), None, dinitial)
    _run(True, gy.contiguous(), mask, [*weights, *arriving, *kept, du, dw, dh, dtape], marks)
    return outputs


def _fake_backward(gy: Tensor, g_h: Tensor, g_tape: Tensor, *rest: Any) -> list[Tensor]:
    dinitial = g_tape.new_empty(0 if rest[-1] is None else g_tape.shape)  # of each row
    return [*(x.new_empty(x.shape) for x in (gy, gy, g_h, g_tape)), dinitial]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    _, w_h, w_w, _, _, mask, starts, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(w_h, w_w, *output[3:], mask, starts)
    ctx.like = [torch.empty_like(x, device="meta") for x in output[:3]]


def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    w_h, w_w, history, *kept, mask, starts = ctx.saved_tensors
    arriving = [
        torch.zeros_like(x, device=history.device) if g is None else g
        for g, x in zip(gradients[:3], ctx.like, strict=True)
    ]
    du, dw, dh, dtape, dinitial = _backward_op(*arriving, w_h, w_w, history, *kept, mask, starts)
    first = history[:-1] if starts is None else torch.where(starts[..., None], 0.0, history[:-1])
    before, after = (h.flatten(0, 1) for h in (first, history[1:]))
    dw_h, dw_w = product(du.flatten(0, 1).t(), before, w_h.dtype), product(dw.flatten(0, 1).t(), after, w_w.dtype)
    return du, dw_h, dw_w, dh, dtape, None, None, None if starts is None else dinitial.sum(0), None


_KEPT = "Tensor history, Tensor tape, Tensor w, Tensor reads, Tensor writes, Tensor? mask, Tensor? starts"
_backward_op = operator(
    f"e23_backward(Tensor gy, Tensor g_h, Tensor g_tape, Tensor w_h, Tensor w_w, {_KEPT}) -> ({', '.join(['Tensor'] * 5)})",
    lambda *given: tuple(_backward(*given)),
    lambda *given: tuple(_fake_backward(*given)),
)
_op = operator(
    "e23(Tensor u, Tensor w_h, Tensor w_w, Tensor h, Tensor tape, Tensor? mask, Tensor? starts, Tensor? initial, "
    "bool keep) -> "
    f"({', '.join(['Tensor'] * 8)})",
    lambda *given: tuple(_forward(*given)),
    lambda *given: tuple(_fake_forward(*given)),
    _save,
    _differentiate,
)


class TapeKernel(Compiled):
    """The kernel as the chooser of back ends and `elman verify` know it."""

    name = "e23"

    def prepare(self, dtype: torch.dtype, batch: int, width: int, packed: bool) -> str:
        _, rows = _prepared(dtype, batch, width, torch.cuda.current_device(), packed)
        return f"clusters of {width // STEP} blocks, {rows} rows each"

    def cases(self, dtype: torch.dtype, batch: int, width: int, packed: bool) -> Sequence[Case]:
        return [
            Case.of(
                "TBd", (first_steps(batch, SLOTS * width), batch, width), dtype, **({"packed": True} if packed else {})
            )
        ]

    def backend(self, device: torch.device, width: int, slots: int) -> str:
        """What "auto" runs, in words."""
        return (
            in_words(self.name, device, "reference", lambda _rows, d, _packed: d == width)
            if fits(slots, width)
            else "reference"
        )

    def spec(self) -> KernelSpec:
        return KernelSpec(
            name=self.name,
            cases=lambda _target, grid: list(_cases(grid == "full")),
            make_inputs=_make_inputs,
            call=_call,
            states=("h_T", "tape_T"),
            extension=lambda _target: extension(),
            op=lambda _backend, x, _options: (
                _op,
                (*(x[k] for k in INPUTS), True),
            ),
            targets=("cuda",),
            emulated=(
                Case.of("TBd", (4, 5, 96), torch.float32, masked=True),
                Case.of("TBd", (6, 5, 64), torch.bfloat16, masked=True, packed=True),
                Case.of("TBd", (4, 13, 288), torch.float32),
            ),
            module=lambda _target, c: extension(c.dtype, c.sizes["d"], c.has("packed")),
            builds=lambda target, _arch, widths, dtypes: [
                extension(t, d) for t in dtypes or (torch.bfloat16,) for d in widths or (WIDEST,) if target == "cuda"
            ],
            after=check_errors,
            python=(
                Path(__file__),
                HERE / "reference.py",
                *(HERE / "csrc" / f for f in ("e23.cuh", "e23_cluster.cuh")),
            ),
            record=HERE / "csrc" / "errors.json",
        )


KERNEL = TapeKernel()
register(KERNEL)


def fits(slots: int, width: int) -> bool:
    """Whether there are kernels for so many slots of this width."""
    return slots == SLOTS and width % STEP == 0 and width <= WIDEST


def e23(
    u_TBd: Tensor,
    w_h: Tensor,
    w_w: Tensor,
    h_Bd: Tensor,
    tape_BNd: Tensor,
    initial_Nd: Tensor,
    mask_TB: Tensor | None = None,
    starts_TB: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """As `e23_reference`, but y is 0 where the mask is False. backend: "auto", "cuda", "emulated" or "reference".

    Raises:
        ConfigError: there is no such back end.
        KernelError: the back end that was named cannot run this, or as `choose`.
    """
    width = u_TBd.shape[2]
    sizes = fits(tape_BNd.shape[1], width) and u_TBd.dtype in DTYPES
    if backend in ("cuda", "emulated") and not sizes:
        raise KernelError(
            f"e23: its kernel takes {SLOTS} slots, widths that are multiples of {STEP} up to {WIDEST}, float32, bfloat16 and "
            f"float16, not {tape_BNd.shape[1]} slots of {width} in {u_TBd.dtype}"
        )
    asked: Any = backend if sizes else "reference"
    problem = lambda: (int(u_TBd.shape[1]), int(width), starts_TB is not None)  # noqa: E731
    if choose("e23", asked, u_TBd, problem, "reference") == "cuda":
        inputs = (u_TBd, w_h, w_w, h_Bd.float(), tape_BNd.float())
        initial = None if starts_TB is None else initial_Nd.float()
        keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, initial))
        y_TBd, h_Bd, tape_BNd, *_ = _op(*inputs, mask_TB, starts_TB, initial, keep)
        return y_TBd, h_Bd, tape_BNd
    y_TBd, h_Bd, tape_BNd = e23_reference(u_TBd, w_h, w_w, h_Bd, tape_BNd, initial_Nd, mask_TB, starts_TB)
    return y_TBd if mask_TB is None else torch.where(mask_TB[..., None], y_TBd, 0.0), h_Bd, tape_BNd


def _make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor | None]:
    steps, batch, width = (case.sizes[k] for k in "TBd")
    full = torch.float64 if case.dtype == torch.float64 else torch.float32

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    inputs: dict[str, Tensor | None] = {"u": random(steps, batch, width).to(case.dtype)}
    inputs["w_h"] = (random(width, width) * (0.45 / width**0.5)).to(case.dtype)
    inputs["w_w"] = (random(width, width) / width**0.5).to(case.dtype)
    inputs["h"] = (0.5 * random(batch, width) * (not case.bare)).to(full)
    inputs["tape"] = (random(batch, SLOTS, width) * (not case.bare)).to(full)
    inputs["mask"] = padding_mask(steps, batch, generator) if case.masked else None
    packed = case.has("packed")
    inputs["starts"] = document_starts(steps, batch, generator) if packed else None
    inputs["initial"] = random(SLOTS, width).to(full) if packed else None
    return inputs


def _call(backend: str, inputs: Any, _options: Any) -> dict[str, Tensor]:
    u, w_h, w_w, h, tape, mask, starts, initial = (inputs[k] for k in INPUTS)
    initial = torch.zeros_like(tape[0]) if initial is None else initial
    y, h_T, tape_T = e23(u, w_h, w_w, h, tape, initial, mask, starts, backend=backend)
    return {"y": y, "h_T": h_T, "tape_T": tape_T}


def _cases(full: bool) -> Iterator[Case]:
    for dtype in DTYPES:
        yield Case.of("TBd", (1, 3, 64), dtype)
        yield Case.of("TBd", (17, 3, 320), dtype, masked=True)
        yield Case.of("TBd", (33, 32, 512), dtype, masked=True, strided=True)
        yield Case.of("TBd", (64, 32, 512), dtype)
        yield Case.of("TBd", (65, 70, 256), dtype, strided=True)
        yield Case.of("TBd", (40, 32, 512), dtype, masked=True, packed=True)
        yield Case.of("TBd", (129, 8, 96), dtype, bare=True)
        for width in (32, 64, 128, 224, 384, 480, 512) if full else ():
            yield Case.of("TBd", (1, 2, width), dtype)
            yield Case.of("TBd", (31, 3, width), dtype, masked=True)
            yield Case.of("TBd", (40, 9, width), dtype, packed=True)
            yield Case.of("TBd", (40, 32, width), dtype, strided=True)
            yield Case.of("TBd", (21, 70, width), dtype, masked=True, bare=True)
        if full:
            yield Case.of("TBd", (1024, 8, 256), dtype)
