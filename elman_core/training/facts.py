"""What a training tells the model card that every checkpoint carries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import Progress
from .settings import Settings


def training_facts(
    settings: Settings, fingerprint: Mapping[str, Any], progress: Progress, evaluation: Mapping[str, Any] | None
) -> dict[str, str]:
    """Rows of the card: the data with its fingerprint, how much of it was read and how, bits per byte on what was held out.

    Args:
        fingerprint: of the data: `size` in bytes and `blake2b`.
        evaluation: the latest: `step`, `bits_per_byte` and `bytes`; None if there was none.
    """
    train = settings.train
    rows = {
        "data": f"{Path(settings.data.path or '').name}, {fingerprint['size']:,} bytes, BLAKE2b of samples "
        f"{fingerprint['blake2b']}",
        "trained on": f"{progress.bytes_seen:,} bytes in {progress.step:,} steps of {train.batch_size} windows of "
        f"{train.chunk_size}",
        "optimizer": f"{train.optimizer}, learning rate {train.lr:g}, {train.schedule} schedule, {train.precision}",
    }
    if evaluation is not None:
        rows["held out"] = (
            f"{evaluation['bits_per_byte']:.4f} bits per byte at step {evaluation['step']:,}, on {evaluation['bytes']:,} bytes"
        )
    return rows
