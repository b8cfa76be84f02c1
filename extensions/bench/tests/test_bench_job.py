"""What is written about a job: read back as it was, never half, and never taken for another's."""

import io
import json
from pathlib import Path

import pytest
from elman_bench.cli._board import Board
from elman_bench.jobs.job import (
    UNFINISHED,
    Attempt,
    Job,
    State,
    read_state,
    status_of,
    write_state,
)
from rich.console import Console
from scheduler_helpers import shell_job

from elman_core import metrics as metrics_module
from elman_core.metrics import progress
from elman_core.registry import CheckpointError, ConfigError
from elman_core.training.settings import TrainSettings


def job(folder: Path, **changes) -> Job:
    values = {
        "id": "a-s1",
        "command": ("true",),
        "run": None,
        "log": folder / "logs/a-s1.log",
        "state": folder / "s.json",
    }
    return Job(**{**values, **changes})


def test_a_state_reads_back_as_it_was_written(tmp_path):
    state = State("a", "running", True, [Attempt("h", "gpu 3", "GPU-1", 12, 3.5, "t0", log="logs/a.1.log"), Attempt()])
    write_state(tmp_path / "jobs/a.json", state)
    assert read_state(tmp_path / "jobs/a.json", "a") == state
    assert [p.name for p in (tmp_path / "jobs").iterdir()] == ["a.json"]


def test_the_file_has_the_documented_keys(tmp_path):
    write_state(tmp_path / "a.json", State("a", attempts=[Attempt()]))
    tree = json.loads((tmp_path / "a.json").read_text())
    assert set(tree) == {"id", "status", "contended", "attempts", "digest"}
    documented = {"host", "slot", "gpu_uuid", "pid", "started", "ended", "exit_code", "cause", "log"}
    assert documented <= set(tree["attempts"][0])


def test_keys_of_a_later_version_are_passed_over(tmp_path):
    (tmp_path / "a.json").write_text(
        '{"id": "a", "status": "ok", "contended": false, "new": 1, "attempts": [{"new": 2}]}'
    )
    assert read_state(tmp_path / "a.json", "a") == State("a", "ok", False, [Attempt()])


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"id": "a"}', '{"id": "a", "attempts": 3}', '{"attempts": []}'])
def test_a_damaged_state_is_named(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"a\.json is not the state of a job"):
        read_state(tmp_path / "a.json", "a")


def test_a_state_of_another_job_is_not_taken(tmp_path):
    write_state(tmp_path / "a.json", State("b"))
    with pytest.raises(CheckpointError, match="is the state of job b, not of a"):
        read_state(tmp_path / "a.json", "a")


@pytest.mark.parametrize("id", ["", "a/b", "../a", "a b", "-x", "é"])
def test_a_name_that_cannot_be_a_file_is_refused(tmp_path, id):
    with pytest.raises(ConfigError, match="name of a job"):
        job(tmp_path, id=id)


CODES = {0: "ok", 1: "crashed", 2: "crashed", 3: "oom", 4: "diverged", 5: "crashed", 6: "timeout", None: "lost"}
SIGNALS = {130: "incomplete", -2: "incomplete", 143: "killed", 137: "killed", -9: "killed", 129: "killed"}
FAULTS = {-11: "crashed", 139: "crashed", 134: "crashed"}


@pytest.mark.parametrize(("code", "status"), [*CODES.items(), *SIGNALS.items(), *FAULTS.items()])
def test_exit_codes_mean_what_the_commands_say(code, status):
    assert status_of(code) == status
    assert (status in UNFINISHED) == (status in ("incomplete", "killed", "lost"))


# what a scheduler shows of it: how far each job is, on a terminal and in a log file ----------------------------------


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
