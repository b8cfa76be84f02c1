"""Probing on a GPU: memory is what torch allocates there, and the largest batch is one that trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import train_helpers

from elman_core.experiments.probe import largest, probe
from elman_core.registry import OutOfMemoryError

pytestmark = pytest.mark.gpu
GIB = 2**30
MODEL = ("model.hidden_size=512", "model.num_hidden_layers=4", "train.chunk_size=256", "train.device=cuda")


def test_memory_is_measured_and_the_search_ends_beside_the_limit(tmp_path: Path) -> None:
    text = train_helpers.write_text(tmp_path / "text")
    settings = train_helpers.settings(text, *MODEL, "train.batch_size=8")
    found = probe(settings, 0.5, 4 * GIB)
    measured = found.measurement
    assert found.device.startswith("cuda")
    assert (
        4 * found.parameters <= measured.idle_memory < measured.peak_memory <= 4 * GIB
    )  # float32 weights, then Adam's state
    assert measured.first_step_seconds > measured.step_seconds
    best = largest(settings, found, 0.5, 4 * GIB)
    assert best.limited_by == "memory"
    assert best.probe.measurement.peak_memory > 0.75 * 4 * GIB
    assert any(outcome == "out of memory" for outcome in best.tried.values())
    assert torch.cuda.memory_allocated() == 0  # nothing ran in this process


def test_what_does_not_fit_is_an_answer(tmp_path: Path) -> None:
    text = train_helpers.write_text(tmp_path / "text")
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        probe(train_helpers.settings(text, *MODEL, "train.batch_size=4096"), 0.5, GIB)
