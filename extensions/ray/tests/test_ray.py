"""Jobs on a Ray cluster: two nodes on this machine, each with a GPU that only Ray believes in."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from elman_bench.jobs.job import Attempt, Job, Slot
from elman_bench.jobs.scheduler import Scheduler
from elman_bench.jobs.slots import THREADS
from elman_ray import executor as on_ray
from elman_ray import tether
from elman_ray.executor import RayExecutor, RayNode, connect, software
from fake_gpus import FakeMonitor
from scheduler_helpers import Recorder, schedule, shell_job, state
from train_helpers import wait_for

from elman_core.cli import main
from elman_core.registry import ConfigError

CHILD = "elman_ray.tether"
STEPS, SAVED = 8, 3
# A training in miniature: it saves a checkpoint, then waits at step 5 until the file `go` is there. `resume` goes on from it.
TRAINING = f"""
import json, os, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[-1])
go, saved = run.parent / "go", run / "checkpoints/step-{SAVED}"
(run / "checkpoints").mkdir(parents=True, exist_ok=True)
for step in range(int(saved.exists()) * {SAVED} + 1, {STEPS} + 1):
    print(sys.argv[1], "step", step, flush=True)
    if step == {SAVED}:
        saved.mkdir()
    while step == 5 and not go.exists():
        time.sleep(0.05)
(run / "manifest.json").write_text(json.dumps({{"status": "ok"}}))
"""
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head without resources and two nodes with a GPU each. Nothing leaves this machine or the folder RAY_TMPDIR."""
    if not os.environ.get("ELMAN_REQUIRE_RAY"):
        pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    # The name is short: a socket's path has 107 bytes at most.
    place = Path(tempfile.mkdtemp(prefix="r", dir=os.environ.get("RAY_TMPDIR")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(place))  # where Ray looks for the address of a cluster
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("ELMAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        import ray
        from ray.cluster_utils import Cluster

        (place / "ray").mkdir()
        small = {"include_dashboard": False, "object_store_memory": 80 << 20}
        head = {"num_cpus": 0, "num_gpus": 0, "_system_config": SOON}
        made = Cluster(initialize_head=True, head_node_args={**head, **small})
        try:
            for _ in range(2):
                made.add_node(num_cpus=1, num_gpus=1, object_store_memory=80 << 20, wait=False)
            made.wait_for_nodes()
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
            shutil.rmtree(place, ignore_errors=True)


on_a_cluster = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


def around_job(job: Job) -> list[psutil.Process]:
    """The processes around a job: the one that the actor started comes first."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if CHILD in words and any(f"{job.id}.1.exit" in word for word in words):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


class TestCluster:
    pytestmark = on_a_cluster

    def test_a_lost_nodes_job_resumes_elsewhere_from_its_checkpoint(
        self, cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = tmp_path / "runs/train"
        run.parent.mkdir()
        script = tmp_path / "training.py"
        script.write_text(TRAINING)
        words = (sys.executable, str(script), "train", str(run))
        train = Job("train", words, run, tmp_path / "logs/train.log", tmp_path / "jobs/train.json")
        other = shell_job(
            tmp_path, "words", 'echo "gpu $CUDA_VISIBLE_DEVICES $ELMAN_VERIFY $ELMAN_CACHE in $PWD"', gpus=1
        )
        monkeypatch.setenv("ELMAN_VERIFY", "skip")  # a job hears what its scheduler was told
        went: list[psutil.Process] = []

        def lose_a_node() -> None:
            wait_for(lambda: "step 5" in log.read_text() if (log := train.attempt_log(1)).exists() else False, 90)
            around = around_job(train)
            went.extend(around[0].children(recursive=True))
            raylet = around[0].parents()[1].pid
            (node,) = (n for n in cluster.list_all_nodes() if n.all_processes["raylet"][0].process.pid == raylet)
            cluster.remove_node(node, allow_graceful=False)
            _, alive = psutil.wait_procs(went, timeout=20)
            assert not alive  # nobody goes on training for a scheduler that has given it up
            (run.parent / "go").touch()

        loser = threading.Thread(target=lose_a_node, daemon=True)
        loser.start()
        executor = RayExecutor(cluster.address)
        assert executor.uses_gpus
        assert executor.words == "one job on each GPU of a Ray cluster: 2 on 2 nodes"
        found, said = schedule([train, other], executor)
        loser.join()
        assert "aylet" not in capfd.readouterr().out  # standard output is for tables and JSON

        assert found == {"train": "ok", "words": "ok"}, said.text()
        first, second = state(train).attempts
        assert (first.cause, second.cause) == (f"lost node {first.host}", "")
        assert first.slot == "gpu 0 of " + first.host
        assert "train: resumed on gpu 0" in said.text()
        cache = os.environ["ELMAN_CACHE"]
        assert other.attempt_log(1).read_text() == f"gpu 0 skip {cache} in {os.getcwd()}\n"
        assert train.attempt_log(1).read_text().splitlines()[-2:] == [
            "train step 5",
            "the process that started this job has ended: the job is asked to save and stop",
        ]
        assert train.attempt_log(2).read_text().splitlines() == [
            f"resume step {s}" for s in range(SAVED + 1, STEPS + 1)
        ]
        assert not list(tmp_path.glob(".shared-*"))

    def test_an_interrupt_stops_the_jobs(self, cluster: Any, tmp_path: Path) -> None:
        job = shell_job(
            tmp_path, "long", 'trap "echo saved; exit 143" TERM; echo begun; while true; do sleep 0.1; done'
        )
        scheduler = Scheduler([job], RayExecutor(cluster.address), Recorder(), every=0.02)

        def interrupt() -> None:
            wait_for(lambda: job.attempt_log(1).exists() and "begun" in job.attempt_log(1).read_text(), 60)
            scheduler.interrupt()

        threading.Thread(target=interrupt, daemon=True).start()
        (ended,) = scheduler.run()
        assert ended.status == "killed"
        assert ended.attempts[0].cause == "interrupted"
        assert "saved" in job.attempt_log(1).read_text()

    def test_what_no_node_can_take_or_compute_alike_is_one_line(self, cluster: Any, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="takes 3 GPUs, and no node of the Ray cluster has that many: at most 1"):
            schedule([shell_job(tmp_path, "wide", "true", gpus=3)], RayExecutor(cluster.address))
        executor = RayExecutor(cluster.address)
        executor._software |= {"torch": "1.0", "elman-and-more": "0.1"}
        with pytest.raises(
            ConfigError, match=r"other software: elman-and-more is not installed there and 0.1 here and 1 more"
        ):
            schedule([shell_job(tmp_path, "any", "true")], executor)

    def test_the_commands_run_on_the_cluster(
        self, cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        words = ["jobs", "run", "--on", "ray", "--out", str(tmp_path / "jobs")]
        assert (
            main([*words, "--json", "--gpus", "none", "--", "sh", "-c", "echo at $CUDA_VISIBLE_DEVICES.; exit 4"]) == 1
        )
        printed = json.loads(capfd.readouterr().out)
        (attempt,) = printed["jobs"][0]["attempts"]
        assert (printed["jobs"][0]["status"], attempt["exit_code"], attempt["slot"][:6]) == ("crashed", 4, "cpu of")
        assert Path(attempt["log"]).read_text() == "at .\n"
        assert main([*words, "--slots", "2", "--", "true"]) == 2
        assert "the cluster chooses the GPUs" in capfd.readouterr().err


# the parts, without a cluster


def test_a_node_that_does_not_see_the_folders_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path.cwd())  # a node goes where the driver works: the test comes back at its end
    token = tmp_path / ".shared-1"
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match=rf"does not see {folder}: with --on ray, .* a disk that all nodes share"):
            RayNode().take(0, "a test", str(folder), str(token), software())
    token.touch()
    place = RayNode().take(0, "a test", str(tmp_path), str(token), software())
    assert isinstance(place, Slot)
    assert place.env["CUDA_VISIBLE_DEVICES"] == ""


def test_a_job_on_a_gpu_has_its_share_of_the_cores_or_as_many_threads_as_the_driver_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path.cwd())
    driver = FakeMonitor.make(tmp_path / "gpus", 2)
    monkeypatch.setattr(on_ray, "monitor", lambda: driver)
    monkeypatch.setattr(on_ray, "cores", lambda: 8)
    monkeypatch.setenv("ELMAN_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray does for an actor without a CPU
    node = RayNode()
    place = node.take(1, "a test", str(tmp_path), str(tmp_path), software())
    assert isinstance(place, Slot)
    assert {place.env[name] for name in THREADS} == {"4"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the user does, where the driver runs
    monkeypatch.setattr(on_ray, "connect", Mock())
    executor, actor = RayExecutor(gpus=True), Mock()
    executor._held[id(place)] = Mock(actor=actor)
    executor.start(shell_job(tmp_path, "b", "true"), place, ("true",), Attempt(), 1)
    assert {actor.start.remote.call_args.args[0].env[name] for name in THREADS} == {"3"}
    assert node.executor is not None
    node.executor.close()


def test_a_busy_gpu_is_kept_and_another_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given back to Ray, it would be the next that Ray offers."""
    free = {"gpu 1"}
    made: list[Any] = []
    killed: list[str] = []

    def actor(**resources: Any) -> Any:
        assert (resources["num_gpus"], resources["num_cpus"], resources["max_restarts"]) == (1, 0, 0)
        name = f"gpu {len(made)}"

        def take(*_: Any) -> Slot | str:
            return Slot(name, "far") if name in free else f"{name}: used by pid 1 (game)"

        made.append(types.SimpleNamespace(name=name, take=types.SimpleNamespace(remote=take)))
        return types.SimpleNamespace(remote=lambda: made[-1])

    ray = types.SimpleNamespace(
        cluster_resources=lambda: {"GPU": 2.0},
        nodes=lambda: [{"Alive": True, "Resources": {"GPU": 2.0}}],
        remote=lambda _: types.SimpleNamespace(options=actor),
        wait=lambda promises, **_: (promises, []),
        get=lambda answer: answer,
        kill=lambda actor, **_: killed.append(actor.name),
        exceptions=types.SimpleNamespace(RayError=OSError),
    )
    monkeypatch.setattr(on_ray, "connect", lambda _: ray)
    monkeypatch.setattr(on_ray, "_LOOK", 0.0)
    executor = RayExecutor()
    job = shell_job(tmp_path, "b", "true")
    assert executor.slot(job) is None
    assert executor.why == "gpu 0: used by pid 1 (game)"
    second = executor.slot(job)
    assert second == Slot("gpu 1", "far")
    assert killed == []
    executor.release(second)
    free.add("gpu 0")  # the stranger has gone
    assert executor.slot(job) is None  # it is asked again now
    assert executor.slot(job) == Slot("gpu 0", "far")
    executor.close()
    assert sorted(killed) == [f"gpu {i}" for i in range(len(made))]


def test_without_a_cluster_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Mock(side_effect=ConnectionError("Could not find any running Ray instance."))
    monkeypatch.setitem(sys.modules, "ray", Mock(is_initialized=lambda: False, init=fail))
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at auto: Could not find .* ray start --head"):
        connect("auto")
    with socket.socket() as closed:  # bound, and nobody listens: Ray would try again for minutes
        closed.bind(("127.0.0.1", 0))
        for port in (closed.getsockname()[1], 637900):
            with pytest.raises(ConfigError, match=rf"no Ray cluster answers at 127.0.0.1:{port}: .*(refused|0-65535)"):
                connect(f"127.0.0.1:{port}")
    fail.assert_called_once()


def test_a_holder_that_ends_while_it_is_looked_for_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(psutil, "pid_exists", lambda _: True)
    monkeypatch.setattr(psutil.Process, "children", lambda _: [])
    monkeypatch.setattr(tether, "SAVING", 0.0)
    monkeypatch.setattr(os, "killpg", lambda *given: sent.append(given))
    with subprocess.Popen(["true"]) as holder:
        holder.wait()
    tether._watch(holder.pid)
    assert sent == [(0, signal.SIGTERM)]


def test_a_tethered_command_saves_and_ends_when_its_holder_is_gone(tmp_path: Path) -> None:
    log, exit_file = tmp_path / "log", tmp_path / "exit"
    work = 'trap "echo saved; exit 143" TERM; echo begun; while true; do sleep 0.1; done'
    start = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-m', {CHILD!r}, str(os.getpid()), {str(exit_file)!r}, '', 'sh', '-c', {work!r}],"
        f"stdout=open({str(log)!r}, 'w'), stderr=subprocess.STDOUT, start_new_session=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", start]) as holder:
        wait_for(lambda: log.exists() and "begun" in log.read_text())
        holder.send_signal(signal.SIGKILL)
    wait_for(exit_file.exists)
    assert json.loads(exit_file.read_text())["exit_code"] == 143
    assert "asked to save and stop" in log.read_text()
    assert "saved\n" in log.read_text()
