"""What to do when memory runs out: the cheapest remedies, with what each would save in this very run.

What a row costs is measured, not guessed: one short row goes through the model, and the bytes that autograd keeps of it are
counted. They grow in proportion to rows and length.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elman_core.registry import ElmanError, OutOfMemoryError

from .objective import forward_loss
from .precision import compute_in
from .run import memory_in_use
from .settings import TrainSettings
from .sharding import is_sharded

PROBE = 64
"""Bytes of text in the row that is measured."""

WORTH = 0.02
"""A remedy that saves less than this part of all remedies' best is not worth a line."""


@dataclass(frozen=True)
class Kept:
    """Bytes that a micro-batch keeps from forward to backward.

    Attributes:
        layers: by the residual branches. boundaries: what checkpointing would keep of them. logits: by the head and the loss.
    """

    layers: int
    boundaries: int
    logits: int


def measure(model: Any, train: TrainSettings, rows: int, device: torch.device) -> Kept:
    """Run one row of `PROBE` bytes and one of half of it, without checkpointing; what grows with the length is scaled to `rows`
    rows of `train.chunk_size`, what does not, such as a normalised weight, is counted once.
    """
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    layers = [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False)]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        with compute_in(train.precision, device):
            half, whole = (_of_one_row(model, length, own, device) for length in (PROBE // 2, PROBE))
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True
    scale = 2 * (rows * train.chunk_size / PROBE) - 1  # halves of a probe beyond the first
    backbone, everything = (int(h + (w - h) * scale) for h, w in zip(half, whole, strict=True))
    width = model.config.hidden_size
    element = 2 if train.precision == "bf16" else 4
    boundaries = rows * train.chunk_size * width * (4 + element) * len(model.model.layers)
    # Beside what is kept there are the logits themselves, and their gradient in float32 and as they are.
    around = rows * train.chunk_size * model.config.vocab_size * (element + 4 + (element if element != 4 else 0))
    return Kept(backbone, boundaries, everything - backbone + around)


def _of_one_row(model: Any, length: int, own: set[int], device: torch.device) -> tuple[int, int]:
    """Bytes that one row keeps: in the backbone alone, and in all."""
    tokens = torch.zeros((1, length), dtype=torch.long, device=device)
    backbone = _saved(lambda: model.model(input_ids=tokens, use_cache=False).last_hidden_state, own)
    return backbone, _saved(lambda: forward_loss(model, tokens, tokens).loss, own)


def remedies(model: Any, train: TrainSettings, ranks: int = 1, sharded: bool = False) -> list[tuple[str, int, str]]:
    """(setting to give, bytes that it saves, what it costs), the cheapest first; without those that would save next to nothing.

    Args:
        ranks: processes that share a batch. sharded: whether they share weights and optimizer too.
    """
    device = next(model.parameters()).device
    rows = train.batch_size // train.accumulate // ranks
    kept = measure(model, train, rows, device)
    layers = kept.boundaries + kept.layers // len(model.model.layers) if train.gradient_checkpointing else kept.layers
    chunk = train.loss_chunk or train.chunk_size
    logits = kept.logits * min(chunk, train.chunk_size) // train.chunk_size
    found = []
    smaller = max(1, min(128, chunk // 4))
    if smaller < chunk:
        found.append(
            (f"train.loss_chunk={smaller}", logits - logits * smaller // chunk, "of logits, for a few percent of time")
        )
    more = next((n for n in range(train.accumulate + 1, train.batch_size + 1) if _divides(train, n, ranks)), None)
    if more is not None:
        part = (layers + logits) * (more - train.accumulate) // more
        found.append((f"train.accumulate={more}", part, "of activations, for smaller products"))
    if not train.gradient_checkpointing:
        saved = kept.layers - kept.boundaries - kept.layers // len(model.model.layers)
        found.append(("train.gradient_checkpointing=true", saved, "of activations, for a third more time"))
    if ranks > 1 and not sharded:
        state = 16 * sum(p.numel() for p in model.parameters())
        found.append(("train.parallel=fsdp", state - state // ranks, "of weights and optimizer, for more traffic"))
    best = max((saved for _, saved, _ in found), default=0)
    return [r for r in found if r[1] > 0 and r[1] >= WORTH * best]


def advice(model: Any, train: TrainSettings, ranks: int = 1, sharded: bool = False) -> str:
    """The three cheapest remedies in words. What is left of memory may not suffice to measure: then without figures."""
    try:
        if sharded:
            raise ElmanError("the other ranks are not there to compute along")
        found = remedies(model, train, ranks, sharded)[:3]
    except (torch.cuda.OutOfMemoryError, MemoryError, RuntimeError, ElmanError) as error:
        return (
            "try train.loss_chunk=64, a larger train.accumulate or train.gradient_checkpointing=true "
            f"(what each saves could not be measured: {str(error).splitlines()[0] if str(error) else type(error).__name__})"
        )
    if not found:
        return "every remedy is in use: lower train.batch_size or train.chunk_size, or take a smaller model"
    return "; ".join(f"{setting} saves about {amount(saved)} {how}" for setting, saved, how in found)


def ran_out(error: BaseException) -> bool:
    """Whether this says that a device's or the machine's memory is full."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return not isinstance(error, ElmanError)
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def explain(error: BaseException, trainer: Any) -> OutOfMemoryError:
    """What `fit` raises instead of `error`: how much was in use, and the remedies. Frees what the failed step held."""
    device, train = trainer.device, trainer.settings.train
    used = memory_in_use(device)
    traceback.clear_frames(error.__traceback__)
    trainer.optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    words = advice(trainer.model, train, trainer.ranks.size, is_sharded(trainer.model))
    return OutOfMemoryError(f"out of memory on {device} in step {trainer.step + 1}, {amount(used)} in use: {words}")


def amount(count: float) -> str:
    """Bytes for people: 1.5 GiB, 20 MiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def _divides(train: TrainSettings, accumulate: int, ranks: int) -> bool:
    return train.batch_size % (accumulate * ranks) == 0


def _saved(forward: Callable[[], Tensor], own: set[int]) -> int:
    """Bytes of the distinct memory that autograd keeps, parameters left out."""
    held: dict[int, int] = {}
    alive = []  # so that no address is given away twice while it is counted

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(held.values())
