"""A disk that fills up: one line, exit 1, and the checkpoint before is untouched."""

import json
import os
import resource
import shutil
import signal
import subprocess
from contextlib import contextmanager

import pytest
from train_helpers import TINY, settings, write_text

from elman_core.cli import main
from elman_core.registry import StorageError
from elman_core.training.start import resume, start
from elman_core.training.storage import check_folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    where = tmp_path / "disk"
    where.mkdir()
    if not shutil.which("mount"):
        pytest.skip("no mount command")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", where], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", where], check=True)


@contextmanager
def files_of_at_most(size):
    """Writing beyond `size` bytes of a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_said_with_exit_1_and_the_run_goes_on_when_there_is_room(text, small_disk, capsys):
    run = small_disk / "run"
    flat = [f"{table}.{k}={json.dumps(v)}" for table, values in TINY.items() for k, v in values.items()]
    words = ["train", "e42", "--data", str(text), "--out", str(run)]
    words += [w for s in [*flat, "train.save_every=5", "train.keep=0", "model.hidden_size=80"] for w in ("--set", s)]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "cannot write" in said
    assert "MB are free" in said or "No space left" in said
    assert said.count("\n") == 1
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "crashed"
    kept = sorted((run / "checkpoints").iterdir())
    assert kept
    for path in kept:
        assert path.name.startswith("step-")
        check_folder(path)
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    assert main(["resume", str(run)]) == 0
    assert json.loads((run / "manifest.json").read_text())["status"] == "ok"


@pytest.mark.parametrize("size", [2_000, 20_000])
def test_a_write_that_fails_midway_leaves_the_checkpoint_before(size, text, tmp_path):
    """The limit hits the small JSON files, or the weights."""
    trainer = start(settings(text, "train.save_every=2", "train.steps=4"), tmp_path / "run", quiet=True)
    for _ in range(2):
        trainer._one_step()
    with pytest.raises(StorageError, match="cannot write"), files_of_at_most(size):
        trainer.fit()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    check_folder(tmp_path / "run" / "checkpoints" / "step-00000002")
    again = resume(tmp_path / "run", quiet=True)
    assert again.step == 2
    assert again.fit().status == "ok"


def test_a_run_whose_manifest_cannot_be_written_leaves_no_folder_in_the_way(text, tmp_path):
    with files_of_at_most(100), pytest.raises(StorageError, match=r"cannot write .*manifest\.json"):
        start(settings(text), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_a_storage_error(text, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="Permission denied"):
        start(settings(text), tmp_path / "locked" / "run", quiet=True)


def test_a_run_below_a_file_is_a_storage_error(text, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot make"):
        start(settings(text), tmp_path / "file" / "run", quiet=True)
