"""What is written about a job: read back as it was, never half, and never taken for another's."""

import json
from pathlib import Path

import pytest

from elman_core.experiments.jobs.job import (
    UNFINISHED,
    Attempt,
    Job,
    State,
    read_state,
    status_of,
    write_state,
)
from elman_core.registry import CheckpointError, ConfigError


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
