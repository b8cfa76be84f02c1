"""The modules of few rows on emulated threads."""

from functools import cache

import pytest
from emulated import LIBRARY, compile_emulated

from elman_core.kernels import launch
from elman_core.kernels.decode import grids
from elman_core.kernels.decode import run as decode_run
from elman_core.testing.kernel import need_host_compiler


def emulated_modules(folder):
    """What `decode.run.module` is to be, with modules compiled into `folder`."""
    need_host_compiler()

    @cache
    def module(cell, family, dtype, _index=None):
        extension = decode_run.extension(dtype, cell)
        made = folder / f"{extension.name}.so"
        if not made.exists():
            compile_emulated(extension, extension.binding, made, *LIBRARY)
        return launch.open_module(made, decode_run.FAMILIES[family])

    return module


def small_cases():
    """Few and tiny problems of the shared kernels."""
    for dtype in decode_run.NARROW:
        yield grids._linear(3, 72, 40, dtype=dtype, bias=True, activated=24, strided=True)
        yield grids._linear(9, 40, 19, dtype=dtype, activated=19)
        yield grids._linear(64, 136, 16, dtype=dtype, bias=True)
        yield grids._linear(5, 72, 40, 7, 16, 1, 33, dtype=dtype)
    for dtype in decode_run.DTYPES:
        yield grids._norm(3, 161, dtype, strided=True)
        yield grids._norm(1, 40, dtype, adds=False)
        for how in grids._DRAWS:
            yield grids._draw(9, 200, dtype, how, strided=True)
        yield grids._draw(64, 64, dtype, grids._DRAWS[3], each=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return emulated_modules(tmp_path_factory.mktemp("emulated"))


on_a_gpu = pytest.mark.gpu


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=on_a_gpu)])
def device(request, monkeypatch):
    """Where a test runs: on emulated threads, or on a GPU. A module that wants it names it and `compiled` as its own."""
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    if request.param == "cuda":
        return "cuda"
    monkeypatch.setattr(decode_run, "module", request.getfixturevalue("compiled"))
    return "cpu"
