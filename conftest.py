"""Settings of every test process: one thread (tiny matmuls are faster so, and xdist runs a process a core); no network; signals
as a shell's foreground has them, also where the tests are started in its background or under nohup, which ignore some.
Nothing looks for garbage while everything is imported. And the fixtures that several packages' tests share.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # as `elman generate`

if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--table", type=Path, help="keep the results in this file, and run what it lacks (tests/gpu_table.py)"
    )
    parser.addoption("--seconds", type=float, help="with --table: begin no test that would end later than this")


def pytest_configure(config) -> None:
    """A file's tests run in one process, which makes once what they share."""
    if table := config.getoption("table"):
        from gpu_table import Table

        config.pluginmanager.register(Table(table, config))
    if config.getoption("dist", "no") == "load":
        config.option.dist, config.option.loadscopereorder = "loadfile", False


def pytest_collection_modifyitems(items) -> None:
    """Files with the slowest tests first, so that no process is left with one of them at the end."""
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays: looking through it for garbage again and again takes a twentieth of the time
    gc.enable()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # threads of several workers would wait for each other's processors


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem) -> None:
    """What outlives a file of tests outlives the process: Trainer's own collections would look through all of it each time."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no NVIDIA GPU here")  # as in tests/gpu_table.py


@pytest.fixture(autouse=True)
def environment():
    """Fails a test that leaves a variable of ours set: the tests after it in this process would run with it."""
    before = {name: value for name, value in os.environ.items() if name.startswith("ELMAN_")}
    yield
    after = {name: value for name, value in os.environ.items() if name.startswith("ELMAN_")}
    for name in after.keys() - before.keys():
        del os.environ[name]
    assert after == before, "set them with monkeypatch"


@pytest.hookimpl(optionalhook=True)  # `elman check` in this tree needs pytest alone
def pytest_xdist_auto_num_workers(config) -> int:
    """For `-n auto`: a worker more than there are cores, since many tests wait for a process; with `--table`, four a GPU."""
    if config.getoption("table"):
        import torch

        return 4 * max(1, torch.cuda.device_count())
    return (os.cpu_count() or 1) + 1


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """The text of the tiny trainings. Tests read it only."""
    from train_helpers import write_text

    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture
def register():
    """Registers a plugin object for one test."""
    from elman_core.registry import plugins

    names = []

    def add(plugin, name="elman-test:test"):
        names.append(plugins().manager.register(plugin, name=name))
        return plugin

    yield add
    for name in names:
        if plugins().manager.has_plugin(name):
            plugins().manager.unregister(name=name)


@pytest.fixture
def after_step(register):
    """Registers a function that is called with the run after one of its steps."""
    from elman_core.registry import hookimpl

    def add(when, act):
        class Act:
            @hookimpl
            def elman_step_end(self, run, step):
                if step == when:
                    act(run)

        register(Act(), f"elman-test:{when}")

    return add
