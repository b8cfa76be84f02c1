"""Which device a name means, without one."""

import pytest
import torch
from torch.cuda._utils import _get_device_index as strict

from elman_core.registry import ConfigError
from elman_core.training.precision import pick_device


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, of which this process has used none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


@pytest.mark.parametrize(("name", "number"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_has_its_number_which_torch_asks_for(name, number, gpus):
    """`set_per_process_memory_fraction` and `set_device` refuse one without."""
    with pytest.raises(ValueError, match="with a specified index"):
        strict(torch.device("cuda"))
    assert strict(pick_device(name)) == number


def test_it_is_the_one_that_the_process_has_made_its_own(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert pick_device("cuda") == torch.device("cuda", 1)
    assert pick_device("cuda:0") == torch.device("cuda", 0)


def test_a_gpu_that_is_not_there_is_a_mistake(gpus):
    with pytest.raises(ConfigError, match="has 2 CUDA devices"):
        pick_device("cuda:2")
    assert pick_device("cpu") == torch.device("cpu")
