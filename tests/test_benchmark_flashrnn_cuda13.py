"""FlashRNN under CUDA 13: what it is given in place of its own probe, and when, with a stand-in for its two modules."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace

import dense
import flashrnn_cuda13
import pytest
import torch

STAND_IN = {
    "__init__.py": "from .flashrnn import flashrnn\n",
    "flashrnn/__init__.py": "from .flashrnn import flashrnn\n",
    "flashrnn/flashrnn.py": "def flashrnn(*tensors, **options): raise RuntimeError(ERROR)\n",
    "flashrnn/cuda_init.py": """
from packaging.version import Version
def get_cuda_version():
    return Version(FOUND) if FOUND else None
""",
    "flashrnn/gpu_info/__init__.py": "",
    "flashrnn/gpu_info/gpu_info.py": """
class _GPUInfoCUDA:
    mod = None
    @classmethod
    def instance(cls):
        if cls.mod is None:
            raise RuntimeError("Error building extension 'gpu_info2'")
        return cls.mod
def get_gpu_info(device_id):
    return _GPUInfoCUDA.instance().GPUInfo().gpu_info(device_id)
""",
}
# As torch names them; an H200's.
H200 = SimpleNamespace(
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    multi_processor_count=132,
    shared_memory_per_block_optin=232448,
)


@pytest.fixture
def flashrnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The stand-in's modules by their last names; `compiler` sets what nvcc says of itself."""
    for name, text in STAND_IN.items():
        path = tmp_path / "flashrnn" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "flashrnn"}
    cuda_init, probe, run = (
        import_module(f"flashrnn.flashrnn.{x}") for x in ("cuda_init", "gpu_info.gpu_info", "flashrnn")
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: H200)
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda package: "1.0.8" if package == "flashrnn" else version(package))
    yield SimpleNamespace(probe=probe, run=run, compiler=lambda version: setattr(cuda_init, "FOUND", version))
    for name in [name for name in sys.modules if name.split(".")[0] == "flashrnn"]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.mark.parametrize("version", ["13.0", "13.2", "14.1"])
def test_from_cuda_13_on_flashrnn_reads_what_torch_reports(flashrnn: SimpleNamespace, version: str) -> None:
    flashrnn.compiler(version)
    assert flashrnn_cuda13.prepare()
    assert flashrnn.probe.get_gpu_info(0) == {
        "maxThreadsPerBlock": 1024,
        "regsPerMultiprocessor": 65536,
        "multiProcessorCount": 132,
        "sharedMemPerBlockOptin": 232448,
    }


@pytest.mark.parametrize("version", ["11.8", "12.9", None])
def test_before_cuda_13_flashrnn_is_left_to_itself(flashrnn: SimpleNamespace, version: str | None) -> None:
    flashrnn.compiler(version)
    assert not flashrnn_cuda13.prepare()
    with pytest.raises(RuntimeError, match="gpu_info2"):
        flashrnn.probe.get_gpu_info(0)


def test_the_row_of_a_failed_build_says_so_in_one_line(
    flashrnn: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("randn", "zeros"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, make=make, **kind: make(*size, **kind | {"device": "cpu"}))
    flashrnn.compiler("13.0")
    flashrnn.run.ERROR = "Error building extension 'elman_f'\nninja: build stopped"
    assert dense.attempt(dense.flashrnn, 4, 2, 8, 1) == (
        "FlashRNN 1.0.8 does not compile with CUDA 13.0: Error building extension 'elman_f', see the output"
    )
    flashrnn.run.ERROR = "Errors during CUDA kernel calls forward."
    assert dense.attempt(dense.flashrnn, 4, 2, 8, 1) == "RuntimeError: Errors during CUDA kernel calls forward."


@pytest.mark.gpu
def test_the_installed_flashrnn_is_given_all_it_reads_and_what_the_driver_says() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    if importlib.util.find_spec("flashrnn") is None:
        pytest.skip("flashrnn is not installed")
    if not flashrnn_cuda13.prepare():
        pytest.skip("a toolkit before CUDA 13")
    source = Path(str(import_module("flashrnn").__file__)).parent / "flashrnn" / "flashrnn.py"
    found = import_module("flashrnn.flashrnn.gpu_info.gpu_info").get_gpu_info(0)
    assert set(found) == set(re.findall(r"gpu_info\['(\w+)'\]", source.read_text()))
    driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    attributes = {  # CUdevice_attribute of cuda.h
        "maxThreadsPerBlock": 1,
        "multiProcessorCount": 16,
        "regsPerMultiprocessor": 82,
        "sharedMemPerBlockOptin": 97,
    }
    for name, attribute in attributes.items():
        assert driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0) == 0
        assert found[name] == value.value, name
