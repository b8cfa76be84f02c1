"""Failures of a training: where a tensor stopped being finite, what to do when memory runs out, what the manifest says.

`run` is the `Trainer`."""

from __future__ import annotations

import logging
import math
import os
import shlex
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elman_core.registry import DivergedError, ElmanError, KernelError, OutOfMemoryError, RankError, StorageError
from elman_core.storage import now, write_json

from .hooks import acting
from .run.facts import memory_in_use

log = logging.getLogger("elman_core")


def first_bad(model: nn.Module, forward: Callable[[], Any], gradients: bool = True) -> dict[str, str] | None:
    """The first tensor that is not finite, in the order of computation: weights, activations, then gradients.

    Args:
        forward: runs the forward of the step that failed again. gradients: whether the model holds those of that step.

    Returns its kind, the name of the module or parameter, and how many elements are bad; None if everything is finite.
    """
    found = _first_of("weight", model.named_parameters()) or _first_of("buffer", model.named_buffers())
    if found:
        return found
    found_outputs: list[dict[str, str]] = []

    def watch(name: str) -> Callable[..., None]:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if found_outputs:
                return
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            bad = _first_of("activation", ((name or "loss", tensor) for tensor in tensors))
            if bad:
                found_outputs.append(bad)

        return look

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    if found_outputs:
        return found_outputs[0]
    if not gradients:
        return None
    # The backward runs from the head to the embedding, so it met the last parameter with a bad gradient first.
    grads = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return _first_of("gradient", reversed(grads))


def _first_of(kind: str, named: Iterable[tuple[str, Tensor]]) -> dict[str, str] | None:
    for name, tensor in named:
        bad = _bad(tensor)
        if bad:
            return {"kind": kind, "name": name, "elements": bad}
    return None


def _bad(tensor: Tensor) -> str:
    if not tensor.is_floating_point():
        return ""
    count = int((~torch.isfinite(tensor)).sum())
    return f"{count} of {tensor.numel()}" if count else ""


def diverged(run: Any, windows: Any, values: Any) -> DivergedError:
    """The error for a step of the trainer `run` whose values are not finite. Every rank calls it, with the same values."""
    with run.uncompiled():
        here = run.compute.where_it_failed(windows, again=bool(run.launched))
    run.launched.clear()  # they updated nothing
    step, loss, norm = run.step + 1, values.loss, values.grad_norm
    batch = {**run.windows.origin(run.step), "chunk_size": run.settings.train.chunk_size}
    what = f"training diverged in step {step}: loss {loss}, gradient norm {norm}"
    return _reported(run, step, what, here, "a loss term", loss=str(loss), grad_norm=str(norm), batch=batch)


def bad_evaluation(run: Any, result: Mapping[str, Any]) -> DivergedError:
    """The error for weights whose held-out loss is not finite. Every rank calls it, with the same result."""
    here = first_bad(run.model, lambda: None, gradients=False)
    if not any(run.ranks.gather(here)):  # an evaluation needs every rank, so all look further or none does
        here = first_bad(run.model, run.evaluate, gradients=False)
    what = f"training diverged by step {run.step}: held-out loss {result['loss']}"
    return _reported(run, run.step, what, here, "the loss", held_out_loss=str(result["loss"]))


def _reported(run: Any, step: int, what: str, here: dict[str, str] | None, other: str, **facts: Any) -> DivergedError:
    """The error, with its details in diverged.json. `here`: what this rank found; `other`: if no rank found anything."""
    first = next(filter(None, run.ranks.gather(here)), None)
    where = f"{first['kind']} {first['name']}" if first else other
    path = run.path / "diverged.json"
    report = {
        "step": step,
        **facts,
        "first_non_finite": first,
        "history": [{k: v if math.isfinite(v) else str(v) for k, v in h.items()} for h in run.history],
        "last_checkpoint": str(run.saved[1]) if run.saved[1] else None,
    }
    details = f"{path} has the details"
    try:
        run.ranks.first(lambda: write_json(path, report))
    except StorageError as second:  # the divergence matters more
        details = str(second)
    error = DivergedError(f"{what}; first not finite: {where}. {details}; try a lower train.lr or more train.warmup")
    error.everywhere = run.ranks.size > 1
    error.step = step
    return error


def out_of_memory(run: Any, error: BaseException) -> OutOfMemoryError:
    """The error to raise instead of `error`, with remedies, cheapest first. Frees the memory of the failed step."""
    used = memory_in_use(run.device)
    train, ranks = run.settings.train, run.ranks.size
    step = run.step + len(run.launched) + 1  # memory is allocated as a step is launched, ahead of those that are read
    traceback.clear_frames(error.__traceback__)
    run.optimizer.zero_grad()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    rows = train.batch_size // ranks
    more = next((n for n in range(train.accumulate + 1, rows + 1) if rows % n == 0), None)
    remedies = {
        "train.loss_chunk=64": not train.loss_chunk and train.chunk_size > 64 and "elman_loss_terms" not in acting(),
        f"train.accumulate={more}": more is not None,
        "train.gradient_checkpointing=true": not train.gradient_checkpointing,
        "train.parallel=fsdp": ranks > 1 and train.parallel != "fsdp",
    }
    left = [setting for setting, helps in remedies.items() if helps]
    words = f"try {', '.join(left)}" if left else "lower train.batch_size or train.chunk_size, or use a smaller model"
    return OutOfMemoryError(f"out of memory on {run.device} in step {step}, {used / 2**20:,.0f} MiB in use: {words}")


def gpu_is_lost(device: torch.device, error: BaseException) -> bool:
    """Whether a kernel's error is that of a GPU which refuses all further work of this process."""
    if device.type == "cuda" and isinstance(error, KernelError):
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return True
    return False


def gpu_failed(run: Any, error: BaseException) -> KernelError:
    """The error to raise instead of `error`, with which the device refuses all further work of this process."""
    failed = KernelError(
        f"{run.device} failed by step {run.step + 1}: {str(error).partition(chr(10))[0]}; let no other program use this GPU, "
        f"then type `elman resume {shlex.quote(str(run.path))}`"
    )
    failed.fatal = True
    return failed


def record(run: Any, error: BaseException) -> None:
    """Record in the manifest what ended the run. If that fails too, the caller still gets the first error."""
    status = "incomplete" if isinstance(error, KeyboardInterrupt) else "crashed"
    if isinstance(error, DivergedError):
        status = f"diverged@{error.step or run.step + 1}"
    elif isinstance(error, OutOfMemoryError):
        status = "oom"
    try:
        run.folder.update(status=status, ended=now(), steps_done=run.step, error=str(error) or type(error).__name__)
        run.folder.log(f"{status}: {error}")
    except (ElmanError, OSError) as second:
        error.add_note(f"and the manifest could not be written: {second}")


def stalled(run: Any, seconds: float) -> None:
    """End this process, from another thread: it waits inside a library for a rank that is gone."""
    error = RankError(f"no step, evaluation or checkpoint has ended for {seconds:.0f} s: a rank is gone or silent")
    record(run, error)
    log.error("elman: %s", error)
    os._exit(error.exit_code)
