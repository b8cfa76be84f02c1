"""Folders are written whole or not at all; what was damaged later is found and named."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import namedtuple

import pytest

from elman_core import storage
from elman_core.model.checkpoint import newest_good
from elman_core.registry import CheckpointError, StorageError
from elman_core.storage import (
    check_folder,
    read_json,
    remove_folder,
    remove_leftovers,
    write_folder,
    write_json,
    write_text,
)

KILLS = 25


def fill(folder):
    (folder / "a.txt").write_text("a" * 1000)
    (folder / "sub").mkdir()
    (folder / "sub" / "b.bin").write_bytes(bytes(range(256)))
    (folder / "README.md").write_text("card")


def test_nothing_but_an_empty_folder_is_overwritten(tmp_path):
    (tmp_path / "x").mkdir()
    write_folder(tmp_path / "x", fill)
    with pytest.raises(StorageError, match="already exists"):
        write_folder(tmp_path / "x", lambda _: None)
    check_folder(tmp_path / "x")


def test_a_failing_writer_leaves_nothing(tmp_path):
    def fail(folder):
        fill(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageError, match=r"cannot write .*x: No space left on device; free some space"):
        write_folder(tmp_path / "x", fail)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_said_before_writing(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10, 5, 5_000_000))
    with pytest.raises(StorageError, match=r"it needs 9\.0 MB and 5\.0 MB are free"):
        write_folder(tmp_path / "x", fill, needed=9_000_000)
    assert list(tmp_path.iterdir()) == []


def test_a_text_is_replaced_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "f.json"
    write_text(path, "old")

    def fail(_descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]


def test_a_file_too_long_to_be_read_is_not_written(tmp_path, monkeypatch):
    path = tmp_path / "f.json"
    write_json(path, {"old": 1})
    monkeypatch.setattr(storage, "MOST_READ", 100)
    with pytest.raises(StorageError, match=r"f.json: [12]\d\d bytes are more than the 100 that are read$"):
        write_json(path, {"new": "x" * 100})
    monkeypatch.undo()
    assert read_json(path) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]


def test_leftovers_of_a_killed_writer_are_cleared_and_nothing_else(tmp_path):
    write_folder(tmp_path / "x", fill)
    write_folder(tmp_path / "y", fill)
    (tmp_path / f"{storage.PARTIAL}z-1").mkdir()
    os.rename(tmp_path / "y", tmp_path / f"{storage.DOOMED}y")
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    remove_folder(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


WRITER = """
    import os, sys
    from pathlib import Path
    from elman_core.storage import remove_folder, remove_leftovers, write_folder
    folder, first = Path(sys.argv[1]), int(sys.argv[2])

    def fill(partial, step):
        (partial / "state").mkdir()
        for name in ("model.safetensors", "state/optimizer.safetensors"):
            (partial / name).write_bytes(step.to_bytes(8, "little") * 4000)

    remove_leftovers(folder)
    print("ready", flush=True)
    for step in range(first, first + 100_000):
        write_folder(folder / f"step-{step:08d}", lambda partial: fill(partial, step))
        print("wrote", flush=True)
        for old in sorted(folder.glob("step-*"))[:-2]:
            remove_folder(old)
"""


def start_writer(folder, first):
    command = [sys.executable, "-c", textwrap.dedent(WRITER), folder, str(first)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"ready\n"
    return writer


@pytest.mark.slow
def test_a_writer_killed_at_random_instants_always_leaves_a_good_checkpoint(tmp_path):
    """SIGKILL, 50 times or more: the latest folder with a final name is whole, and none that was complete is lost."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    writer = start_writer(folder, 1)
    started = time.perf_counter()
    for _ in range(4):
        writer.stdout.readline()
    duration = (time.perf_counter() - started) / 4
    last = interrupted = wrote = 0
    draw = random.Random(1)
    # On a busy machine a process is slower than it was at first: as many more as it takes, until some had the time to write
    # one and some were killed in the middle of it.
    for kills in range(10 * KILLS):
        if kills >= KILLS and min(wrote, interrupted) > KILLS // 5:
            break
        time.sleep(draw.uniform(0, 2 * duration))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        interrupted += any(p.name.startswith(".") for p in folder.iterdir())
        names = sorted(p.name for p in folder.glob("step-*"))
        for name in names:
            check_folder(folder / name)
        newest = int(names[-1].removeprefix("step-"))
        assert newest >= last
        wrote += newest > last
        last = newest
        writer = start_writer(folder, last + 1)
    writer.kill()
    writer.communicate()
    assert wrote > KILLS // 5
    assert interrupted > KILLS // 5


def test_a_checkpoint_with_a_bad_sector_is_passed_over_for_the_one_before(tmp_path, monkeypatch, caplog):
    for step in (1, 2):
        write_folder(tmp_path / f"step-{step}", fill)
    read = storage.open_regular

    def failing(path, *flags):
        if str(path).endswith("step-2/sub/b.bin"):
            raise OSError(errno.EIO, "Input/output error")
        return read(path, *flags)

    monkeypatch.setattr(storage, "open_regular", failing)
    assert newest_good(tmp_path, check_folder) == tmp_path / "step-1"
    assert "step-2: sub/b.bin cannot be read: Input/output error" in caplog.text


@pytest.mark.parametrize("name", ["config.json", "state/optimizer"])
def test_only_a_changed_export_may_lose_its_checksums(name, tmp_path):
    """A checkpoint of a run cannot be resumed without them, whatever of it is left."""

    def fill(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")

    write_folder(tmp_path / "x", fill)
    shutil.rmtree(tmp_path / "x" / "state", ignore_errors=True)
    (tmp_path / "x" / "config.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="is missing") as caught:
        check_folder(tmp_path / "x")
    assert ("or delete checksums.json if you changed it" in str(caught.value)) == (name == "config.json")
