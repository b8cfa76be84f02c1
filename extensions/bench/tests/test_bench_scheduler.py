"""Each job runs once, on a GPU of its own, whatever happens to it, to the scheduler, or to the GPU."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from elman_bench.jobs import local as local_module
from elman_bench.jobs import scheduler as scheduler_module
from elman_bench.jobs.gpus import Look
from elman_bench.jobs.job import Attempt, Ending, State, write_state
from elman_bench.jobs.local import attempt_lock, kill_group, stop_orphan
from elman_bench.jobs.locks import Lock, is_locked
from elman_bench.jobs.outcome import ELMAN, figures, final_status, next_command
from elman_bench.jobs.scheduler import Scheduler, cancel_file
from fake_gpus import USE_GPU, FakeMonitor
from scheduler_helpers import (
    Recorder,
    cpu_executor,
    gpu_executor,
    schedule,
    scheduler_process,
    shell_job,
    state,
)
from train_helpers import wait_for

from elman_core.registry import CheckpointError, ConfigError, StorageError
from elman_core.storage import write_json

pytestmark = pytest.mark.skipif(not sys.platform.startswith(("linux", "darwin")), reason="needs file locks of POSIX")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    monitor = FakeMonitor.make(tmp_path / "gpus", 2)
    monkeypatch.setenv("FAKE_GPUS", str(monitor.root))
    return monitor


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_every_job_runs_and_its_status_is_its_exit_code(tmp_path):
    elman = "sh -c 'exit {}' elman"
    shells = {
        "a": "echo hello",
        "b": elman.format(3),
        "c": elman.format(4),
        "d": "echo oops >&2; exit 1",
        "e": elman.format(6),
    }
    jobs = [shell_job(tmp_path, id, shell) for id, shell in {**shells, "f": "exit 3", "g": "exit 4"}.items()]
    statuses, _ = schedule(jobs, cpu_executor())
    assert {id: statuses.pop(id) for id in "fg"} == {"f": "crashed", "g": "crashed"}, (
        "another program's codes are its own"
    )
    assert statuses == {"a": "ok", "b": "oom", "c": "diverged", "d": "crashed", "e": "timeout"}
    assert (tmp_path / "logs/a.1.log").read_text() == "hello\n"
    assert (tmp_path / "logs/d.1.log").read_text() == "oops\n"
    assert all(len(state(job).attempts) == 1 for job in jobs), "a job's own failure is never tried again"
    [attempt] = state(jobs[3]).attempts
    assert (attempt.exit_code, attempt.slot[:3], bool(attempt.host), bool(attempt.pid)) == (1, "cpu", True, True)
    assert attempt.started <= attempt.ended


def test_a_command_that_is_not_there_is_a_crash_with_a_reason_in_its_log(tmp_path):
    job = shell_job(tmp_path, "a", "", command=("no-such-command",))
    assert schedule([job], cpu_executor())[0] == {"a": "crashed"}
    assert (tmp_path / "logs/a.1.log").read_text() == "cannot start no-such-command: No such file or directory\n"


def test_a_job_that_cannot_start_breaks_only_itself(tmp_path):
    def refuse():
        raise CheckpointError("its recipe is damaged")

    changes = {
        "long": {"command": ("sh", "-c", "true " + "x" * 2**18)},
        "nul": {"command": ("sh", "-c", "true \0")},
        "recipe": {"prepare": refuse},
        "log": {},
        "good": {},
    }
    jobs = {id: shell_job(tmp_path, id, "true", **more) for id, more in changes.items()}
    jobs["log"].attempt_log(1).mkdir(parents=True)
    statuses, recorder = schedule(jobs.values(), cpu_executor(1))
    assert statuses == {**dict.fromkeys(changes, "crashed"), "good": "ok"}
    for id, reason in (
        ("long", "cannot start the command: Argument list too long"),
        ("nul", "cannot start the command: embedded null byte"),
        ("recipe", "its recipe is damaged"),
        ("log", "log.1.log: Is a directory"),
    ):
        [event] = [event for event in recorder.events if event.startswith(f"{id}: crashed")]
        assert reason in event
    assert schedule(jobs.values(), cpu_executor(1))[0] == statuses, "nor does the next scheduler trip over them"


@pytest.mark.parametrize(
    "change",
    [
        {"status": 5},
        {"attempts": [{"slot": 5}]},
        {"attempts": [{"pid": "1"}]},
        {"attempts": 3},
        {"attempts": [None]},
        {"contended": "no"},
        {"status": "running"},  # and was never started
    ],
)
def test_a_state_with_values_of_another_type_is_damaged(tmp_path, change):
    job = shell_job(tmp_path, "a", "true")
    job.state.parent.mkdir()
    write_json(job.state, {"id": "a", "status": "waiting", "attempts": [], **change})
    with pytest.raises(CheckpointError, match="is not the state of a job"):
        state(job)


def test_no_code_of_the_current_folder_runs(tmp_path, monkeypatch):
    for name in ("json", "random", "signal", "elman_core", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w'); raise SystemExit(99)")
    monkeypatch.chdir(tmp_path)
    assert schedule([shell_job(tmp_path, "a", "true")], cpu_executor())[0] == {"a": "ok"}
    subprocess.run([*ELMAN, "--version"], check=True, stdout=subprocess.DEVNULL)
    assert not (tmp_path / "ran").exists()


def test_what_is_finished_is_not_repeated_and_what_failed_only_if_asked(tmp_path):
    shell = 'echo $ID >> ran; test -e "$ID.fixed"'
    jobs = [shell_job(tmp_path, id, f"cd '{tmp_path}'; {shell}") for id in ("good", "bad")]
    (tmp_path / "good.fixed").touch()
    assert schedule(jobs, cpu_executor(1))[0] == {"good": "ok", "bad": "crashed"}
    assert schedule(jobs, cpu_executor(1))[0] == {"good": "ok", "bad": "crashed"}
    assert (tmp_path / "ran").read_text().split() == ["good", "bad"]
    (tmp_path / "bad.fixed").touch()
    assert schedule(jobs, cpu_executor(1), again=True)[0] == {"good": "ok", "bad": "ok"}
    assert (tmp_path / "ran").read_text().split() == ["good", "bad", "bad"]
    assert [a.exit_code for a in state(jobs[1]).attempts] == [1, 0]


def test_a_damaged_state_is_an_error_before_anything_runs(tmp_path):
    jobs = [shell_job(tmp_path, id, f"touch '{tmp_path}/ran'") for id in ("a", "b")]
    jobs[1].state.parent.mkdir()
    jobs[1].state.write_text("{")
    with pytest.raises(CheckpointError, match="remove it to run the job again"):
        schedule(jobs, cpu_executor())
    assert not (tmp_path / "ran").exists()


def test_a_job_whose_state_was_removed_runs_again(tmp_path):
    job = shell_job(tmp_path, "a", f"echo >> '{tmp_path}/times'")
    for times in (1, 2):
        assert schedule([job], cpu_executor())[0] == {"a": "ok"}
        assert len((tmp_path / "times").read_text()) == times
        job.state.unlink()


def test_a_job_whose_state_was_removed_while_it_runs_is_named_and_the_others_go_on(tmp_path):
    jobs = [shell_job(tmp_path, "a", "sleep 60"), shell_job(tmp_path, "b", "true")]
    executor, attempt = cpu_executor(), Attempt()
    executor.start(jobs[0], executor.slot(jobs[0]), jobs[0].command, attempt, 1)
    statuses, recorder = schedule(jobs, cpu_executor())
    assert statuses == {"a": "crashed", "b": "ok"}
    assert f"a still runs, started by an earlier scheduler (pid {attempt.pid})" in recorder.text()
    assert kill_group(attempt.pid, attempt.pid_started, signal.SIGKILL)


def test_a_job_that_cannot_start_keeps_no_lock(tmp_path):
    job = shell_job(tmp_path, "a", "true")
    job.attempt_log(1).with_suffix(".exit").mkdir(parents=True)
    found, recorder = schedule([job], cpu_executor())
    assert found == {"a": "crashed"}
    assert "cannot remove" in recorder.text()
    assert not is_locked(attempt_lock(job, 1))


def test_a_job_that_ends_on_a_full_disk_keeps_its_exit_code(tmp_path):
    # A folder in the place of the exit file cannot be replaced, as a file on a full disk cannot be written.
    job = shell_job(tmp_path, "a", f"mkdir -p '{tmp_path}/logs/a.1.exit/x'; exit 0")
    assert schedule([job], cpu_executor())[0] == {"a": "ok"}


def test_a_folder_that_is_moved_while_its_jobs_run_is_not_made_again(tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    jobs = [shell_job(folder, id, f"touch '{tmp_path}/on'; sleep 0.5") for id in "ab"]
    thread = threading.Thread(target=lambda: wait_for((tmp_path / "on").exists) or folder.rename(tmp_path / "new"))
    thread.start()
    with pytest.raises(StorageError, match=r"old was moved or removed .* --out"):
        schedule(jobs, cpu_executor(1))
    thread.join()
    assert not folder.exists()
    assert [state(shell_job(tmp_path / "new", id, "")).status for id in "ab"] == ["running", "waiting"]


def test_a_job_whose_lock_takes_no_text_is_watched_all_the_same(tmp_path, monkeypatch):
    def full(lock, text):
        raise StorageError("no space left")

    monkeypatch.setattr(Lock, "write", full)
    job = shell_job(tmp_path, "a", "exit 5")
    assert schedule([job], cpu_executor())[0] == {"a": "crashed"}
    assert state(job).attempts[0].exit_code == 5


def test_one_job_on_each_gpu_at_a_time(tmp_path, fake):
    jobs = [shell_job(tmp_path, f"j{i}", USE_GPU.format(seconds=0.15)) for i in range(6)]
    statuses, _ = schedule(jobs, gpu_executor(fake))
    assert set(statuses.values()) == {"ok"}
    assert fake.collisions() == ""
    assert sorted(fake.ran()) == [f"j{i}" for i in range(6)]
    assert {state(job).attempts[0].gpu_uuid for job in jobs} == {"GPU-0000", "GPU-0001"}
    assert not any(state(job).contended for job in jobs)


def test_a_job_of_two_gpus_waits_for_both_and_is_not_overtaken(tmp_path, fake):
    shell = USE_GPU.format(seconds=0.1)
    jobs = [shell_job(tmp_path, id, shell, gpus=2 if id == "wide" else 1) for id in ("a", "wide", "b")]
    assert set(schedule(jobs, gpu_executor(fake))[0].values()) == {"ok"}
    assert fake.collisions() == ""
    assert fake.ran() == ["a", "wide", "b"]
    with pytest.raises(ConfigError, match="needs 3 GPUs can never start: only 2 may be used"):
        schedule([shell_job(tmp_path, "wider", shell, gpus=3)], gpu_executor(fake))


def test_a_gpu_in_use_is_avoided_and_said_until_it_is_free(tmp_path, fake):
    fake.plant(0, memory=2**34)
    fake.plant(1, pids=[4711])
    said = Recorder(lambda text: fake.plant(1) if "waiting for a slot" in text else None)
    job = shell_job(tmp_path, "a", USE_GPU.format(seconds=0.05))
    assert schedule([job], gpu_executor(fake), said)[0] == {"a": "ok"}
    assert said.events[0] == "waiting for a slot: gpu 0: 16.0 GiB in use; gpu 1: used by pid 4711"
    assert state(job).attempts[0].gpu_uuid == "GPU-0001"


def test_a_job_that_shares_its_gpu_is_flagged_and_the_other_is_not(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(scheduler_module, "LOOK", 0.02)
    jobs = [shell_job(tmp_path, id, USE_GPU.format(seconds=1.5)) for id in ("a", "b")]
    stranger = subprocess.Popen(["sleep", "60"])
    said = Recorder(lambda text: fake.plant(0, pids=[stranger.pid]) if text.startswith("b: started") else None)
    statuses, said = schedule(jobs, gpu_executor(fake), said)
    stranger.kill()
    stranger.wait()
    assert statuses == {"a": "ok", "b": "ok"}
    assert [state(job).contended for job in jobs] == [True, False]
    assert state(jobs[0]).attempts[0].strangers == [f"pid {stranger.pid}"]
    assert f"a: CONTENDED, gpu 0 is shared with pid {stranger.pid}" in said.events


def test_processes_that_a_job_starts_are_its_own(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(scheduler_module, "LOOK", 0.02)
    child = "import os, time; open(os.path.join(os.environ['FAKE_GPUS'], 'GPU-0000', str(os.getpid())), 'w'); time.sleep(0.4)"
    job = shell_job(tmp_path, "a", f'{sys.executable} -c "{child}" & {sys.executable} -c "{child}"; wait')
    assert schedule([job], gpu_executor(fake))[0] == {"a": "ok"}
    assert not state(job).contended


def test_a_process_that_ends_while_it_is_looked_at_is_no_stranger(fake, monkeypatch):
    ended, stays = subprocess.Popen(["true"]), subprocess.Popen(["sleep", "60"])
    ended.wait()
    looks = iter([{ended.pid, stays.pid}, {stays.pid}])
    monkeypatch.setattr(fake, "look", lambda _uuid: Look(0, 0, frozenset(next(looks))))
    handle = SimpleNamespace(attempt=SimpleNamespace(pid=os.getpid()), slot=SimpleNamespace(gpus=["GPU-0000"]))
    monkeypatch.setattr("elman_bench.jobs.local._belongs", lambda *_: False)
    try:
        assert gpu_executor(fake).contended(handle) == [f"pid {stays.pid}"]
    finally:
        stays.kill()
        stays.wait()


def test_a_job_that_takes_too_long_is_told_to_save_and_then_ended(tmp_path):
    polite = "trap 'echo saved; exit 143' TERM; sleep 60 & wait"
    deaf = "trap '' TERM; for i in $(seq 600); do sleep 0.05; done"
    jobs = [shell_job(tmp_path, id, shell, timeout=1.5) for id, shell in (("polite", polite), ("deaf", deaf))]
    jobs.append(shell_job(tmp_path, "quick", "true", timeout=30))
    began = time.monotonic()
    statuses, _ = schedule(jobs, cpu_executor(3), grace=0.5)
    assert time.monotonic() - began < 20
    assert statuses == {"polite": "timeout", "deaf": "timeout", "quick": "ok"}
    assert (tmp_path / "logs/polite.1.log").read_text() == "saved\n"
    assert [state(job).attempts[0].cause for job in jobs] == ["timeout", "timeout", ""]
    assert len(state(jobs[0]).attempts) == 1, "a timeout is the job's own"


def test_a_job_killed_by_another_is_run_again_but_not_for_ever(tmp_path):
    once = f"cd '{tmp_path}'; test -e again || {{ touch again; kill -9 $$; }}"
    jobs = [shell_job(tmp_path, "once", once), shell_job(tmp_path, "always", "kill -9 $$")]
    statuses, said = schedule(jobs, cpu_executor(), retries=2)
    assert statuses == {"once": "ok", "always": "killed"}
    assert [a.exit_code for a in state(jobs[0]).attempts] == [137, 0]
    assert [a.exit_code for a in state(jobs[1]).attempts] == [137, 137, 137]
    assert said.text().count("will be tried again") == 3
    assert {p.name for p in (tmp_path / "logs").glob("once*.log")} == {"once.1.log", "once.2.log"}


def test_a_gpu_that_fails_is_left_and_its_job_goes_elsewhere(tmp_path, fake):
    act = Recorder(lambda text: fake.plant(0, lost=True) if text == "a: started on gpu 0" else None)
    shell = f"touch '{tmp_path}'/$CUDA_VISIBLE_DEVICES; sleep 0.2; test $CUDA_VISIBLE_DEVICES != GPU-0000"
    jobs = [shell_job(tmp_path, "a", shell)]
    statuses, _ = schedule(jobs, gpu_executor(fake), act)
    assert statuses == {"a": "ok"}
    first, second = state(jobs[0]).attempts
    assert (first.cause, first.exit_code, second.gpu_uuid) == ("gpu lost: GPU GPU-0000 is lost", 1, "GPU-0001")


def test_without_any_gpu_left_the_jobs_wait_for_another_day(tmp_path, fake):
    jobs = [shell_job(tmp_path, id, "sleep 0.1; exit 1") for id in ("a", "b", "c")]
    lose = Recorder(lambda text: fake.plant(int(text[-1]), lost=True) if "started on gpu" in text else None)
    with pytest.raises(ConfigError, match="only 0 may be used"):
        schedule(jobs, gpu_executor(fake), lose)
    assert {state(job).status for job in jobs} <= {"lost", "waiting"}


def test_what_a_job_leaves_running_is_ended_with_it(tmp_path):
    job = shell_job(tmp_path, "a", f"sleep 60 & echo $! > '{tmp_path}/pid'; exit 0")
    assert schedule([job], cpu_executor())[0] == {"a": "ok"}
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_process_that_outlives_its_group_does_not_hold_up_the_next_attempt(tmp_path):
    leave = "import os, time; os.setsid(); time.sleep(8)"  # in a session of its own, it is not ended with the job
    once = f"test -e '{tmp_path}/again' || {{ touch '{tmp_path}/again'; kill -9 $$; }}"
    job = shell_job(tmp_path, "a", f'{sys.executable} -c "{leave}" & sleep 0.3; {once}')
    assert schedule([job], cpu_executor())[0] == {"a": "ok"}
    assert [a.exit_code for a in state(job).attempts] == [137, 0]


def test_cancelling_stops_one_job_and_keeps_another_from_starting(tmp_path):
    slow = f"trap 'exit 143' TERM; touch '{tmp_path}/started'; sleep 60 & wait"
    shells = {"slow": slow, "later": "true", "last": "true"}
    jobs = [shell_job(tmp_path, id, shell) for id, shell in shells.items()]

    def cancel():
        wait_for((tmp_path / "started").exists)
        cancel_file(jobs[1]).touch()
        cancel_file(jobs[0]).touch()

    thread = threading.Thread(target=cancel)
    thread.start()
    statuses, _ = schedule(jobs, cpu_executor(1))
    thread.join()
    assert statuses == {"slow": "killed", "later": "killed", "last": "ok"}
    assert state(jobs[0]).attempts[0].cause == "cancelled"
    assert state(jobs[1]).attempts == []
    jobs[0] = shell_job(tmp_path, "slow", "true")
    assert set(schedule(jobs, cpu_executor(1))[0].values()) == {"ok"}, "started again, it goes on"


def interrupted(tmp_path, shells, times, **options):
    """Statuses of jobs whose scheduler is interrupted so many times once all of them run: `ON` in a shell line says so."""
    jobs = [shell_job(tmp_path, id, shell.replace("ON", f"touch '{tmp_path}'/$ID.on")) for id, shell in shells.items()]
    runner = Scheduler(jobs, cpu_executor(len(jobs) - 1), Recorder(), every=0.02, **options)

    def interrupt():
        for job in jobs[:-1]:
            wait_for((tmp_path / f"{job.id}.on").exists)
        for _ in range(times):
            runner.interrupt()
            time.sleep(0.1)

    thread = threading.Thread(target=interrupt)
    thread.start()
    states = runner.run()
    thread.join()
    return {s.id: s.status for s in states}, jobs


def test_a_second_interrupt_kills_at_once(tmp_path):
    deaf = "trap '' TERM; ON; for i in $(seq 600); do sleep 0.05; done"
    began = time.monotonic()
    statuses, jobs = interrupted(tmp_path, {"a": deaf, "never": "true"}, 2, grace=1000)
    assert time.monotonic() - began < 10
    assert statuses == {"a": "killed", "never": "waiting"}
    wait_for(lambda: gone(state(jobs[0]).attempts[0].pid), 5)


def test_kills_at_any_moment_lose_nothing_and_double_nothing(tmp_path, fake):
    draw = random.Random(0)
    shells = {n: {f"{n}{i}": USE_GPU.format(seconds=0.15) for i in range(8)} for n in ("x", "y")}
    schedulers = {n: scheduler_process(tmp_path / n, fake, shells[n]) for n in shells}
    kills = 8
    while schedulers:
        time.sleep(draw.uniform(0.1, 0.9))
        for n, process in list(schedulers.items()):
            if kills and process.poll() is None:
                kills -= 1
                process.kill()
            elif process.poll() is None:
                continue
            said = process.communicate()[0]
            assert process.returncode in (0, -signal.SIGKILL), said
            if process.returncode:
                schedulers[n] = scheduler_process(tmp_path / n, fake, shells[n])
            else:
                del schedulers[n]
    assert kills <= 6, "they ended before they could be killed"
    assert sorted(fake.ran()) == sorted(id for jobs in shells.values() for id in jobs)
    assert fake.collisions() == ""


def test_what_ended_while_nobody_looked_is_not_repeated(tmp_path, fake):
    shells = {"good": USE_GPU.format(seconds=0.3), "bad": "sleep 0.3; exit 5"}
    first = scheduler_process(tmp_path, fake, shells)
    jobs = [shell_job(tmp_path, id, shell) for id, shell in shells.items()]
    wait_for(lambda: all(state(job).status == "running" and state(job).attempts[0].pid for job in jobs))
    first.kill()
    first.wait()
    wait_for(lambda: not any(is_locked(attempt_lock(job, 1)) for job in jobs))
    statuses, _ = schedule(jobs, gpu_executor(fake))
    assert statuses == {"good": "ok", "bad": "crashed"}
    assert state(jobs[1]).attempts[0].exit_code == 5
    assert [len(state(job).attempts) for job in jobs] == [1, 1]


def test_a_job_that_died_with_its_scheduler_is_run_again(tmp_path):
    job = shell_job(tmp_path, "a", "true")
    write_state(
        job.state,
        State("a", "running", False, [Attempt("h", "cpu 0", None, 2**22 + 1, 1.0, "2026-01-01T00:00:00+00:00")]),
    )
    assert schedule([job], cpu_executor())[0] == {"a": "ok"}
    assert [(a.exit_code, bool(a.ended)) for a in state(job).attempts] == [(None, True), (0, True)]


def test_a_scheduler_killed_before_it_wrote_the_process_down_finds_it_by_its_lock(tmp_path):
    slow = shell_job(tmp_path, "a", "sleep 0.5; exit 3")
    executor = cpu_executor()
    executor.start(slow, executor.slot(slow), slow.command, Attempt(), 1)
    write_state(slow.state, State("a", "running", False, [Attempt(slot="cpu 0", started=scheduler_module.now())]))
    assert schedule([slow], cpu_executor())[0] == {"a": "crashed"}
    [attempt] = state(slow).attempts
    assert attempt.pid is not None
    assert attempt.log.endswith("a.1.log")


def test_an_adopted_job_keeps_its_timeout_and_can_be_stopped(tmp_path, fake):
    shells = {"a": "touch $FAKE_GPUS/on; trap 'exit 143' TERM; sleep 60 & wait"}
    first = scheduler_process(tmp_path, fake, shells)
    job = shell_job(tmp_path, "a", shells["a"], timeout=0.5)
    wait_for(lambda: (fake.root / "on").exists() and state(job).attempts[0].pid)
    first.kill()
    first.wait()
    assert schedule([job], gpu_executor(fake))[0] == {"a": "timeout"}
    wait_for(lambda: gone(state(job).attempts[0].pid), 5)


# a training's status is its manifest's


def run_job(tmp_path, status=None, **facts):
    run = tmp_path / "run"
    if status:
        run.mkdir(exist_ok=True)
        (run / "manifest.json").write_text(json.dumps({"status": status, **facts}))
    return shell_job(tmp_path, "a", "true", run=run)


@pytest.mark.parametrize(
    ("manifest", "code", "status"),
    [
        ("ok", 0, "ok"),
        (None, 0, "crashed"),  # a training that made no run
        ("diverged@17", 4, "diverged@17"),
        ("oom", 3, "oom"),
        ("running", 137, "killed"),
        ("killed", 143, "killed"),
        ("killed", 2, "crashed"),  # from an earlier attempt: this one failed before it began
        ("ok", 137, "ok"),  # killed after everything was saved
        ("running", None, "lost"),
        ("diverged@3", None, "diverged@3"),
        ("incomplete", 0, "incomplete"),
        (None, 2, "crashed"),
    ],
)
def test_the_manifest_and_the_exit_code_together_say_how_a_training_ended(tmp_path, manifest, code, status):
    assert final_status(run_job(tmp_path, manifest), Ending(code)) == status


def test_a_run_with_a_checkpoint_is_resumed_and_one_without_begun_anew(tmp_path):
    job = run_job(tmp_path)
    assert next_command(job, 1) == job.command
    job.run.mkdir()
    (job.run / "metrics.jsonl").touch()
    assert next_command(job, 2) == job.command
    run_job(tmp_path, "diverged@3")
    assert next_command(job, 2) == job.command
    assert not job.run.exists()
    assert (tmp_path / "logs/a.1.run/manifest.json").exists(), "its evidence is kept"
    run_job(tmp_path, "killed")
    (job.run / "checkpoints/step-00000005").mkdir(parents=True)
    several = ("python", "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "elman_core")
    training = dataclasses.replace(job, command=(*several, "train", "a.toml", "--out", str(job.run)))
    assert next_command(training, 3) == (*several, "resume", str(job.run))


def test_several_processes_leave_with_1_and_the_manifest_says_why(tmp_path):
    job = run_job(tmp_path, "oom", ended="2026-01-01T10:00:05+00:00")
    assert final_status(job, Ending(1), since="2026-01-01T10:00:05.700+00:00") == "oom"
    assert final_status(job, Ending(1), since="2026-01-01T10:00:06.000+00:00") == "crashed", (
        "that was an attempt before"
    )


@pytest.mark.parametrize(
    ("shell", "why"),
    [
        ("echo one; echo 'elman: no such text'; echo; exit 2", "no such text"),
        ("echo all is well; kill -9 $$", "ended by SIGKILL: by a user, or by the system because memory ran out"),
    ],
)
def test_the_last_word_of_a_failed_job_is_said_unless_it_was_killed(tmp_path, shell, why):
    _, said = schedule([shell_job(tmp_path, "a", shell)], cpu_executor(), retries=0)
    assert f": {why}" in said.events[-1]
    assert said.events[-1].endswith(f"; see {tmp_path}/logs/a.1.log")
    assert "all is well" not in said.events[-1]


@pytest.mark.parametrize("manifest", [[1], {"result": 3}, {"result": {"bits_per_byte": "low", "tok_s": 1e3}}])
def test_figures_of_a_manifest_that_holds_something_else_are_left_out(tmp_path, manifest):
    job = run_job(tmp_path, "ok")
    (job.run / "manifest.json").write_text(json.dumps(manifest))
    assert figures(job) == (", 1,000 tok/s" if "low" in str(manifest) else "")


def test_a_process_number_that_passed_to_another_is_not_signalled(tmp_path):
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert not kill_group(stranger.pid, 1.0, signal.SIGKILL)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_job_is_stopped_also_after_the_clock_was_set(tmp_path, monkeypatch):
    job = shell_job(tmp_path, "a", f"touch '{tmp_path}/on'; trap 'exit 143' TERM; sleep 60 & wait", timeout=0.1)
    began = local_module.started_at
    late = lambda pid: began(pid) and began(pid) + 3600 * (tmp_path / "on").exists()  # noqa: E731
    monkeypatch.setattr(local_module, "started_at", late)
    assert schedule([job], cpu_executor(), grace=5)[0] == {"a": "timeout"}
    executor, attempt = cpu_executor(), Attempt()
    running = executor.start(job, executor.slot(job), job.command, attempt, 2)
    # for an instant after it has begun, the system shows no command of a process
    wait_for(lambda: stop_orphan(job, dataclasses.replace(attempt, pid_started=1.0), 2))
    wait_for(lambda: executor.poll(running) is not None)
