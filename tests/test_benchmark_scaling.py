"""benchmarks/scaling.py: the line it runs is one that a user could type, and its arithmetic."""

import argparse
import importlib.util
import itertools
from pathlib import Path

import pytest

from elman_core.cli.train import read_settings


@pytest.fixture(scope="module")
def scaling():
    path = Path(__file__).parents[1] / "benchmarks" / "scaling.py"
    spec = importlib.util.spec_from_file_location("scaling", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ASKED = argparse.Namespace(rows=32, length=512, device="cuda", steps=60)


@pytest.mark.parametrize("gpus", [1, 4])
def test_every_line_has_settings_that_exist_and_a_batch_that_grows_with_the_gpus(gpus, scaling, tmp_path):
    for kind in scaling.KINDS:
        words = scaling.command("e42@64x1", gpus, kind, tmp_path / "text", tmp_path / "run", ASKED)
        assert ("--nproc-per-node" in words) == (gpus > 1)
        sets = [value for flag, value in itertools.pairwise(words) if flag == "--set"]
        train = read_settings("e42@64x1", steps=60, sets=sets).train
        assert train.batch_size == 32 * gpus
        assert train.parallel == ("auto" if gpus == 1 else "fsdp" if kind == "fsdp" else "ddp")


def test_efficiency_is_relative_to_one_gpu_and_a_failure_keeps_its_reason(scaling):
    rows = [
        {"model": "a", "gpus": 1, "kind": "one", "tok_s": 100, "memory_gib": 1.0},
        {"model": "a", "gpus": 4, "kind": "auto", "tok_s": 380, "memory_gib": 1.0},
        {"model": "b", "gpus": 4, "kind": "auto", "reason": "out of memory"},
    ]
    made = scaling.with_efficiency(rows)
    assert (made[1]["times_one"], made[1]["efficiency"]) == (3.8, 0.95)
    assert "efficiency" not in made[2]
    table = scaling.table(made)
    assert "95.0%" in table
    assert "out of memory" in table
