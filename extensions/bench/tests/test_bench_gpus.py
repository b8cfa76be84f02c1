"""Which GPUs are taken: what the user allows, what the driver shows free, and never one that another scheduler has."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from elman_bench.cli._schedule import places
from elman_bench.jobs import gpus as gpus_module
from elman_bench.jobs import locks
from elman_bench.jobs import slots as slots_module
from elman_bench.jobs.gpus import Gpu, GpuLostError, Look, busy, choose
from elman_bench.jobs.locks import Lock, SharedLock, holder, is_locked, lock_soon
from elman_bench.jobs.slots import CpuSlots, GpuSlots, cores, survey
from fake_gpus import FakeMonitor

from elman_core.registry import ConfigError, StorageError

GPUS = [Gpu(i, f"GPU-{i}{'abcdefgh'[i]}00-11", "H", 2**36) for i in range(8)]


def indices(**arguments) -> list[int]:
    return [gpu.index for gpu in choose(GPUS, **arguments)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"gpus": "none"}, []),
        ({"gpus": "none", "visible": "MIG-abc"}, []),
        ({"gpus": "0,2-5"}, [0, 2, 3, 4, 5]),
        ({"gpus": "0,2-5", "avoid": "3,5"}, [0, 2, 4]),
        ({"gpus": "GPU-3d"}, [3]),
        ({"gpus": "7,7,GPU-7h00"}, [7]),
        ({"visible": ""}, []),
        ({"visible": "2,0"}, [2, 0]),
        ({"visible": "GPU-1b00-11,4"}, [1, 4]),
        ({"visible": "1,-1,3"}, [1]),  # as CUDA reads it: what follows is not seen
        ({"visible": "1,99,3"}, [1]),
        ({"visible": "1-3"}, []),
        ({"visible": "4,5,6", "avoid": "0,5"}, [4, 6]),
        ({"visible": "4,5,6", "gpus": "6"}, [6]),
    ],
)
def test_the_users_overrides_are_honoured(arguments, expected):
    assert indices(**arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gpus": "8"}, "--gpus 8: there is no GPU 8. GPUs here: 0 H, 1 H"),
        ({"gpus": "5-2"}, "there is no GPU 5-2"),
        ({"gpus": "0-999999999"}, "there is no GPU 8"),
        ({"gpus": "0-" + "9" * 5000}, "--gpus takes auto, none, numbers such as 0,2-5, or UUIDs"),
        ({"gpus": "all"}, "takes auto, none, numbers such as 0,2-5"),
        ({"gpus": "GPU-"}, "takes auto"),
        ({"avoid": "9"}, "--avoid 9: there is no GPU 9"),
        ({"visible": "4,5", "gpus": "0"}, "--gpus names GPU 0, which CUDA_VISIBLE_DEVICES=4,5 hides"),
        ({"visible": "MIG-abc"}, "are not scheduled"),
    ],
)
def test_a_wish_that_cannot_be_is_an_error(arguments, words):
    with pytest.raises(ConfigError, match=words):
        indices(**arguments)


@pytest.mark.parametrize(
    ("look", "strangers", "words"),
    [
        (Look(3 * 2**20, 0, frozenset()), [], ""),
        (Look(3 * 2**20, None, frozenset()), [], ""),
        (Look(3 * 2**30, 0, frozenset()), [], "3.0 GiB in use"),
        (Look(0, 40, frozenset()), [], "40 % busy"),
        (Look(0, 0, frozenset({7})), ["pid 7 (x)"], "used by pid 7"),
    ],
)
def test_memory_utilisation_and_processes_each_make_a_gpu_busy(look, strangers, words):
    assert busy(look, strangers).startswith(words)
    assert bool(busy(look, strangers)) == bool(words)


def gpu_slots(tmp_path, count=2):
    monitor = FakeMonitor.make(tmp_path / "gpus", count)
    return monitor, GpuSlots(monitor.gpus(), monitor, tmp_path / "locks")


def test_a_busy_gpu_is_passed_over_and_its_lock_left(tmp_path):
    monitor, slots = gpu_slots(tmp_path)
    monitor.plant(0, pids=[4711])
    assert slots.take(1, "a").name == "gpu 1"
    assert slots.why["GPU-0000"] == "gpu 0: used by pid 4711"
    assert not is_locked(tmp_path / "locks" / "GPU-0000.lock")
    monitor.plant(0, lost=True)
    assert slots.take(1, "a") is None
    assert "is lost" in slots.why["GPU-0000"]
    assert [row["state"] for row in survey(monitor.gpus(), monitor, tmp_path / "locks")] == [
        "GPU GPU-0000 is lost",
        f"taken by a (pid {os.getpid()})",
    ]


def test_a_job_of_two_gpus_gets_both_or_none(tmp_path):
    monitor, slots = gpu_slots(tmp_path, 3)
    monitor.plant(1, memory=2**33)
    slot = slots.take(2, "a")
    assert slot.env["CUDA_VISIBLE_DEVICES"] == "GPU-0000,GPU-0002"
    slots.give(slot)
    monitor.plant(2, utilisation=99)
    assert slots.take(2, "a") is None
    assert slots.take(1, "a").name == "gpu 0", "the one that it could have had is free again"
    with pytest.raises(ConfigError, match="a job that needs 4 GPUs can never start: only 3 may be used"):
        slots.take(4, "a")


def test_jobs_share_gpus_evenly_and_the_last_frees_each(tmp_path):
    monitor = FakeMonitor.make(tmp_path / "gpus", 2)
    slots = GpuSlots(monitor.gpus(), monitor, tmp_path / "locks", share=2)
    taken = [slots.take(1, "a") for _ in range(4)]
    assert [slot.name for slot in taken] == ["gpu 0", "gpu 1", "gpu 0", "gpu 1"]
    assert slots.take(1, "b") is None
    slots.give(taken[0])
    assert is_locked(lock := tmp_path / "locks" / "GPU-0000.lock")
    slots.give(taken[2])
    assert not is_locked(lock)
    assert slots.take(2, "b") is None, "a job of two GPUs needs room on both"
    slots.give(taken[3])
    both = slots.take(2, "b")
    assert sorted(both.gpus) == ["GPU-0000", "GPU-0001"]
    slots.give(both)
    assert slots.users["GPU-0001"] == 1


def test_cpu_slots_divide_the_threads(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    slots = CpuSlots(2)
    first = slots.take(1, "a")
    assert first.env["OMP_NUM_THREADS"] == str(max(1, cores() // 2))
    assert first.env["CUDA_VISIBLE_DEVICES"] == ""
    assert slots.take(1, "b").name == "cpu 1"
    assert slots.take(1, "c") is None
    slots.give(first)
    assert slots.take(1, "c").name == "cpu 0"
    slots.give(replace(first, name="gpu 3"))  # of an adopted job
    assert slots.take(1, "d") is None


def test_the_users_number_of_threads_is_what_torch_uses(monkeypatch):
    """torch takes MKL's number where both are set."""
    for name in slots_module.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = {**os.environ, **CpuSlots(1).take(1, "a").env}
    code = "import torch; print(torch.get_num_threads())"
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "1\n"
    assert places("local", "none", "", 2).words == "2 jobs at once on the CPU, 1 thread each"
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    assert slots_module.threads(8)["MKL_NUM_THREADS"] == "2", "the user's own stay"


@pytest.mark.parametrize(("quota", "expected"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("", 8)])
def test_the_quota_of_a_container_counts(tmp_path, monkeypatch, quota, expected):
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(slots_module, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    assert cores() == expected


def test_a_lock_lives_as_long_as_a_child_that_inherited_it(tmp_path):
    lock = Lock(tmp_path / "x.lock")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.fd])
    lock.close()
    with pytest.raises(BlockingIOError):
        lock_soon(tmp_path / "x.lock", 0.1)
    assert is_locked(tmp_path / "x.lock")
    child.kill()
    child.wait()
    assert not is_locked(tmp_path / "x.lock")


def test_a_lock_for_all_users_is_writable_by_all_in_a_sticky_folder(tmp_path):
    old = os.umask(0o077)
    try:
        lock = SharedLock(tmp_path / "locks/GPU-1.lock")
    finally:
        os.umask(old)
    assert (tmp_path / "locks").stat().st_mode & 0o7777 == 0o1777
    assert lock.path.stat().st_mode & 0o777 == 0o666
    lock.write("me, a longer name\n")
    lock.write("you\n")
    assert lock.path.read_text() == "you\n"


def test_a_folder_of_locks_that_another_user_makes_at_the_same_moment_is_used(tmp_path, monkeypatch):
    folder, make = tmp_path / "locks", Path.mkdir

    def late(path, *args, **kwargs):
        if path == folder:
            make(path, exist_ok=True)
        make(path, *args, **kwargs)

    def denied(path, _mode):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "mkdir", late)
    monkeypatch.setattr(Path, "chmod", denied)
    SharedLock(folder / "GPU-1.lock").close()


def test_a_lock_follows_no_link_and_writes_no_file_of_another_name(tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.write_text("precious")
    shared = tmp_path / "locks"
    shared.mkdir()
    monkeypatch.setattr(locks, "MACHINE_WIDE", shared)
    for plant in (os.symlink, os.link, lambda _, name: os.mkfifo(name)):
        path = shared / "GPU.lock"
        plant(target, path)
        for use in (SharedLock, Lock, is_locked):
            with contextlib.suppress(StorageError):
                if isinstance(lock := use(path), Lock):
                    lock.write("me")
                    lock.close()
        assert holder(path) in ("precious", "another process")
        path.unlink()
    assert target.read_text() == "precious"
    shared.rmdir()
    shared.symlink_to(tmp_path)
    with pytest.raises(StorageError, match="is a link, which another user may have planted"):
        SharedLock(shared / "GPU.lock")


# the driver's library


@pytest.fixture
def library(monkeypatch):
    """pynvml, whose functions answer for one GPU."""
    real = pytest.importorskip("pynvml")

    def memory(_handle, version=None):
        return SimpleNamespace(total=1000, used=600 if version else 900)

    answers = {
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetUUID": "GPU-1",
        "nvmlDeviceGetName": "H",
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=7),
        "nvmlDeviceGetComputeRunningProcesses": [process(5), process(6, 50)],
        "nvmlDeviceGetGraphicsRunningProcesses": [process(6, 50), process(9, 100)],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(real, name, Mock(return_value=answer))
    monkeypatch.setattr(real, "nvmlDeviceGetMemoryInfo", memory)
    return real


def process(pid, memory=None):
    return SimpleNamespace(pid=pid, usedGpuMemory=memory)


def test_what_the_driver_says_is_read(library):
    gpu = gpus_module.Nvml(library)
    assert gpu.gpus() == [Gpu(0, "GPU-1", "H", 1000)]
    assert gpu.look("GPU-1") == Look(500, 7, frozenset({5, 6})), "the memory of a display is not counted"
    unsupported = library.NVMLError(library.NVML_ERROR_NOT_SUPPORTED)
    library.nvmlDeviceGetUtilizationRates.side_effect = unsupported
    library.nvmlDeviceGetGraphicsRunningProcesses.side_effect = unsupported
    assert gpu.look("GPU-1") == Look(600, None, frozenset({5, 6}))


def test_a_lost_gpu_is_not_listed_and_not_free(library):
    gpu = gpus_module.Nvml(library)
    lost = library.NVMLError(library.NVML_ERROR_GPU_IS_LOST)
    library.nvmlDeviceGetHandleByIndex.side_effect = library.nvmlDeviceGetHandleByUUID.side_effect = lost
    assert gpu.gpus() == []
    with pytest.raises(GpuLostError, match="is lost"):
        gpu.look("GPU-1")


def test_strangers_are_told_apart_from_the_jobs_processes(library):
    gpu, look = gpus_module.Nvml(library), Look(0, 0, frozenset({2_000_000_001, 2_000_000_002}))
    assert gpu.strangers(look, ()) == ["pid 2000000001", "pid 2000000002"]
    assert gpu.strangers(look, {2_000_000_001}) == ["pid 2000000002"]
    assert gpu.strangers(look, {5}) == [], "in a container the job's own number is another"


def test_the_server_of_mps_does_not_make_a_gpu_busy(library, monkeypatch):
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"nvidia-cuda-mps" if path.parts[2] == "2000000001" else b"a")
    assert gpus_module.Nvml(library).strangers(Look(0, 0, frozenset({2_000_000_001, 7})), ()) == ["pid 7 (a)"]


def test_without_a_driver_there_are_no_gpus(library, monkeypatch):
    missing = library.NVMLError(library.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(library, "nvmlInit", Mock(side_effect=missing))
    assert gpus_module.monitor.__wrapped__().gpus() == []
