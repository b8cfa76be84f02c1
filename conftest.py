"""Settings of every test process: one thread (tiny matmuls are faster so, and xdist runs a process a core); no network; signals
as a shell's foreground has them, also where the tests are started in its background or under nohup, which ignore some.
Nothing looks for garbage while everything is imported.
"""

import gc
import os
import signal

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()


def pytest_configure(config) -> None:
    """A file's tests run in one process, which makes once what they share."""
    if config.getoption("dist", "no") == "load":
        config.option.dist, config.option.loadscopereorder = "loadfile", False


def pytest_collection_modifyitems(items) -> None:
    """Files with the slowest tests first, so that no process is left with one of them at the end."""
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)  # `elman check` in this tree needs pytest alone
def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: one more than there are cores, since many tests wait for a process or a compiler."""
    return (os.cpu_count() or 1) + 1
