"""`elman bench` and `elman jobs` as a user types them."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from elman_bench.cli.jobs import _commands
from elman_bench.jobs import gpus, slots
from elman_bench.jobs.job import State, read_state, write_state
from elman_bench.suite.folder import Folder
from fake_gpus import USE_GPU, FakeMonitor
from train_helpers import metrics, wait_for, write_text

from elman_core.cli import main
from elman_core.registry import ConfigError
from elman_core.storage import write_json

SUITE = """
summary = "two tiny models"
models = ["e42@16x1", "gru@16x1", "e77@16x1"]
seeds = 1
[protocol.train]
batch_size = 2
chunk_size = 16
steps = 300
save_every = 50
eval_every = 0
[protocol.data]
eval_bytes = 640
"""


ELMAN = "sh -c 'exit {}' elman"  # leaves with a code of this command
TWO = "echo two >> ran && " + ELMAN.format(3)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # no line is wrapped
    write_text(tmp_path / "text", 50_000)
    (tmp_path / "tiny.toml").write_text(SUITE)
    return tmp_path


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    said = capsys.readouterr()
    return code, said.out, said.err


def elman(*words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "elman_core", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def states(folder: Path) -> dict[str, State]:
    paths = sorted((folder / "jobs").glob("[!.]*.json"))  # a name with a dot is a file that is being written
    return {path.stem: read_state(path, path.stem) for path in paths}


def test_without_a_suite_those_there_are_are_listed(capsys):
    code, out, _ = run(capsys, "bench")
    assert code == 0
    assert "quick" in out
    assert "100m-10min" in out
    _, out, _ = run(capsys, "bench", "--json")
    assert {"quick", "50m"} <= {one["name"] for one in json.loads(out)}


def test_a_dry_run_says_everything_and_writes_nothing(here, capsys):
    words = ("bench", "tiny.toml", "--data", "text", "--gpus", "none", "--slots", "2", "--dry-run", "--seeds", "2")
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "tiny: two tiny models" in out
    assert "2 jobs at once on the CPU" in out
    row = next(line for line in out.splitlines() if "e42-16x1-s43" in line).split()
    assert row == ["e42-16x1-s43", "e42@16x1", "4,912", "43", "0.001", "9,600", "starts"]
    assert "e77" in out
    assert "no variant 'e77' is installed" in out
    assert "4 runs, 38,400 tokens" in out
    assert sorted(p.name for p in here.iterdir()) == ["text", "tiny.toml"]
    assert "4 runs, 2.0 hours of training in all" in run(capsys, *words, "--minutes", "30")[1]
    plan = json.loads(run(capsys, *words, "--json")[1])
    assert [job["status"] for job in plan["jobs"]] == ["waiting"] * 4
    assert plan["jobs"][0]["settings"]["train"]["steps"] == 300
    assert plan["skipped"] == [{"model": "e77", "reason": "no variant 'e77' is installed"}]


def test_a_dry_run_says_what_is_done_with_each_run_and_why(here, capsys):
    for id, status in (("e42-16x1-s42", "ok"), ("gru-16x1-s42", "diverged@7"), ("e42-16x1-s43", "killed")):
        write_state(here / f"runs/tiny/jobs/{id}.json", State(id, status))
    words = ("bench", "tiny.toml", "--data", "text", "--gpus", "none", "--dry-run", "--seeds", "2")
    _, out, _ = run(capsys, *words)
    said = {line.split()[0]: line.split("9,600")[1].strip() for line in out.splitlines() if "9,600" in line}
    assert said == {
        "e42-16x1-s42": "ok: not repeated",
        "gru-16x1-s42": "diverged@7: not repeated without --again",
        "e42-16x1-s43": "killed: resumes",
        "gru-16x1-s43": "starts",
    }
    assert "2 runs, 19,200 tokens" in out, "what is done and what failed is left out"
    out = run(capsys, *words, "--again")[1]
    assert "diverged@7: starts again" in out
    assert "3 runs, 28,800 tokens" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bench", "quik"), "there is no suite 'quik'. Did you mean 'quick'?"),
        (("bench", "tiny.toml", "--on", "moon"), "there is no executor 'moon'"),
        (("bench", "tiny.toml", "--data", "nowhere"), "nowhere"),
        (("bench", "tiny.toml", "--data", "text", "--strict"), "no variant 'e77' is installed"),
        (("bench", "tiny.toml", "--data", "text", "--set", "train.chunk_size=90000"), "text"),
        (("bench", "tiny.toml", "--gpus", "3"), "there is no GPU 3"),
        (("jobs", "run"), "give a file with one command per line, or one command: elman jobs run -- COMMAND"),
        (("jobs", "run", "nowhere.txt"), "cannot read nowhere.txt"),
        (("jobs", "run", "tiny.toml", "--", "true"), "give a file with one command per line, or one command"),
        (("jobs", "status", "."), "holds no jobs"),
        (("jobs", "cancel", "."), "holds no jobs"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_with_2(here, capsys, words, said):
    code, _, err = run(capsys, *words)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert not (here / "runs").exists()


def test_commands_of_a_file_run_and_are_not_repeated(here, capsys):
    (here / "todo.txt").write_text("# first\necho one >> ran\n\n" + TWO + "\n")
    code, out, _ = run(capsys, "jobs", "run", "todo.txt", "--gpus", "none", "--slots", "1")
    assert code == 3, "all that failed ran out of memory"
    assert (here / "ran").read_text().split() == ["one", "two"]
    assert "1 oom, 1 ok; logs: runs/todo/logs" in out
    assert run(capsys, "jobs", "run", "todo.txt", "--gpus", "none")[0] == 3
    assert (here / "ran").read_text().split() == ["one", "two"]
    code, out, _ = run(capsys, "jobs", "status", "runs/todo")
    assert code == 0
    assert out.splitlines()[-1] == "1 oom, 1 ok; no scheduler is running"
    assert "see runs/todo/logs/2.1.log" in out
    facts = json.loads(run(capsys, "jobs", "status", "runs/todo", "--json")[1])
    assert [job["status"] for job in facts["jobs"]] == ["ok", "oom"]
    assert facts["jobs"][1]["command"] == ["sh", "-c", TWO]
    (here / "todo.txt").write_text("echo other\n")
    assert "another command 1" in run(capsys, "jobs", "run", "todo.txt", "--gpus", "none")[2]


@pytest.mark.parametrize(
    ("content", "jobs"),
    [
        ("printf a\u2028b\nprintf x\x0cy\x85\x1c\n", ["printf a\u2028b", "printf x\x0cy\x85\x1c"]),
        ("\ufeff# a comment\r\n  true \r\n", ["true"]),
        ("true\u3000", ["true\u3000"]),
    ],
)
def test_a_line_of_a_list_ends_at_a_newline_alone(here, content, jobs):
    (here / "list").write_bytes(content.encode())
    found, _ = _commands(here / "list", None)
    assert [command[-1] for command in found.values()] == jobs


@pytest.mark.parametrize("content", [b"true\n\xff", "true\n".encode("utf-16")])
def test_a_list_in_another_encoding_is_one_line(here, capsys, content):
    (here / "list").write_bytes(content)
    code, _, err = run(capsys, "jobs", "run", "list", "--gpus", "none")
    assert (code, err.count("\n")) == (2, 1)
    assert "list is not UTF-8, from byte " in err


def test_without_gpus_nothing_is_asked_of_their_driver(here, capsys, monkeypatch):
    def missing():
        raise ConfigError("pip install nvidia-ml-py")

    monkeypatch.setattr(gpus, "monitor", missing)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-abc")
    assert run(capsys, "jobs", "run", "--gpus", "none", "--out", "o", "--", "true")[0] == 0


def test_a_status_of_another_version_is_shown(here, capsys):
    assert run(capsys, "jobs", "run", "--gpus", "none", "--out", "o", "--", "true")[0] == 0
    write_json(here / "o/jobs/1.json", {"id": "1", "status": "paused", "attempts": []})
    code, out, _ = run(capsys, "jobs", "status", "o")
    assert (code, out.splitlines()[-1]) == (0, "1 paused; no scheduler is running")


def test_one_command_behind_two_dashes_keeps_its_own_flags(here, capsys):
    words = ("jobs", "run", "--gpus", "none", "--out", "o", "--json", "--", sys.executable, "-c", "print('--out')")
    code, out, err = run(capsys, *words)
    assert code == 0
    assert json.loads(out)["jobs"][0]["status"] == "ok"
    assert "1 job in o" in err
    assert (here / "o/logs/1.1.log").read_text() == "--out\n"


BOTH = f"{ELMAN.format(3)}\n{ELMAN.format(4)}"


@pytest.mark.parametrize(
    ("commands", "code", "more"),
    [
        (ELMAN.format(4), 4, ()),
        ("exit 4", 1, ()),
        (BOTH, 1, ()),
        ("true", 0, ()),
        ("sleep 30", 6, ("--timeout", "0.01")),
    ],
)
def test_the_exit_code_says_what_failed(here, capsys, commands, code, more):
    (here / "todo").write_text(commands + "\n")
    assert run(capsys, "jobs", "run", "todo", "--gpus", "none", *more)[0] == code


def test_gpus_are_chosen_and_shown(here, capsys, monkeypatch):
    fake = FakeMonitor.make(here / "gpus", 3)
    fake.plant(1, pids=[4711])
    monkeypatch.setattr(gpus, "monitor", lambda: fake)
    monkeypatch.setenv("FAKE_GPUS", str(fake.root))
    monkeypatch.setenv("ELMAN_LOCKS", str(here / "locks"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (here / "todo").write_text("\n".join(f"ID={i}; {USE_GPU.format(seconds=0.05)}" for i in range(3)))
    code, out, _ = run(capsys, "jobs", "run", "todo", "--avoid", "0")
    assert code == 0
    assert "one job on each of GPU 1 (Fake), 2 (Fake)" in out
    assert {state.attempts[0].gpu_uuid for state in states(here / "runs/todo").values()} == {"GPU-0002"}
    assert "used by pid 4711" in run(capsys, "jobs", "status")[1]
    code, _, err = run(capsys, "jobs", "run", "todo", "--slots", "2")
    assert (code, "--slots divides the CPU" in err) == (2, True), "no flag does nothing in silence"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    code, _, err = run(capsys, "jobs", "run", "todo", "--gpus", "2")
    assert (code, "CUDA_VISIBLE_DEVICES=1 hides" in err) == (2, True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, _, err = run(capsys, "jobs", "run", "todo")
    assert (code, "no GPU is left" in err) == (2, True)


def test_ctrl_c_lets_jobs_save_and_the_same_command_goes_on(here):
    saves = "trap 'echo saved; exit 143' TERM; touch started; sleep 60 & wait"
    (here / "todo").write_text(f"test -e started || {{ {saves}; }}\ntouch second\n")
    words = ("jobs", "run", "todo", "--gpus", "none", "--slots", "1")
    process = elman(*words)
    wait_for((here / "started").exists)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130, out
    assert "stopping: running jobs save first" in out
    assert "1 killed, 1 waiting" in out
    assert (here / "runs/todo/logs/1.1.log").read_text() == "saved\n"
    assert not (here / "second").exists()
    again = elman(*words)
    out, _ = again.communicate(timeout=30)
    assert again.returncode == 0, out
    assert {id: len(state.attempts) for id, state in states(here / "runs/todo").items()} == {"1": 2, "2": 1}


def test_jobs_are_cancelled_from_another_terminal(here, capsys):
    (here / "todo").write_text("trap 'exit 143' TERM; touch started; sleep 60 & wait\ntouch second\n")
    process = elman("jobs", "run", "todo", "--gpus", "none", "--slots", "1")
    wait_for((here / "started").exists)
    assert "is in use by another scheduler" in run(capsys, "jobs", "run", "todo", "--gpus", "none")[2]
    assert "a scheduler is running" in run(capsys, "jobs", "status", "runs/todo")[1]
    assert run(capsys, "jobs", "cancel", "runs/todo", "3")[0] == 2
    code, out, _ = run(capsys, "jobs", "cancel", "runs/todo", "1")
    assert (code, "stops 1 job of runs/todo" in out) == (0, True)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1, out
    assert {id: state.status for id, state in states(here / "runs/todo").items()} == {"1": "killed", "2": "ok"}


def test_cancelling_in_a_folder_that_may_not_be_written_is_one_line(here, capsys, monkeypatch):
    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    folder = Folder(here / "out")
    folder.commands({"1": ["true"]}, None, 1)
    monkeypatch.setattr(Path, "touch", refused)
    code, _, said = run(capsys, "jobs", "cancel", str(here / "out"))
    folder.close()
    assert (code, said.count("\n")) == (1, 1)
    assert "to stop 1: Permission denied" in said


def test_a_job_whose_scheduler_is_gone_can_be_cancelled(here, capsys):
    (here / "todo").write_text("trap 'touch saved; exit 143' TERM; touch started; sleep 60 & wait\n")
    process = elman("jobs", "run", "todo", "--gpus", "none")
    wait_for(lambda: (here / "started").exists() and states(here / "runs/todo")["1"].attempts[0].pid)
    process.kill()
    process.communicate()
    code, out, _ = run(capsys, "jobs", "cancel", "runs/todo")
    assert (code, "told to stop: 1 job" in out) == (0, True)
    wait_for((here / "saved").exists)


def test_what_ended_after_its_scheduler_is_not_shown_as_running(here, capsys):
    (here / "todo").write_text("while ! test -e go; do sleep 0.05; done; exit 5\n")
    process = elman("jobs", "run", "todo", "--gpus", "none")
    wait_for(lambda: states(here / "runs/todo").get("1") and states(here / "runs/todo")["1"].attempts[0].pid)
    process.kill()
    process.communicate()
    assert "1 running" in run(capsys, "jobs", "status", "runs/todo")[1]
    (here / "go").touch()
    wait_for((here / "runs/todo/logs/1.1.exit").exists)
    wait_for(lambda: "1 crashed" in run(capsys, "jobs", "status", "runs/todo")[1])
    assert states(here / "runs/todo")["1"].status == "running", "looking writes nothing"


@pytest.mark.slow  # real trainings, each of which imports torch
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the training among the processes by its files")
def test_a_suite_survives_the_death_of_its_scheduler_and_of_a_training(here, capsys):
    words = ("bench", "tiny.toml", "--data", "text", "--gpus", "none", "--slots", "2")
    folder = here / "runs/tiny"
    first = elman(*words)
    killed = folder / "runs/e42-16x1-s42"
    wait_for(lambda: (killed / "checkpoints/step-00000050").exists(), 120)
    first.kill()
    first.communicate()
    os.killpg(states(folder)["e42-16x1-s42"].attempts[0].pid, signal.SIGKILL)
    code, out, _ = run(capsys, *words)
    assert code == 0, out
    assert "left out: e77: no variant 'e77' is installed" in out
    found = states(folder)
    assert {id: state.status for id, state in found.items()} == {"e42-16x1-s42": "ok", "gru-16x1-s42": "ok"}
    assert [a.exit_code for a in found["e42-16x1-s42"].attempts] == [None, 0]
    assert len(found["gru-16x1-s42"].attempts) == 1, "it ran on, and its end was seen"
    for id in found:
        assert [line["step"] for line in metrics(folder / "runs" / id)] == list(range(1, 301))
    [resumed] = json.loads((killed / "manifest.json").read_text())["resumed"]
    assert resumed["at_step"] >= 50
    assert (folder / "report.html").exists()
    assert f"elman results {Path('runs/tiny')}" in out
    code, out, err = run(capsys, *words, "--json")
    assert code == 0, err
    assert [job["status"] for job in json.loads(out)["jobs"]] == ["ok", "ok"]
    assert states(folder) == found, "nothing was repeated"
    code, _, err = run(capsys, *words, "--set", "train.clip=0.5")
    assert (code, "with other settings (train.clip was 1.0 and is 0.5)" in err) == (2, True)


def test_slots_are_the_cores_where_memory_allows(monkeypatch):
    monkeypatch.setattr(slots, "cores", lambda: 6)
    for memory, expected in ((2**40, 6), (5 * 2**30, 2), (0, 1)):
        monkeypatch.setattr("psutil.virtual_memory", lambda memory=memory: Mock(free=0, available=memory))
        assert slots.cpu_slots() == expected
