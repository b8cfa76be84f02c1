"""Results of tests on a GPU in a table (gpu_table.py): what the next run takes, in which order, and what it begins in time."""

import json
from types import SimpleNamespace

import gpu_table
import pytest

FILE = "tests/test_gpu_table.py"
TIMES = {"short": 3.0, "long": 90.0}  # what tests took


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv(gpu_table.HANDED, "")
    now, path = [1000.0], tmp_path / "table.jsonl"
    monkeypatch.setattr(gpu_table.time, "time", lambda: now[0])

    def made(seconds=None):
        hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(item.nodeid for item in items))
        left_out: list[str] = []
        config = SimpleNamespace(getoption=lambda _name: seconds, hook=hook)
        found = gpu_table.Table(path, config)
        return SimpleNamespace(plugin=found, left_out=left_out, now=now)

    return made


def items(*names):
    return [SimpleNamespace(nodeid=f"{FILE}::{name}") for name in names]


def test_a_test_that_would_end_too_late_does_not_begin_and_stays_as_it_is(table):
    first = table().plugin
    for name, took in TIMES.items():
        first.write(f"{FILE}::{name}", "failed", seconds=took)
    later = table(seconds=60)

    def begins(at):
        later.now[0] = 1000.0 + at
        return [
            i.nodeid.rpartition(":")[2]
            for i in items("short", "long", "new")
            if not later.plugin.pytest_runtest_protocol(i)
        ]

    assert [begins(at) for at in (0, 40, 58)] == [["short", "new"], ["short"], []]
    assert [later.plugin.state(i.nodeid) for i in items("short", "long", "new")] == ["failed", "failed", "never run"]


def test_what_passed_with_the_present_sources_is_left_out_until_they_change(table, monkeypatch):
    first = table().plugin
    for outcome in ("passed", "failed", "skipped", "started"):
        first.write(f"{FILE}::{outcome}", outcome)
    with first.path.open("a") as file:
        file.write('{"test": "cut off by a ki')
    taken, again = items("passed", "failed", "skipped", "started", "new"), table()
    again.plugin.pytest_collection_modifyitems(taken)
    assert [i.nodeid.rpartition(":")[2] for i in taken] == ["new", "started", "skipped", "failed"]
    assert again.left_out == [f"{FILE}::passed"]
    assert all(json.loads(line) for line in first.path.read_text().splitlines())
    monkeypatch.setattr(gpu_table, "sources", lambda _file: "other")
    assert {again.plugin.state(i.nodeid) for i in items("passed", "failed")} == {"outdated"}
