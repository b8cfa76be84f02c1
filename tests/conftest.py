"""Fixtures that several test files share."""

import gc

import pytest
import torch
from train_helpers import write_text


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays: looking through it for garbage again and again takes a twentieth of the time
    torch.set_num_threads(1)  # threads of several workers would wait for each other's processors


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """The text of the tiny trainings. Tests read it only."""
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
