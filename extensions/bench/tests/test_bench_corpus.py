"""The corpus comes from this machine's Python, the same each time, and is written once."""

import ast
import sysconfig

import pytest
from elman_bench.corpus import standard_library_corpus

from elman_core.registry.errors import DataError, StorageError


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
