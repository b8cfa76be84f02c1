"""Kernels under compute-sanitizer: no access beyond a buffer, no race in shared memory, every output written.

Each program is a `*_gpu_driver.cu`, compiled with the binding and the flags of a module that ships. Some of them also run on
emulated threads under AddressSanitizer, on any machine: it sees what lies beyond a buffer as memcheck does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Semaphore

import pytest
import torch
from emulated import compile_emulated

from elman_core.kernels import build, dense_cuda, few_rows_run, toolchain
from elman_core.kernels.build import Extension
from elman_core.kernels.matrix_build import Maps, Size
from elman_core.testing.kernel import need_host_compiler

e1, e42, e88 = (pytest.importorskip(f"elman_{name}.op") for name in ("e1", "e42", "e88"))
HERE = Path(__file__).parent
TOOLS = ("memcheck", "racecheck")
SAYS = "every output was written"
ON_ONE_GPU = 4  # programs at once
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
PLAIN, FUSED, GATED = Maps(), Maps(True, True, "mamba", "given"), Maps(True, True, "mamba", "sigmoid")


@dataclass(frozen=True)
class Program:
    """A driver, and the module that it runs."""

    driver: str
    extension: Extension

    @property
    def source(self) -> Path:
        return HERE / f"{self.driver}_gpu_driver.cu"


def dense(kind: str, spill: int, wide: int, dtype: torch.dtype, width: int) -> Program:
    bare = e42.dense.extension("cuda")
    macros = {"DTYPE": dense_cuda.DTYPE_CODES[dtype], "WIDTH": width, "KIND": kind, "SPILL": spill, "WIDE": wide}
    name = f"dense_{kind}{spill}{wide}_{str(dtype).removeprefix('torch.')}_{width}"
    defines = tuple((f"ELMAN_{key}", str(value)) for key, value in macros.items())
    return Program("dense", replace(bare, name=name, defines=(*bare.defines, *defines)))


def matrix(rows: int, columns: int, dtype: torch.dtype, maps: Maps = PLAIN, write: bool = False) -> Program:
    size = Size(rows, columns, dtype, False, write, str(maps))
    return Program("matrix_state", e88.matrix.extension_for("cuda", size))


def few_rows(dtype: torch.dtype, cell: str | None = None) -> Program:
    return Program("few_rows", few_rows_run.extension(dtype, few_rows_run.kernels[cell] if cell else None))


PROGRAMS = [
    dense("cluster", 0, 1, bf16, 144),
    dense("cluster", 0, 1, f32, 48),
    dense("grid", 0, 1, bf16, 144),
    dense("grid", 1, 1, f16, 272),
    dense("grid", 0, 1, f32, 80),
    dense("tiles", 0, 1, bf16, 144),
    dense("tiles", 1, 1, f32, 272),
    dense("tiles", 1, 2, bf16, 272),
    matrix(16, 16, bf16, FUSED),
    matrix(32, 32, bf16),
    matrix(32, 24, bf16, GATED, write=True),  # several warps, the last of them with few lines
    matrix(16, 16, f16),
    matrix(32, 20, f32, write=True),
    matrix(64, 72, bf16),  # without tensor cores in the recurrence
    matrix(4, 260, bf16, FUSED),  # more lines than a block takes
    few_rows(bf16),
    few_rows(f16),
    few_rows(f32),  # norm and draw alone
    *(few_rows(dtype, cell) for cell in ("e1", "e42") for dtype in (bf16, f16)),
]
EMULATED = [
    matrix(32, 24, bf16, GATED, write=True),
    matrix(4, 72, bf16, FUSED),
    few_rows(bf16),
    few_rows(f16, "e1"),
]


def name_of(program: Program) -> str:
    return program.extension.name


def compiled(program: Program, folder: Path) -> Path:
    """By nvcc for the GPU here, with the flags of the module itself."""
    extension, made, nvcc = program.extension, folder / program.extension.name, toolchain.find_nvcc()
    command = [str(nvcc), *(flag for flag in extension.flags(build.local_arch(extension)) if flag != "-shared")]
    if extension.header is not None:
        command.append(f'-DELMAN_CELL_HEADER="{extension.header.resolve()}"')
    includes = (*extension.include, extension.binding.parent, *toolchain.pip_include_dirs(nvcc))
    command += [*(f"-I{f}" for f in includes), *(f"-L{f}" for f in toolchain.pip_library_dirs(nvcc))]
    done = subprocess.run([*command, str(program.source), "-o", str(made)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return made


Said = dict[str, subprocess.CompletedProcess[str]]  # by tool


@pytest.fixture(scope="module")
def sanitized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Said]]]:
    """What each tool said of each program that a test asks for: compilers on all cores, beside runs of what is compiled."""
    folder, gpu = tmp_path_factory.mktemp("sanitized"), Semaphore(ON_ONE_GPU)

    def said(program: Program) -> Said:
        path, found = compiled(program, folder), {}
        for tool in TOOLS:
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", str(path)]
            with gpu:
                found[tool] = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        return found

    asked = {
        name_of(item.callspec.params["program"]): item.callspec.params["program"]
        for item in request.session.items
        if getattr(item, "originalname", None) == test_the_sanitizer_finds_nothing.__name__
        and isinstance(item, pytest.Function)
    }
    pool = ThreadPoolExecutor(os.cpu_count())
    yield {name: pool.submit(said, program) for name, program in asked.items()}
    pool.shutdown(cancel_futures=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer on PATH")
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_the_sanitizer_finds_nothing(program, tool, sanitized):
    done = sanitized[name_of(program)].result()[tool]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert SAYS in done.stdout


@pytest.mark.parametrize("program", EMULATED, ids=name_of)
def test_the_drivers_find_nothing_on_emulated_threads(program, tmp_path):
    need_host_compiler()
    made, smaller = tmp_path / "driver", ("-DELMAN_BATCH=1", "-DELMAN_STEPS=19")
    compile_emulated(program.extension, program.source, made, "-g1", "-fsanitize=address", *smaller)
    options = {"ASAN_OPTIONS": "detect_leaks=0"}  # the drivers free nothing
    done = subprocess.run([made], capture_output=True, text=True, check=False, env=os.environ | options)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert SAYS in done.stdout
