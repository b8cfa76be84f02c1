"""Files of bytes: what can be wrong with them, how fast they open, what identifies them."""

import gzip
import json
import os
import time

import pytest

from elman_core.cli import main
from elman_core.data import ByteFile, TrainingWindows, split
from elman_core.registry.errors import DataError


@pytest.fixture
def write(tmp_path):
    def write(content: bytes):
        path = tmp_path / "text"
        path.write_bytes(content)
        return path

    return write


def test_a_compressed_file_is_refused(write):
    with pytest.raises(DataError, match=r"is compressed \(gzip\); unpack it first"):
        ByteFile(write(gzip.compress(b"x" * 9999)))


def test_a_missing_file_is_named_in_one_line(tmp_path, capsys):
    assert main(["data", "info", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "none") in said
    assert "--data" in said
    assert said.count("\n") == 1


def test_an_empty_file_is_an_error(write, capsys):
    assert main(["data", "info", str(write(b""))]) == 2
    assert "is empty" in capsys.readouterr().err


def test_a_folder_and_a_pipe_are_not_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(DataError, match="not a regular file"):
            ByteFile(path)


def test_an_unreadable_file_says_why(write, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    path = write(b"text")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DataError, match=r"cannot read .*: Permission denied"):
        ByteFile(path)


def test_a_text_shorter_than_a_window_says_how_long_it_is(write, capsys):
    assert main(["data", "info", str(write(b"x" * 300)), "--chunk-size", "512"]) == 2
    said = capsys.readouterr().err
    assert "513 bytes" in said
    assert said.count("\n") == 1


def test_a_stream_with_fewer_windows_than_rows_is_an_error(write):
    file = ByteFile(write(b"x" * 1000))
    with pytest.raises(DataError, match="fewer than the 64 rows"):
        TrainingWindows(file, split(file.size, 0), 100, rows=64, seed=0, sampling="stream")


def test_a_terabyte_opens_and_samples_in_under_a_second(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as out:
        out.truncate(10**12)
    start = time.perf_counter()
    file = ByteFile(path)
    parts = split(file.size)
    batch = TrainingWindows(file, parts, 512, rows=32, seed=1).batch(7)
    file.fingerprint()
    assert time.perf_counter() - start < 1
    assert batch.offsets.max() > 2**32  # offsets are not cut to 32 bits
    assert parts.heldout_bytes == pytest.approx(1e10, rel=1e-4)


def test_the_fingerprint_sees_the_size_the_start_and_the_end(write):
    text = bytearray(os.urandom(500_000))
    prints = [ByteFile(write(bytes(text))).fingerprint()["blake2b"]]
    for place in (0, len(text) - 1):
        changed = bytearray(text)
        changed[place] ^= 1
        prints.append(ByteFile(write(bytes(changed))).fingerprint()["blake2b"])
    prints.append(ByteFile(write(bytes(text) + b"x")).fingerprint()["blake2b"])
    assert len(set(prints)) == 4
    assert ByteFile(write(bytes(text))).fingerprint()["blake2b"] == prints[0]


def test_data_info_prints_json(write, capsys):
    path = write(b"document one\x1edocument two\x1e" * 4000)
    assert main(["data", "info", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["size"] == path.stat().st_size
    assert facts["training_bytes"] + facts["heldout_bytes"] == facts["size"]
    assert facts["documents_in_first_16_MiB"] == 8000
