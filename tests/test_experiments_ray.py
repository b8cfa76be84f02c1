"""Jobs on a Ray cluster: two nodes on this machine, with a GPU each that only Ray believes in."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import train_helpers
from scheduler_helpers import Recorder, schedule, shell_job, state, wait_for

from elman_core.cli import main
from elman_core.experiments.job import Job
from elman_core.experiments.on_ray import RayExecutor
from elman_core.experiments.recipe import recipe
from elman_core.experiments.scheduler import Scheduler
from elman_core.registry import ConfigError
from elman_core.training.run import read_manifest
from elman_core.training.start import start

if not os.environ.get("ELMAN_REQUIRE_RAY"):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'elman-core[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

STEPS = 120
SAVED, HELD = 50, 70
# A training that waits at step 70, so that what happens to it happens in the middle. It goes on with `elman resume`, as all do.
WAITS = f"""
import pathlib, signal, sys, time
from elman_core.cli.train import read_settings
from elman_core.training.loop import Trainer
from elman_core.training.start import start
inner = Trainer._one_step
def one_step(trainer):
    if trainer.step == {HELD}:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        time.sleep(600)
    inner(trainer)
Trainer._one_step = one_step
recipe, run, flag, text = sys.argv[1:]
assert flag == "--data"
start(read_settings(recipe, pathlib.Path(text)), pathlib.Path(run)).fit()
"""
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head without resources and two nodes with a GPU each; nothing leaves this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("ELMAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        import ray
        from ray.cluster_utils import Cluster

        place = tempfile.mkdtemp(prefix="ray-")  # short: a socket's path may have 107 bytes
        small = {"include_dashboard": False, "object_store_memory": 80 << 20}
        head = {"num_cpus": 0, "num_gpus": 0, "temp_dir": place, "_system_config": SOON}
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


def training(folder: Path, text: Path, id: str = "train") -> Job:
    settings = train_helpers.settings(text, f"train.steps={STEPS}", f"train.save_every={SAVED}")
    file, run = folder / "jobs" / f"{id}.toml", folder / "runs" / id
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(recipe(settings))
    command = (sys.executable, "-c", WAITS, str(file), str(run))
    log, states = folder / "logs" / f"{id}.log", folder / "jobs" / f"{id}.json"
    return Job(id, command, run, log, states)


def node_of(job: Job, cluster: Any) -> tuple[Any, psutil.Process]:
    """The node on which a job runs, by its processes, and the process that holds the job."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "elman_core.experiments.tether" in words and any(job.id in word.split("/") for word in words):
                raylet = psutil.Process(int(words[words.index("elman_core.experiments.tether") + 1])).ppid()
                for node in cluster.list_all_nodes():
                    if node.all_processes["raylet"][0].process.pid == raylet:
                        return node, process
    raise AssertionError(f"job {job.id} runs nowhere")


def test_results_come_back_and_a_lost_nodes_job_goes_on_elsewhere(
    cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = train_helpers.write_text(tmp_path / "text")
    folder = tmp_path / "suite"
    train = training(folder, text)
    words = shell_job(folder, "words", 'echo "gpu $CUDA_VISIBLE_DEVICES in $PWD"; exit 0', gpus=1)
    went: list[psutil.Process] = []

    def lose_a_node() -> None:
        assert train.run is not None
        wait_for(lambda: list(train.run.glob("checkpoints/step-*")), 90)
        node, process = node_of(train, cluster)
        went.append(process)
        cluster.remove_node(node, allow_graceful=False)

    loser = threading.Thread(target=lose_a_node, daemon=True)
    loser.start()
    executor = RayExecutor(cluster.address, shared=False)
    assert executor.uses_gpus
    assert executor.words == "one job on each GPU of a Ray cluster: 2 on 2 nodes"
    found, said = schedule([train, words], executor)
    loser.join()
    assert "aylet" not in capfd.readouterr().out  # standard output is for tables and JSON

    assert found == {"train": "ok", "words": "ok"}, said.text()
    first, second = state(train).attempts
    assert (first.cause, second.cause) == (f"lost node {first.host}", "")
    assert first.slot == "gpu 0 of " + first.host
    assert "train: lost (lost node" in said.text()
    assert "train: resumed on gpu 0" in said.text()
    assert state(words).attempts[0].exit_code == 0
    assert "gpu 0 in " in words.attempt_log(1).read_text()

    run = train.run
    assert run is not None
    manifest = read_manifest(run)
    assert manifest["status"] == "ok"
    assert [r["at_step"] for r in manifest["resumed"]] == [SAVED]  # from what came back, not from the start
    assert manifest["settings"]["data"]["path"] == str(text)
    assert [line["step"] for line in train_helpers.metrics(run)] == list(range(1, STEPS + 1))
    assert f"step {SAVED} " in train.attempt_log(1).read_text()
    assert f"done: {STEPS} steps" in train.attempt_log(2).read_text()
    assert not list(run.rglob(".partial-*"))
    _, alive = psutil.wait_procs(went, timeout=20)
    assert not alive  # nobody goes on training for a scheduler that has given it up

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        settings = train_helpers.settings(text, f"train.steps={STEPS}")
        straight = start(settings, tmp_path / "straight", quiet=True).fit()
    finally:
        torch.set_num_threads(threads)
    assert straight.checkpoint is not None
    train_helpers.assert_same_bits(straight.checkpoint, run / "checkpoints" / straight.checkpoint.name)


def test_an_interrupt_stops_the_jobs_of_the_cluster(cluster: Any, tmp_path: Path) -> None:
    job = shell_job(tmp_path, "long", 'trap "echo saved; exit 143" TERM; echo begun; while true; do sleep 0.1; done')
    executor = RayExecutor(cluster.address)  # finds out that the folder is shared
    scheduler = Scheduler([job], executor, Recorder(), every=0.02)

    def interrupt() -> None:
        wait_for(lambda: job.attempt_log(1).exists() and "begun" in job.attempt_log(1).read_text(), 60)
        scheduler.interrupt()

    threading.Thread(target=interrupt, daemon=True).start()
    (ended,) = scheduler.run()
    assert ended.status == "killed"
    assert ended.attempts[0].cause == "interrupted"
    assert "saved" in job.attempt_log(1).read_text()
    assert not list(tmp_path.glob(".shared-*"))


def test_a_job_that_no_node_can_take_is_said(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes 3 GPUs, and no node of the Ray cluster has that: at most 1"):
        schedule([shell_job(tmp_path, "wide", "true", gpus=3)], RayExecutor(cluster.address))


def test_nodes_with_other_software_are_refused(cluster: Any, tmp_path: Path) -> None:
    executor = RayExecutor(cluster.address)
    executor._software = {**executor._software, "torch": "1.0", "elman-e0": "0.1"}
    with pytest.raises(ConfigError, match=r"elman-e0 is not installed there and 0.1 here and 1 more; install the same"):
        schedule([shell_job(tmp_path, "any", "true")], executor)


def test_without_gpus_each_job_takes_a_cpu(cluster: Any, tmp_path: Path) -> None:
    executor = RayExecutor(cluster.address, gpus=False)
    began = time.monotonic()
    found, _ = schedule([shell_job(tmp_path, "plain", 'test -z "$CUDA_VISIBLE_DEVICES" && exit 3')], executor)
    assert found == {"plain": "crashed"}
    assert time.monotonic() - began < 60
    assert state(shell_job(tmp_path, "plain", "")).attempts[0].slot.startswith("cpu of")


def test_the_commands_run_on_the_cluster(
    cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    words = ["jobs", "run", "--on", "ray", "--out", str(tmp_path / "jobs")]
    assert main([*words, "--json", "--", "sh", "-c", "echo from $CUDA_VISIBLE_DEVICES; exit 4"]) == 1
    printed = json.loads(capfd.readouterr().out)
    assert [(job["status"], job["attempts"][0]["exit_code"]) for job in printed["jobs"]] == [("crashed", 4)]
    assert Path(printed["jobs"][0]["attempts"][0]["log"]).read_text() == "from 0\n"
    assert main([*words, "--slots", "2", "--", "true"]) == 2
    assert "Ray chooses the places" in capfd.readouterr().err
