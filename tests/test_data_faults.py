"""What can happen to a text while it is read: cut short, changed, a disk that fails, and what is no fault at all."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest
from train_helpers import losses, manifest, settings, train_words, write_text

from elman_core.cli import main
from elman_core.data import ByteFile
from elman_core.data import bytes as data_bytes
from elman_core.registry import DataError, LoaderError
from elman_core.training.start import start


@pytest.fixture
def text(tmp_path):
    """A text of its own, which each test may change."""
    return write_text(tmp_path / "text")


def failing(code, times, monkeypatch):
    """The pages of the mapping cannot be had, and the next `times` reads fail with this error number; returns the seconds
    that were waited.
    """
    monkeypatch.setattr(ByteFile, "_mapped", lambda *_: None)
    real, left, waited = os.pread, [times], []

    def pread(*arguments):
        if left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(data_bytes.time, "sleep", waited.append)
    return waited


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_network_disk_that_recovers_drops_nothing(code, text, monkeypatch, caplog):
    file = ByteFile(text)
    expected = file.windows(np.array([0, 70_000]), 100)
    waited = failing(code, 2, monkeypatch)
    got = file.windows(np.array([0, 70_000]), 100)
    assert (got == expected).all()
    assert expected.flags.writeable
    assert waited == [1.0, 5.0]
    assert "trying again" in caplog.text


def test_a_disk_that_does_not_recover_is_named_with_the_place(text, monkeypatch):
    file = ByteFile(text)
    waited = failing(errno.EIO, 100, monkeypatch)
    with pytest.raises(LoaderError, match=r"cannot read .*text at byte 70,000: Input/output error") as raised:
        file.windows(np.array([70_000]), 100)
    assert raised.value.exit_code == 1
    assert len(waited) == 3


def test_a_text_that_is_gone_when_its_stale_handle_is_opened_again_is_named(text, monkeypatch):
    file = ByteFile(text)
    failing(errno.ESTALE, 1, monkeypatch)
    text.unlink()
    with pytest.raises(LoaderError, match=r"cannot read .*text at byte 7: No such file"):
        file.read(7, 10)


def test_an_error_that_waiting_does_not_cure_is_said_at_once(text, monkeypatch):
    file = ByteFile(text)
    waited = failing(errno.EBADF, 100, monkeypatch)
    with pytest.raises(LoaderError, match="at byte 5"):
        file.read(5, 10)
    assert waited == []


@pytest.mark.skipif(data_bytes._POPULATE_READ is None, reason="the kernel cannot be asked for pages")
def test_windows_come_from_the_mapping(text, monkeypatch):
    file = ByteFile(text)
    expected = text.read_bytes()
    if file._mapped([(0, 1)]) is None:
        pytest.skip("this kernel is older than Linux 5.14")
    monkeypatch.setattr(os, "pread", None)
    for offset, length in [(0, 1), (4095, 2), (70_001, 4096), (199_999, 1), (0, 200_000)]:
        assert file.read(offset, length).tobytes() == expected[offset : offset + length]


def test_pages_behind_the_end_are_none_not_sigbus(text):
    file = ByteFile(text)
    os.truncate(text, 90_000)
    assert file._mapped([(150_000, 10)]) is None
    assert file._mapped([(89_990, 20)]) is None


def test_a_text_cut_short_is_an_error_that_names_the_byte(text):
    file = ByteFile(text)
    os.truncate(text, 90_000)
    assert len(file.read(89_000, 500)) == 500
    with pytest.raises(DataError, match=r"truncated .* at byte 90,000, where it had 200,000 bytes"):
        file.read(89_900, 500)


def test_touched_or_appended_is_the_same_text_and_changed_is_another(text):
    file = ByteFile(text)
    file.fingerprint()
    os.utime(text, ns=(1, 1))
    file.windows(np.array([0]), 10)
    with text.open("ab") as out:
        out.write(b"more")
    file.windows(np.array([0]), 10)
    assert file.size == 200_000
    with text.open("r+b") as out:
        out.write(bytes(200_000))
    with pytest.raises(DataError, match="was changed while it was read"):
        file.windows(np.array([0]), 10)


def test_replaced_or_deleted_during_training_changes_nothing(text, tmp_path, after_step):
    """The file that was opened stays open: another that takes its name is not read."""
    start(settings(text, "train.steps=6"), tmp_path / "whole", quiet=True).fit()
    after_step(2, lambda _: text.unlink())
    after_step(4, lambda _: text.write_bytes(b"another text" * 100))
    start(settings(text, "train.steps=6"), tmp_path / "run", quiet=True).fit()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_text_cut_short_during_training_ends_the_run_with_a_line_and_keeps_the_checkpoint(
    text, tmp_path, after_step, capsys
):
    """Touched in the mapping, these bytes would be SIGBUS: a dead process and no word."""
    after_step(3, lambda _: os.truncate(text, 10))
    assert main(train_words(text, tmp_path / "run", "train.steps=6", "train.save_every=2")) == 2
    said = capsys.readouterr().err
    assert f"{text} was truncated while it was read: no data at byte" in said
    assert said.count("\n") == 1
    found = manifest(tmp_path / "run")
    assert found["status"] == "crashed"
    assert "was truncated" in found["error"]
    assert [p.name for p in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["step-00000002", "step-00000003"]


def test_reading_keeps_one_descriptor_and_gives_it_back(text):
    code = (
        "import os, sys, gc; from elman_core.data import ByteFile\n"
        "n = len(os.listdir('/proc/self/fd'))\n"
        "for _ in range(50): ByteFile(sys.argv[1]).read(0, 10)\n"
        "gc.collect(); print(len(os.listdir('/proc/self/fd')) - n)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(text)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
