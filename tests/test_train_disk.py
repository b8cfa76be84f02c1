"""A disk that fills up: one line, exit 1, and the checkpoint before is untouched."""

import os
import shutil
import subprocess

import pytest
from train_helpers import files_of_at_most, manifest, settings, train_words

from elman_core.cli import main
from elman_core.registry import StorageError
from elman_core.storage import check_folder
from elman_core.training.start import start


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


def test_a_full_disk_is_said_with_exit_1_and_the_run_goes_on_when_there_is_room(text, small_disk, capsys):
    run = small_disk / "run"
    assert main(train_words(text, run, "train.save_every=5", "train.keep=0", "model.hidden_size=80")) == 1
    said = capsys.readouterr().err
    assert "cannot write" in said
    assert "MB are free" in said or "No space left" in said
    assert said.count("\n") == 1
    found = manifest(run)
    assert found["status"] == "crashed"
    kept = sorted((run / "checkpoints").iterdir())
    assert kept
    for path in kept:
        assert path.name.startswith("step-")
        check_folder(path)
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    assert main(["resume", str(run)]) == 0
    assert manifest(run)["status"] == "ok"


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
