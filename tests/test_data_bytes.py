"""Files of bytes: what can be wrong with them, how fast they open, what identifies them."""

import gzip
import os

import pytest

from elman_core.cli import main
from elman_core.data import ByteFile, TrainingWindows, split
from elman_core.data.bytes import NO_TEXT
from elman_core.registry.errors import DataError


@pytest.fixture
def write(tmp_path):
    def write(content: bytes):
        path = tmp_path / "text"
        path.write_bytes(content)
        return path

    return write


def test_a_packed_file_is_refused(write):
    for content, name in ((gzip.compress(b"x" * 9999), "gzip"), *((m + b"x" * 9999, n) for n, m in NO_TEXT.items())):
        with pytest.raises(DataError, match=rf"is no raw text \({name}\): elman data pack"):
            ByteFile(write(content))


def test_lines_of_json_are_warned_of_once(tmp_path, caplog):
    (tmp_path / "texts.jsonl").write_text('{"text": "one"}\n')
    for _ in range(2):
        ByteFile(tmp_path / "texts.jsonl")
    assert [record.getMessage().count("holds JSON") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "there is no file"), (b"", "is empty"), (b"x" * 300, "513 bytes")],
    ids=["missing", "empty", "short"],
)
def test_what_is_wrong_with_a_text_is_said_in_one_line(content, words, write, tmp_path, capsys):
    path = tmp_path / "none" if content is None else write(content)
    assert main(["data", "info", str(path), "--chunk-size", "512"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


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


def test_a_stream_with_fewer_windows_than_rows_is_an_error(write):
    file = ByteFile(write(b"x" * 1000))
    with pytest.raises(DataError, match="fewer than the 64 rows"):
        TrainingWindows(file, split(file.size, 0), 100, rows=64, seed=0, sampling="stream")


def test_a_terabyte_opens_and_samples_without_being_read(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as out:
        out.truncate(10**12)
    file = ByteFile(path)
    parts = split(file.size)
    batch = TrainingWindows(file, parts, 512, rows=32, seed=1).batch(7)
    file.fingerprint()
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
