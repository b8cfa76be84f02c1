"""The modules of few rows on emulated threads."""

from functools import cache

import pytest
from elman_authors.testing.kernel import need_host_compiler
from emulated import LIBRARY, compile_emulated

from elman_core.kernels import launch
from elman_core.kernels.decode import native
from elman_core.kernels.decode.spec import DTYPES, NARROW, case


def emulated_modules(folder):
    """What `decode.native.module` is to be, with modules compiled into `folder`."""
    need_host_compiler()

    @cache
    def module(cell, family, dtype, _index=None):
        extension = native.extension(dtype, cell)
        made = folder / f"{extension.name}.so"
        if not made.exists():
            compile_emulated(extension, extension.binding, made, *LIBRARY)
        return launch.open_module(made, family)

    return module


def small_cases():
    """Few and tiny problems of the shared kernels."""
    for dtype in NARROW:
        yield case("linear", (3, 72, 40), dtype, bias=True, activated=True, strided=True)
        yield case("linear", (9, 40, 19), dtype, activated=True)
        yield case("linear", (64, 136, 16), dtype, bias=True)
        yield case("linear", (5, 72, 40), dtype, several=True)
    for dtype in DTYPES:
        yield case("norm", (3, 161), dtype, adds=True, strided=True)
        yield case("norm", (1, 40), dtype)
        for how in ({}, {"penalised": True, "greedy": True}, {"top_k": True, "top_p": True}):
            yield case("draw", (9, 200), dtype, strided=True, **how)
        yield case("draw", (64, 64), dtype, penalised=True, top_p=True, each=True)


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
    monkeypatch.setattr(native, "module", request.getfixturevalue("compiled"))
    return "cpu"
