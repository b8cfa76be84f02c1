"""Reading ahead: order and content as without it, errors where they are met, slow disks waited for, and a clean end."""

import threading
import time

import numpy as np
import pytest
import torch
from train_helpers import losses, settings

from elman_core.data import Batch
from elman_core.registry import LoaderError
from elman_core.training.prefetch import Prefetcher
from elman_core.training.start import resume, start

CPU = torch.device("cpu")


def numbered(step):
    return Batch(np.full((2, 3), step, dtype=np.uint8), np.array([step, step]), np.zeros(2, dtype=bool))


@pytest.fixture
def reader():
    made = []

    def make(read, **how):
        made.append(Prefetcher(read, CPU, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def test_batches_come_in_order_and_only_so_many_are_read_ahead(reader):
    read = []

    def note(step):
        read.append(step)
        return numbered(step)

    ahead = reader(note, depth=3)
    assert [int(ahead.get(s).tokens[0, 0]) for s in (5, 6)] == [5, 6]
    until(lambda: len(read) == 5)
    time.sleep(0.05)
    assert read == [5, 6, 7, 8, 9]
    assert int(ahead.get(7).tokens[0, 0]) == 7
    assert ahead.get(7 + 1).tokens.dtype == torch.uint8


def test_a_jump_reads_what_is_asked_for(reader):
    ahead = reader(numbered)
    for step in (0, 1, 9, 10, 3, 3, 4):
        ready = ahead.get(step)
        assert int(ready.tokens[1, 2]) == step


def test_an_error_is_raised_for_its_step_and_not_before(reader):
    fails = {2}

    def read(step):
        if step in fails:
            raise LoaderError("cannot read text at byte 77: Input/output error")
        return numbered(step)

    ahead = reader(read)
    assert ahead.get(0).tokens[0, 0] == 0
    assert ahead.get(1).tokens[0, 0] == 1
    for _ in range(2):
        with pytest.raises(LoaderError, match="byte 77"):
            ahead.get(2)
    fails.clear()
    assert ahead.get(2).tokens[0, 0] == 2


def test_closing_ends_the_thread_while_it_reads_and_while_it_waits(reader):
    begun, may_end = threading.Event(), threading.Event()

    def slow(step):
        if step == 1:
            begun.set()
            assert may_end.wait(10)
        return numbered(step)

    ahead = reader(slow)
    ahead.get(0)
    assert begun.wait(10)
    thread = ahead._thread
    threading.Timer(0.05, may_end.set).start()
    ahead.close()
    assert not thread.is_alive()
    assert ahead.get(0).tokens[0, 0] == 0, "and it can be used again"
    waiting = ahead._thread
    ahead.close()
    assert not waiting.is_alive()


def reading_ahead(trainer):
    """The trainer as on a GPU: batches in a thread, metrics one step late."""
    trainer.feed.reader = Prefetcher(lambda s: trainer.windows.batch(s), trainer.device)
    trainer.ahead = 1
    return trainer


def test_a_disk_that_fails_ends_the_run_at_its_step_with_the_steps_before_it_saved(text, tmp_path):
    sets = ("train.steps=8", "train.warmup=2", "train.save_every=0")
    start(settings(text, *sets), tmp_path / "good", quiet=True).fit()
    trainer = reading_ahead(start(settings(text, *sets), tmp_path / "run", quiet=True))
    real = trainer.windows.batch

    def failing(step, rows=None):
        if step == 5:
            raise LoaderError("cannot read text at byte 77: Input/output error")
        return real(step)

    trainer.windows.batch = failing
    with pytest.raises(LoaderError, match="byte 77"):
        trainer.fit()
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]
    assert next((tmp_path / "run" / "checkpoints").iterdir()).name == "step-00000005"
    resume(tmp_path / "run", quiet=True).fit()
    assert losses(tmp_path / "run") == losses(tmp_path / "good")
