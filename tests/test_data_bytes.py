"""Files of bytes: what can be wrong with them, how fast they open, what identifies them."""

import ast
import gzip
import os
import sysconfig

import pytest

from elman_core.cli import main
from elman_core.data import ByteFile, TrainingWindows, split, standard_library_corpus
from elman_core.data.bytes import NO_TEXT
from elman_core.registry.errors import DataError, StorageError


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


# the demo corpus comes from this machine's Python, the same each time, and is written once ---------------------------


@pytest.fixture
def library(tmp_path, monkeypatch):
    folder = tmp_path / "lib"
    for name, text in {"b.py": b"b = 1\n", "a.py": b"a = 1\n", "pkg/c.py": b"c = 1\n", "test/d.py": b"d = 1\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    (folder / "empty.py").write_bytes(b"\n")
    (folder / "latin.py").write_bytes(b"# \xff\n")
    (folder / "split.py").write_bytes(b"# \x1e\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path / "cache"))
    return folder


def test_documents_are_ordered_and_ended_by_the_separator(library):
    assert standard_library_corpus().read_bytes() == b"a = 1\n\x1eb = 1\n\x1ec = 1\n\x1e"


def test_the_corpus_is_kept_in_the_cache_and_written_once(library, tmp_path):
    path = standard_library_corpus()
    assert path.is_relative_to(tmp_path / "cache")
    written = path.stat().st_mtime_ns
    assert standard_library_corpus() == path
    assert path.stat().st_mtime_ns == written
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing partial is left


def test_a_python_without_sources_says_to_give_a_file(library):
    for path in library.rglob("*.py"):
        path.unlink()
    with pytest.raises(DataError, match="--data FILE"):
        standard_library_corpus()


def test_a_cache_that_cannot_be_written_is_a_storage_error(library, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="ELMAN_CACHE"):
        standard_library_corpus()


def test_the_real_corpus_is_megabytes_of_python():
    path = standard_library_corpus()
    documents = path.read_bytes().split(b"\x1e")
    assert path.stat().st_size > 4_000_000
    ast.parse(documents[len(documents) // 2])
