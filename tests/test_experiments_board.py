"""What a scheduler shows: how far each job is, on a terminal and in a log file."""

import io
import json

import pytest
from rich.console import Console
from scheduler_helpers import shell_job

from elman_core.cli._board import Board
from elman_core.experiments.jobs.job import Attempt, State
from elman_core.training import metrics as metrics_module
from elman_core.training.metrics import progress
from elman_core.training.settings import TrainSettings


def step(number: int, loss: float = 2.0) -> str:
    return json.dumps({"kind": "step", "step": number, "loss": loss, "tok_s": 1000.0, "seconds": 90.0}) + "\n"


@pytest.fixture
def running(tmp_path):
    run = tmp_path / "runs/a"
    run.mkdir(parents=True)
    scored = json.dumps({"kind": "evaluation", "step": 10, "bits_per_byte": 2.5}) + "\n"
    (run / "metrics.jsonl").write_text("".join(step(i) for i in range(1, 11)) + scored + step(11, 4.0) + '{"kind": "st')
    jobs = [shell_job(tmp_path, "a", "", run=run), shell_job(tmp_path, "b", ""), shell_job(tmp_path, "c", "")]
    states = [State("a", "running", True, [Attempt(slot="gpu 3")]), State("b", "diverged@7"), State("c", "ok")]
    return jobs, states


def test_progress_is_read_from_the_whole_lines_at_the_end(running, monkeypatch):
    run = running[0][0].run
    found = progress(run)
    assert (found.step, found.tok_s, found.bits_per_byte) == (11, 1000.0, 2.5)
    assert found.loss == pytest.approx((10 * 2.0 + 4.0) / 11), "the mean of the last steps"
    monkeypatch.setattr(metrics_module, "TAIL", 200)  # the file is longer than what is read
    assert progress(run).step == 11
    assert progress(run.parent) is None


def test_the_table_has_what_runs_first_and_fits_its_terminal(running):
    jobs, states = running
    board = Board(jobs, {"a": TrainSettings(steps=600)})
    board.console = Console(file=io.StringIO(), width=120, height=6, force_terminal=False)
    board.states = states
    board.console.print(board.table())
    lines = board.console.file.getvalue().splitlines()
    expected = "a running contended gpu 3 step 11/600 80.3 min left loss 2.1818 nats 1,000 tok/s 2.5000 bits per byte"
    assert " ".join(lines[1].split()) == expected
    assert [line.split()[0] for line in lines[2:4]] == ["b", "c"]
    assert lines[-1] == "1 running, 1 diverged, 1 ok"
    board.console = Console(file=io.StringIO(), width=60, height=6, force_terminal=False)
    board.console.print(board.table())
    assert "a    running contended  gpu 3  step 11/600  80.3 min left" in board.console.file.getvalue()
    assert "…" in board.console.file.getvalue(), "the end of a line makes room"
    many = [State(f"j{i}") for i in range(50)]
    board.jobs |= {state.id: jobs[1] for state in many}
    board.states = [*many, *states]
    board.console.file = io.StringIO()
    board.console.print(board.table())
    assert len(board.console.file.getvalue().splitlines()) <= 6
    assert board.console.file.getvalue().splitlines()[1].startswith("a ")


def test_without_a_terminal_there_is_a_line_a_minute(running):
    jobs, states = running
    board = Board(jobs, {})
    board.console = Console(file=io.StringIO(), width=80)
    board.tick(states)
    assert board.console.file.getvalue() == ""
    board.said -= 61
    board.tick(states)
    board.tick(states)
    [line] = board.console.file.getvalue().splitlines()
    assert line.endswith(
        "1 running, 1 diverged, 1 ok: a step 11, 1.5 min  loss 2.1818 nats  1,000 tok/s  2.5000 bits per byte"
    )
