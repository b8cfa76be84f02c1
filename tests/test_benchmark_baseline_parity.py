"""The parity of the baselines: here on a CPU at tiny sizes, and on a GPU with the libraries' kernels and layers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "baseline_parity.py"
BRANCHES = ["GRUMixer", "LSTMMixer", "Attention", "SwiGLU", "Mamba2", "GatedDeltaNet"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("baseline_parity", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_baseline_is_as_near_to_float64_as_16_bits_allow(script: ModuleType, tmp_path: Path) -> None:
    found = script.main(["--device", "cpu", "--tiny", "--out", str(tmp_path / "parity.json")])
    assert [r["branch"] for r in found] == BRANCHES
    for row in found:
        assert row["passed"], row
        assert 1e-5 < row["output"] < 0.05, "16 bits were not used, or something is wrong"


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "module"), [("mamba2", "mamba_ssm"), ("gdn", "fla")])
def test_kernels_and_the_librarys_own_layer_are_right_on_a_gpu(
    script: ModuleType, name: str, module: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    found = script.main(["--only", name, "--out", str(tmp_path / "parity.json")])
    assert len(found) == 2
    assert all(r["passed"] for r in found), script.table(found)
