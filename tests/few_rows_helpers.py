"""The modules of few rows by g++ with the emulation's headers (emulated_gpu/) before CUDA's."""

import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from elman_core.kernels import few_rows_native, few_rows_run, toolchain
from elman_core.testing.kernel import need_host_compiler

HERE = Path(__file__).parent


def emulated_modules(folder):
    """What `few_rows_run._module` is to be, with modules compiled into `folder`."""
    need_host_compiler()

    @cache
    def module(name, dtype, _index=None):
        extension = few_rows_run.extension(dtype, few_rows_run.kernels[name] if name else None)
        made = folder / f"{extension.name}.so"
        command = [str(toolchain.find_host_compiler()), "-x", "c++", "-std=c++17", "-O1", "-fPIC", "-shared"]
        command += ["-fvisibility=hidden", "-Wno-unknown-pragmas", f"-I{HERE / 'emulated_gpu'}"]
        command += [f"-I{folder}" for folder in extension.include]
        command += [f"-D{name}={value}" for name, value in extension.defines]
        if extension.header is not None:
            command.append(f'-DELMAN_CELL_HEADER="{extension.header}"')
        done = subprocess.run(
            [*command, str(extension.binding), "-o", str(made)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return few_rows_native.open_library(made)

    return module


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return emulated_modules(tmp_path_factory.mktemp("emulated"))


on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=on_a_gpu)])
def device(request, monkeypatch):
    """Where a test runs: on emulated threads, or on a GPU. A module that wants it names it and `compiled` as its own."""
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    if request.param == "cuda":
        return "cuda"
    monkeypatch.setattr(few_rows_run, "_module", request.getfixturevalue("compiled"))
    return "cpu"
