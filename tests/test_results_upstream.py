"""Logs of the predecessor: both formats, corrected where that can be, and what cannot is named."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from pathlib import Path

import pytest

from elman_core.cli import main
from elman_core.experiments.upstream import common_tokens, read_log, read_logs


def train_log(
    path: Path,
    losses: list[float],
    every: int = 10,
    accumulate: int = 1,
    day: str = "20260301",
    lrs: list[float] | None = None,
    end: str = "\nTraining complete! Final step: {last}\n",
    level: str = "42",
) -> Path:
    """As `train.py` wrote it; `losses` are the true means of each line, which it multiplied by the accumulation."""
    lrs = lrs or [3e-4] * len(losses)
    lines = [
        "Using device: cuda",
        f"Output directory: out/level{level}_100m_{day}_104357",
        f"Model: Level {level}, 94,615,296 parameters",
        "\nStarting training from step 0...",
        "Batch size: 32, Chunk size: 512",
        f"Gradient accumulation: {accumulate}, Effective batch: {32 * accumulate}\n",
    ]
    for i, (loss, lr) in enumerate(zip(losses, lrs, strict=True), 1):
        lines.append(
            f"step {i * every:6d} | loss {loss * accumulate:.4f} | lr {lr:.2e} | grad 1.00 | tok/s {40_000 + i:.0f}"
        )
        if i % 50 == 0:
            lines.append(f"  >>> saved checkpoint: checkpoint_step_{i * every:06d}_loss_{loss:.4f}.pt")
    path.write_text("\n".join(lines) + end.format(last=len(losses) * every))
    return path


def test_the_last_hundred_lines_become_the_last_hundred_steps(tmp_path):
    losses = [4 - 0.01 * i for i in range(1, 201)]
    log = read_log(train_log(tmp_path / "a.log", losses))
    assert log.reported == pytest.approx(statistics.fmean(losses[-100:]), abs=1e-4)
    assert log.mean_loss() == pytest.approx(statistics.fmean(losses[-10:]), abs=1e-4)
    assert log.mean_loss(500) == pytest.approx(statistics.fmean(losses[40:50]), abs=1e-4)
    assert any('"last 100" were 100 lines of 10 steps' in text for text in log.corrected)
    assert (log.model, log.parameters, log.tokens_per_step) == ("E42", 94_615_296, 32 * 512)
    assert (log.steps, log.tokens, log.status) == (2000, 2000 * 32 * 512, "ok")
    assert log.tok_s == pytest.approx(statistics.median(40_000 + i for i in range(21, 201)))
    assert log.doubtful == ()


def test_a_line_across_the_window_s_edge_counts_with_its_share(tmp_path):
    log = read_log(train_log(tmp_path / "a.log", [2.0, 3.0, 5.0], every=60))
    assert log.mean_loss() == pytest.approx((60 * 5.0 + 40 * 3.0) / 100)
    assert log.mean_loss(90) == pytest.approx((60 * 2.0 + 30 * 3.0) / 90)
    assert log.mean_loss(181) is None


def test_a_loss_multiplied_by_the_accumulation_is_divided(tmp_path):
    log = read_log(train_log(tmp_path / "a.log", [2.0, 1.5], accumulate=4))
    assert [e.loss for e in log.entries] == [2.0, 1.5]
    assert log.reported == pytest.approx(7.0)
    assert log.mean_loss() == pytest.approx(1.75)
    assert log.tokens_per_step == 4 * 32 * 512
    assert any("divided by 4" in text for text in log.corrected)


def test_commas_that_are_no_numbers_are_not_read_as_such(tmp_path):
    path = train_log(tmp_path / "a.log", [2.0, 1.5])
    text = path.read_text()
    path.write_text("layers, parameters and text\nTokens per step: ,\nstep , | loss 9.0\n" + text)
    log = read_log(path)
    assert ([e.loss for e in log.entries], log.parameters) == ([2.0, 1.5], 94_615_296)
    assert log.tokens_per_step == 32 * 512


def test_its_own_last_figure_is_what_it_reported(tmp_path):
    end = "\nTraining complete! Final step: 25\nFINAL_LOSS_LAST100: 1.7654\n"
    log = read_log(train_log(tmp_path / "a.log", [2.0, 1.5], end=end))
    assert log.reported == 1.7654
    assert "steps 21 to 25 are not in the log" in log.doubtful


def test_a_loss_that_is_not_finite_is_a_divergence_and_not_ok(tmp_path):
    log = read_log(train_log(tmp_path / "a.log", [2.0, 1.5, math.nan, math.nan]))
    assert log.status == "diverged@30"
    assert log.reported == pytest.approx(1.75)  # its tool saw nothing
    assert any("from step 30 on, had been left out" in text for text in log.corrected)


@pytest.mark.parametrize(
    ("end", "status"),
    [("\n", "incomplete"), ("\nTraceback (most recent call last):\n  x\n", "crashed"),
     ("\nTraceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n", "oom")],
)  # fmt: skip
def test_a_log_without_its_last_line_did_not_end_well(tmp_path, end, status):
    assert read_log(train_log(tmp_path / "a.log", [2.0, 1.5], end=end)).status == status


def test_zero_padding_is_named_by_the_day(tmp_path):
    def doubts(day: str) -> str:
        return " ".join(read_log(train_log(tmp_path / f"{day}.log", [2.0], day=day)).doubtful)

    assert "zeros that fill up chunks" in doubts("20260221")
    assert "zeros" not in doubts("20260222")
    assert "perhaps zeros" in doubts("undated")


def test_a_learning_rate_that_falls_and_rises_again_is_named(tmp_path):
    warm = [3e-5 * i for i in range(1, 11)]
    oscillating = [*warm, 7e-6, 3e-5, 1e-4, 3e-4]
    cosine = [*warm, 2e-4, 1e-4, 1e-5, 1e-6]
    for name, rates, wrong in (("o", oscillating, True), ("c", cosine, False)):
        log = read_log(train_log(tmp_path / name, [2.0] * len(rates), lrs=rates))
        assert any("rose again" in text for text in log.doubtful) is wrong, name


def test_the_other_program_s_steps_were_micro_batches(tmp_path):
    lines = ["Elman Ablation Ladder Training", "  Level 0: E0 stock ✓", "  Level 1: E1 gated ✓ <-- TRAINING"]
    lines += [
        "Model Parameters: 49,500,000 (49.5M)",
        "Starting training for 400 steps...",
        "Batch size per GPU: 8, World size: 2",
    ]
    lines += ["Effective batch size: 64", "Tokens per step: 32,768", ""]
    seconds = [10.0 + 2.0 * i for i in range(1, 41)]  # ten seconds of compilation, then 10 micro-batches in 2
    for i, at in enumerate(seconds, 1):
        seen = 10 * i * 8 * 2 * 512
        lines.append(
            f"Step {10 * i:6d} | Loss {3 - i / 100:.4f} | LR 1.00e-04 | Grad 0.5 | Tok/s {seen / at:,.0f} | Elapsed {at:.1f}s"
        )
    path = tmp_path / "ladder.log"
    path.write_text("\n".join([*lines, "", "Training Complete!", "Final loss: 2.6000"]))
    log = read_log(path)
    assert (log.model, log.parameters, log.tokens_per_step, log.status) == ("E1", 49_500_000, 32_768, "ok")
    assert log.steps == 100  # 400 micro-batches, four to a step
    assert log.reported == 2.6
    assert log.mean_loss() == pytest.approx(statistics.fmean([3 - i / 100 for i in range(1, 41)]), abs=0.006)
    assert log.tok_s == pytest.approx(10 * 8 * 2 * 512 / 2, rel=0.01)
    assert any("micro-batches: 4 make" in text for text in log.corrected)


def test_equal_tokens_are_those_of_the_shortest_that_ended_well(tmp_path):
    train_log(tmp_path / "a.log", [2.0] * 30)
    train_log(tmp_path / "b.log", [2.0] * 20, level="mamba2")
    train_log(tmp_path / "c.log", [2.0] * 5, end="\n")
    logs = read_logs([tmp_path])
    assert common_tokens(logs) == 200 * 32 * 512
    assert [log.model for log in logs] == ["E42", "mamba2", "E42"]


def test_cut_lines_and_steps_done_again(tmp_path):
    path = train_log(tmp_path / "a.log", [2.0, 1.9, 1.8, 1.7])
    path.write_text(path.read_text() + "step     30 | loss 1.6000 | lr 3e-4 | grad 1 | tok/s 4\nstep     40 | lo")
    log = read_log(path)
    assert [(e.step, e.loss) for e in log.entries] == [(10, 2.0), (20, 1.9), (30, 1.6)]


def test_the_command_in_every_format(tmp_path, capsys):
    train_log(tmp_path / "good.log", [2.0] * 20, accumulate=2, day="20260119")
    train_log(tmp_path / "nan.log", [1.0, math.nan])
    (tmp_path / "notes.txt").write_text("step by step | loss of time")
    assert main(["results", "--upstream", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "corrected (good.log): loss divided by 2" in said
    assert "doubtful (good.log): zeros that fill up" in said
    assert said.index("good.log") < said.index("nan.log")
    assert main(["results", "--upstream", str(tmp_path), "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("| model | parameters | reported | last 100 |")
    assert main(["results", "--upstream", str(tmp_path), "--format", "csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert main(["results", "--upstream", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["logs"]
    assert [r["status"] for r in rows] == [r["status"] for r in table] == ["ok", "diverged@20"]
    assert rows[0]["reported"] == pytest.approx(4.0)
    assert rows[0]["last_100"] == pytest.approx(2.0)


def test_what_is_no_such_log_is_one_line_and_exit_2(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("nothing")
    for path in (tmp_path / "a.txt", tmp_path, tmp_path / "none"):
        assert main(["results", "--upstream", str(path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert "is no log of the predecessor" in said[0]
