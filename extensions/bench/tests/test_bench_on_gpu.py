"""The scheduler's rules on real GPUs: what the simulated driver of the other tests stands for.

Others may use the GPUs meanwhile: `OwnProcesses` leaves out what they take. A suite needs the GPUs to itself, or is skipped.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
import torch
from elman_bench.jobs.gpus import Look, Nvml, monitor
from elman_bench.jobs.local import LocalExecutor
from elman_bench.jobs.slots import GpuSlots
from scheduler_helpers import Recorder, alone, schedule, shell_job, state
from test_bench_cli import states
from train_helpers import metrics, wait_for, write_text

pytestmark = pytest.mark.gpu

HOLD = "import time, torch; x = torch.zeros(2**28, device='cuda'); print('on', flush=True); time.sleep({seconds})"


def hold(uuid: str) -> subprocess.Popen:
    """A stranger with a gigabyte on a GPU."""
    command = [sys.executable, "-c", HOLD.format(seconds=600)]
    stranger = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid})
    assert stranger.stdout.readline() == b"on\n"
    return stranger


class OwnProcesses(Nvml):
    """The driver, as if only the processes that this test started were there."""

    def __init__(self) -> None:
        super().__init__(monitor()._nvml)

    def look(self, uuid: str) -> Look:
        whole, found = super().look(uuid), self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle(uuid))
        started = {process.pid for process in psutil.Process().children(recursive=True)}
        memory = sum(process.usedGpuMemory or 0 for process in found if process.pid in started)
        return replace(whole, memory=memory, utilisation=None, pids=whole.pids & started)


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def test_the_driver_and_torch_see_the_same_gpus():
    found = monitor().gpus()
    assert len(found) >= torch.cuda.device_count() > 0
    names = {gpu.uuid.removeprefix("GPU-") for gpu in found}
    assert {str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())} <= names


def test_a_gpu_that_somebody_uses_is_not_taken_until_it_is_free(tmp_path):
    driver = OwnProcesses()
    gpu = driver.gpus()[-1]
    slots = GpuSlots([gpu], driver, tmp_path / "locks")
    stranger = hold(gpu.uuid)
    try:
        if stranger.pid not in monitor().look(gpu.uuid).pids:
            pytest.skip("the driver's numbers of processes are not those of this container")
        assert slots.take(1, "a") is None
        assert slots.why[gpu.uuid].startswith(f"gpu {gpu.index}: used by pid {stranger.pid} ")
    finally:
        end(stranger)
    wait_for(lambda: slots.take(1, "a") is not None, 30)


def test_a_job_alone_is_not_flagged_and_one_with_company_is(tmp_path):
    driver = OwnProcesses()
    gpu = driver.gpus()[-1]
    executor = LocalExecutor(GpuSlots([gpu], driver, tmp_path / "locks"), driver)
    jobs = [
        shell_job(tmp_path, id, "", command=(sys.executable, "-c", HOLD.format(seconds=15))) for id in ("alone", "both")
    ]
    strangers = []
    said = Recorder(lambda text: strangers.append(hold(gpu.uuid)) if text.startswith("both: started") else None)
    try:
        statuses, _ = schedule(jobs, executor, said)
    finally:
        for stranger in strangers:
            end(stranger)
    assert statuses == {"alone": "ok", "both": "ok"}
    assert [state(job).contended for job in jobs] == [False, True]


def test_a_suite_has_one_run_on_each_gpu_and_goes_on_after_a_kill(tmp_path, monkeypatch):
    alone()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELMAN_KERNELS", "auto")  # the scheduling is tested, not the kernels
    write_text(tmp_path / "text", 500_000)
    suite = 'models = ["gru@128x2", "lstm@128x2", "transformer@128x2"]\nseeds = 2\n[protocol.train]\n'
    (tmp_path / "small.toml").write_text(f"{suite}batch_size = 8\nchunk_size = 64\nsteps = 3000\nsave_every = 100\n")
    words = [sys.executable, "-m", "elman_core", "bench", "small.toml", "--data", "text"]
    bench = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    first = tmp_path / "runs/small/runs/gru-128x2-s42"
    wait_for(lambda: (first / "checkpoints/step-00000100").exists(), 180)
    os.killpg(states(tmp_path / "runs/small")["gru-128x2-s42"].attempts[0].pid, signal.SIGKILL)
    out, _ = bench.communicate(timeout=900)
    assert bench.returncode == 0, out
    found = states(tmp_path / "runs/small")
    assert [a.exit_code for a in found["gru-128x2-s42"].attempts] == [137, 0]
    assert [line["step"] for line in metrics(first)] == list(range(1, 3001))
    by_gpu: dict[str, list[tuple[str, str]]] = {}
    for one in found.values():
        for attempt in one.attempts:
            by_gpu.setdefault(attempt.gpu_uuid, []).append((attempt.started, attempt.ended))
    assert len(by_gpu) == min(len(monitor().gpus()), len(found))
    for spans in by_gpu.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert all(
        json.loads((tmp_path / f"runs/small/runs/{id}/manifest.json").read_text())["status"] == "ok" for id in found
    )
