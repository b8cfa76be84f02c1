"""Logs of the predecessor: corrected where that is possible; what is not, is named."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
from predecessor_logs import read_log


def write_log(
    path: Path, losses: list[float], every: int = 10, accumulate: int = 1, day: str = "20260301", **more
) -> Path:
    """As `train.py` wrote it; `losses` are the true means of each line, which it multiplied by the accumulation."""
    rates = more.get("rates") or [3e-4] * len(losses)
    head = f"Output directory: out/x_{day}_104357\nModel: Level 42, 94,615,296 parameters\n"
    head += f"Gradient accumulation: {accumulate}\n"
    lines = [
        f"step {i * every:6d} | loss {loss * accumulate:.4f} | lr {rate:.2e} | grad 1.00 | tok/s 40,000"
        for i, (loss, rate) in enumerate(zip(losses, rates, strict=True), 1)
    ]
    path.write_text(
        head + "\n".join(lines) + more.get("end", f"\nTraining complete! Final step: {len(losses) * every}\n")
    )
    return path


def test_the_last_hundred_lines_become_the_last_hundred_steps(tmp_path):
    losses = [4 - 0.01 * i for i in range(1, 201)]
    log = read_log(write_log(tmp_path / "a.log", losses, accumulate=4))
    assert log.reported == pytest.approx(4 * statistics.fmean(losses[-100:]), abs=1e-3)
    assert log.mean_loss() == pytest.approx(statistics.fmean(losses[-10:]), abs=1e-4)
    assert (log.model, log.parameters, log.steps, log.status, log.tok_s) == ("E42", 94_615_296, 2000, "ok", 40_000)
    assert log.notes == ["corrected: loss divided by 4, the accumulation"]


def test_a_line_across_the_edge_of_the_window_counts_with_its_share(tmp_path):
    log = read_log(write_log(tmp_path / "a.log", [2.0, 3.0, 5.0], every=60))
    assert log.mean_loss() == pytest.approx((60 * 5.0 + 40 * 3.0) / 100)


@pytest.mark.parametrize(
    ("losses", "end", "status"),
    [([2.0], "\n", "incomplete"), ([2.0], "\nTraceback (most recent call last):\n  x\n", "crashed"),
     ([2.0], "\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n", "oom"),
     ([2.0, math.nan], "\nTraining complete!\n", "diverged@20")],
)  # fmt: skip
def test_what_did_not_end_well_is_not_ok(tmp_path, losses, end, status):
    assert read_log(write_log(tmp_path / "a.log", losses, end=end)).status == status


def test_what_cannot_be_corrected_is_named(tmp_path):
    warm = [3e-5 * i for i in range(1, 11)]
    for name, more, note in (
        ("zeros", {"day": "20260221"}, "zeros were trained on"),
        ("undated", {"day": "x"}, "perhaps zeros"),
        ("rates", {"rates": [*warm, 7e-6, 3e-5, 1e-4, 3e-4]}, "rose again"),
        ("end", {"end": "\nTraining complete! Final step: 99,999\n"}, "are not in the log"),
        ("well", {"rates": [*warm, 2e-4, 1e-4, 1e-5, 1e-6]}, ""),
    ):
        log = read_log(write_log(tmp_path / name, [2.0] * len(more.get("rates", [0])), **more))
        assert note in " ".join(log.notes), name
        assert bool(log.notes) == bool(note)
