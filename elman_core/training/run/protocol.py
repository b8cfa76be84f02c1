"""The description of a run: the protocol, as a short hash that makes its numbers comparable, and rows of the model card."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elman_core.training.settings import Settings, TrainSettings


def protocol(settings: Settings, fingerprint: Mapping[str, Any], eval_window: int) -> dict[str, Any]:
    """The settings that must be equal before two models' numbers may be ranked.

    The learning rate is tuned for each model, so it is left out; so are the seed, the model itself (but not whether it began
    with trained weights), and settings that change only memory or how often something is written. Other settings in
    `train.tuned` are left out too, but named. `eval_window`: bytes scored in an evaluation window.
    """
    data = settings.data
    train = _without_tuned(settings.train)
    tuned = {"tuned": sorted(settings.train.tuned)} if settings.train.tuned else {}
    init: dict[str, Any] = {"init": settings.model.init_optimizer} if settings.model.init else {}
    return {
        **tuned,
        **init,
        "data": dict(fingerprint),
        "sampling": data.sampling,
        "documents": data.documents,
        "heldout": 0.0 if data.heldout_file else data.heldout,
        "batch_size": train.batch_size,
        "chunk_size": train.chunk_size,
        "steps": train.steps,
        "minutes": train.minutes,
        "schedule": [train.schedule, train.warmup, train.final_lr, train.decay if train.schedule == "wsd" else None],
        "optimizer": [train.optimizer, train.weight_decay, train.beta1, train.beta2, train.clip],
        "precision": train.precision,
        "evaluation": [data.eval_bytes, eval_window],
    }


def _without_tuned(train: TrainSettings) -> TrainSettings:
    """`train` with the defaults for what is tuned."""
    names = {key.partition(".")[2] for key in train.tuned}
    defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(train) if f.name in names}
    return dataclasses.replace(train, **defaults)


def protocol_hash(protocol: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits."""
    text = json.dumps(protocol, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def card_rows(
    settings: Settings, fingerprint: Mapping[str, Any], step: int, seen: int, evaluation: Mapping[str, Any] | None
) -> dict[str, str]:
    """Rows for the model card of a checkpoint: the data, how much of it was read and how, bits per byte held out. `step` and
    `seen`: optimizer steps and bytes so far; `evaluation`: the latest, if there was one."""
    train, data = settings.train, settings.data.path
    values = [data] if isinstance(data, str) else data
    rows = {
        "data": f"{', '.join(Path(v).name for v in values)}, {fingerprint['size']:,} bytes, BLAKE2b of samples "
        f"{fingerprint['blake2b']}",
        "trained on": f"{seen:,} bytes in {step:,} steps of {train.batch_size} windows of {train.chunk_size}",
        "optimizer": f"{train.optimizer}, learning rate {train.lr:g}, {train.schedule} schedule, {train.precision}",
    }
    if place := settings.model.init:
        path = Path(place)
        kept = "kept" if settings.model.init_optimizer == "keep" else "dropped"
        model = path.parents[1] if path.parent.name == "checkpoints" else path
        rows["begun with"] = f"{model.name if path.is_absolute() else place}, its optimizer's state {kept}"
    if evaluation is not None:
        rows["held out"] = (
            f"{evaluation['bits_per_byte']:.4f} bits per byte at step {evaluation['step']:,}, on {evaluation['bytes']:,} bytes"
        )
    return rows
