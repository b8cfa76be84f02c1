"""The text of a training, opened once. Needs no torch, so that a wrong path fails at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman_core.data import ByteFile, Split, TrainingWindows, heldout_offsets, split
from elman_core.registry.errors import DataError
from elman_core.storage import require_text

from .settings import Settings


@dataclass(frozen=True)
class Text:
    """The bytes that a training reads.

    Attributes:
        file, split: the whole file, and which of its bytes are held out.
        windows: of the training steps.
        heldout: where the evaluation windows start, and how many bytes each scores; None if nothing is held out.
    """

    file: ByteFile
    split: Split
    windows: TrainingWindows
    heldout: tuple[NDArray[np.int64], int] | None


def open_text(settings: Settings, expected: Mapping[str, Any] | None = None) -> Text:
    """Open the file `data.path`.

    Args:
        expected: the fingerprint of the text with which the run began.

    Raises:
        ConfigError, DataError: there is none, it cannot be named in a recipe or be read, it is too short for these settings,
            or it has another fingerprint.
    """
    data, train = settings.data, settings.train
    require_text(data.path)
    if not data.path:
        raise DataError("no training text: give one with --data FILE")
    file = ByteFile(data.path)
    if expected is not None and (actual := file.fingerprint()) != expected:
        raise DataError(
            f"{file.path} is not the text of this run: {actual['size']} bytes, fingerprint {actual['blake2b']}, instead "
            f"of {expected['size']}, {expected['blake2b']}; give the right one with --data FILE"
        )
    parts = split(file.size, data.heldout)
    windows = TrainingWindows(file, parts, train.chunk_size, train.batch_size, train.seed, data.sampling)
    heldout = heldout_offsets(parts, train.chunk_size, data.eval_bytes) if data.heldout else None
    return Text(file, parts, windows, heldout)
