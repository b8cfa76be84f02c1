"""The hooks of elman. This file contains only signatures and docstrings and is cheap to import.

`elman_variants` registers variants. The other hooks are of two kinds. *Observe* hooks never change anything: `elman_run_start`,
`elman_step_end`, `elman_evaluation_end`, `elman_checkpoint_saved`, `elman_run_end`. *Act* hooks do, and every run that uses
one names the plugin in its manifest: `elman_loss_terms`, `elman_before_optimizer_step`. An exception in any hook stops the
run cleanly, with the plugin named.

Order in a run: run_start · (loss_terms · before_optimizer_step · step_end · [evaluation_end] · [checkpoint_saved])* · run_end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from torch import Tensor

    from .variant import Variant

hookspec = pluggy.HookspecMarker("elman")
hookimpl = pluggy.HookimplMarker("elman")


@hookspec
def elman_variants() -> Iterable[Variant]:  # type: ignore[empty-body]
    """Yield the variants this plugin adds.

    Called once, when a variant is first requested. Yield frozen `Variant` dataclasses; never call back into the registry::

        @hookimpl
        def elman_variants():
            yield Variant(name="e99", summary="linear tied self-gated Elman", config=E99Config, mixer=E99Mixer)
    """


@hookspec
def elman_run_start(run: Any) -> None:
    """Observe: settings are resolved and the model is built; nothing has been trained yet.

    :param run: `run.path`, `run.settings`, `run.model`, `run.step`, `run.manifest`.
    """


@hookspec
def elman_step_end(run: Any, step: int, metrics: Mapping[str, float]) -> None:
    """Observe: an optimizer step is done.

    :param step: number of optimizer steps done so far, counting from 1.
    :param metrics: what goes into metrics.jsonl: loss (nats per byte), lr, grad_norm, tok_s, …
    """


@hookspec
def elman_evaluation_end(run: Any, result: Mapping[str, float]) -> None:
    """Observe: the held-out evaluation is done. `run.end_here()` makes this step the last.

    :param result: step, loss (nats per byte), bits_per_byte, bytes.
    """


@hookspec
def elman_checkpoint_saved(run: Any, path: Path) -> None:
    """Observe: a checkpoint is complete on disk.

    :param path: the Hugging Face folder, under its final name.
    """


@hookspec
def elman_run_end(run: Any, error: BaseException | None) -> None:
    """Observe: the run is over; called once, also after an error or an interrupt.

    :param error: what ended it, or None.
    """


@hookspec
def elman_loss_terms(run: Any, outputs: Any) -> Mapping[str, Tensor]:  # type: ignore[empty-body]
    """Act: add named terms to the loss of a micro-batch. Each is logged under its name.

    :param outputs: `outputs.logits` (B, T, V) and `outputs.loss`.
    :return: `{name: scalar}`; the scalars are added to the loss unscaled.
    """


@hookspec
def elman_before_optimizer_step(run: Any) -> None:
    """Act: gradients are accumulated, not yet clipped; they are in `run.model`."""
