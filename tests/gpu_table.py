"""`pytest -m gpu --table FILE`: results of tests in a file of JSON lines, which the next run continues.

A line {"run": N, …} has the hardware, driver, versions and commit of the lines after it. Every other line is one test: its
outcome, seconds, and why it was skipped or the message of its failure. It is written as the test ends, so a run that is cut off
loses nothing; a test in flight is "started".

A run leaves out the tests that have passed on this kind of GPU with the present sources: its own file, those of the core and of
the kernels, its package, and for the tests of the core every package. It takes the others in the order of `STATES`.
`--collect-only` runs nothing and lists them. With `-n K`, the workers have different first GPUs, and each sees all; `-n auto`
is four workers a GPU. `--seconds N` begins no test that would end later than N seconds after the start, by what it took the
last time, or by `UNTIMED` if no run has timed it. What is left stays as it is in the table, for the next run.
"""

import hashlib
import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import harness
import pytest
import torch

ROOT = Path(__file__).parents[1]
STATES = ("never run", "outdated", "started", "skipped", "failed", "passed")
UNTIMED = 30.0  # seconds
NO_GPU = "no NVIDIA GPU here"
"""Why a test is skipped of which this machine can say nothing."""
HANDED = "GPU_TABLE"
"""The environment variable that tells workers what there was at the start; one that is started later must collect the same."""


class Table:
    """The plugin. Only the process that the user started writes."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        self.path, self.config, self.began = path, config, False
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        self.facts: dict[str, Any] = {}  # a worker has none
        if worker is None:
            self.facts = harness.facts(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            self.facts["gpus"] = torch.cuda.device_count()
            size = tidy(path)
            end = time.time() + (config.getoption("seconds") or float("inf"))
            os.environ[HANDED] = json.dumps([size, self.facts["gpu"], self.facts["gpus"], end])
        size, self.gpu, gpus, self.end = json.loads(os.environ[HANDED])
        if worker is not None and gpus:
            names = harness.visible_gpus(gpus)
            first = int(worker.removeprefix("gw")) % len(names)
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first:] + names[:first])
        self.rows = read(path, size)

    def state(self, test: str) -> str:
        """One of `STATES`."""
        if (row := self.rows.get(test)) is None:
            return "never run"
        old = row["sources"] != sources(test.partition("::")[0]) or self.gpu not in (None, row["run"]["gpu"])
        return "outdated" if old else row["outcome"]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        states = {item.nodeid: self.state(item.nodeid) for item in items}
        self.config.hook.pytest_deselected(items=[item for item in items if states[item.nodeid] == "passed"])
        left = (item for item in items if states[item.nodeid] != "passed")
        items[:] = sorted(left, key=lambda item: STATES.index(states[item.nodeid]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """True, which is all that happens to the test, where it could end too late."""
        return time.time() + self.rows.get(item.nodeid, {}).get("seconds", UNTIMED) > self.end or None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.gpu is not None:
            self.write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        said = getattr(report, "wasxfail", "")
        if isinstance(report.longrepr, tuple):
            said = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else report.longreprtext.rpartition("\n")[2]
        if said != NO_GPU:
            short = {"says": said.partition("\n")[0][:300]} if said else {}
            self.write(report.nodeid, report.outcome, seconds=round(report.duration, 1), **short)
        if report.failed and self.facts:
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\n{report.nodeid} failed\n{report.longreprtext}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.facts:
            return
        self.rows = read(self.path, tidy(self.path))
        states = [self.state(test) for test in self.rows]
        counts = ", ".join(f"{states.count(state)} {state}" for state in STATES if state in states)
        terminalreporter.write_line(f"{self.path}: {counts or 'no test yet'}, with the present sources")

    def write(self, test: str, outcome: str, **more: Any) -> None:
        if not self.facts:
            return
        lines: list[dict[str, Any]] = [{"test": test, "outcome": outcome, "sources": sources(test.partition("::")[0])}]
        lines[0] |= more
        if not self.began:
            self.began = True
            lines.insert(0, {"run": self.facts.pop("when"), **self.facts})
        with self.path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path, size: int) -> dict[str, dict[str, Any]]:
    """The last row of each test, whose "run" is that run's line, in the first `size` bytes."""
    rows, run = dict[str, dict[str, Any]](), None
    for line in path.read_bytes()[:size].splitlines() if path.exists() else ():
        found = json.loads(line)
        if "test" in found:
            rows[found["test"]] = {**found, "run": run}
        else:
            run = found
    return rows


def tidy(path: Path) -> int:
    """Keep the last row of each test. Returns the size in bytes."""
    if not path.exists():
        return 0
    whole = path.read_bytes().rpartition(b"\n")[0]  # a kill may have left half a line
    lines, last = list[str](), None
    for row in sorted(read(path, len(whole)).values(), key=lambda row: (row["run"]["run"], row["test"])):
        run = row.pop("run")
        if run is not last:
            lines.append(json.dumps(run))
        lines.append(json.dumps(row))
        last = run
    new = path.with_name(f"{path.name}.new")
    new.write_text("".join(f"{line}\n" for line in lines))
    new.replace(path)
    return path.stat().st_size


@cache
def sources(file: str) -> str:
    """A digest of what a test file depends on."""
    package = Path(file).parent.parent.as_posix()
    parts = ["tests", "plugins", "baselines", "extensions", "benchmarks"] if package == "." else [package]
    digest = hashlib.sha256()
    for path in sorted(p for part in ("elman_core", "csrc_common", *parts) for p in (ROOT / part).rglob("*.*")):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in (".py", ".h", ".cuh", ".cu", ".cpp") and (name == file or not path.name.startswith("test_")):
            digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
