"""Building and loading compiled kernels: the cache, its key, its lock, what a failure says, and ELMAN_KERNELS."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from elman_authors.testing.kernel import need_host_compiler, need_nvcc
from train_helpers import wait_for

from elman_core.cli import main
from elman_core.kernels import build, runtime, toolchain
from elman_core.kernels.build import Extension
from elman_core.registry import ConfigError, KernelError, list_variants

# A Python module without pybind11, so that it compiles in a moment; its answer comes from a header that another one includes.
SOURCE = """
#include <Python.h>
#include <answers/outer.h>
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, TEXT(ELMAN_MODULE), nullptr, -1, methods};
PyMODINIT_FUNC JOIN(PyInit_, ELMAN_MODULE)() { return PyModule_Create(&definition); }
"""
ASK = """
import sys
from pathlib import Path
from elman_core.kernels import build
root = Path(sys.argv[1])
extension = build.Extension("answering", root / "answering.cpp", (root / "include",))
print(build.load(extension).answer())
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an extension's sources; the cache is a folder of its own."""
    (tmp_path / "include" / "answers").mkdir(parents=True)
    (tmp_path / "answering.cpp").write_text(SOURCE)
    (tmp_path / "answering.cu").write_text(SOURCE)
    (tmp_path / "include" / "answers" / "outer.h").write_text('#pragma once\n#include "inner.h"\n')
    (tmp_path / "include" / "answers" / "inner.h").write_text("#define ANSWER 42\n")
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def project(sources: Path) -> Path:
    """The same, where they can be compiled."""
    need_host_compiler()
    return sources


def extension(project: Path, suffix: str = ".cpp") -> Extension:
    return Extension("answering", project / f"answering{suffix}", (project / "include",))


def counting_compiler(project: Path, before: str = "") -> Path:
    """A compiler that notes each of its runs."""
    script = project / "counting-g++"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo run >> {project}/runs; {before} ;; esac\nexec g++ "$@"\n'
    )
    script.chmod(0o755)
    return script


def start(project: Path, before: str = "", **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", before + ASK, str(project)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def test_a_module_is_compiled_and_its_making_recorded(project):
    module = build.load(extension(project))
    assert module.answer() == 42
    path = build.find(extension(project), toolchain.host_architecture())
    assert path is not None
    record = json.loads(path.with_suffix(".json").read_text())
    assert record["compiler_version"]
    assert {Path(s).name for s in record["sources"]} == {"answering.cpp", "outer.h", "inner.h"}
    assert sorted(p.suffix for p in path.parent.iterdir() if not p.name.startswith(".")) == [".json", ".so"]


def test_the_second_use_needs_no_compiler(project):
    build.load(extension(project))
    second = start(project, PATH="", CXX="/nonexistent/compiler")
    out, errors = second.communicate(timeout=60)
    assert (second.returncode, out.strip()) == (0, "42"), errors


def test_processes_that_ask_at_once_compile_once(project):
    compiler = counting_compiler(project, before="sleep 0.5")
    asking = [start(project, CXX=str(compiler)) for _ in range(4)]
    for process in asking:
        out, errors = process.communicate(timeout=120)
        assert (process.returncode, out.strip()) == (0, "42"), errors
    assert (project / "runs").read_text().count("run") == 1


def test_processes_whose_locks_exclude_nobody_build_side_by_side(project):
    """As on NFS whose locks are local: none may remove what another is building."""
    unlocked = "import fcntl\nfcntl.flock = lambda *_: None\n"
    compiler = counting_compiler(project, before=f"sleep $(grep -c . {project}/runs)")
    asking = [start(project, unlocked, CXX=str(compiler)) for _ in range(3)]
    for process in asking:
        out, errors = process.communicate(timeout=120)
        assert (process.returncode, out.strip()) == (0, "42"), errors
    assert build.find(extension(project), toolchain.host_architecture()) is not None


def test_a_build_that_was_killed_is_taken_up_by_the_next(project):
    slow = counting_compiler(project, before="sleep 60")
    killed = start(project, CXX=str(slow))
    wait_for((project / "runs").exists, 60)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert build.find(extension(project), toolchain.host_architecture()) is None
    build.build(dataclasses.replace(extension(project), name="other"), toolchain.host_architecture())
    assert not list((project / "cache").glob(".building-*")), "the next build of any module cleans up"
    assert build.load(extension(project)).answer() == 42


def test_a_compiler_that_the_system_killed_is_asked_again(project, monkeypatch):
    killed = counting_compiler(project, before=f"[ $(grep -c run {project}/runs) -gt 1 ] || kill -9 $$")
    monkeypatch.setenv("CXX", str(killed))
    assert build.load(extension(project)).answer() == 42
    assert (project / "runs").read_text().count("run") == 2


def test_the_key_covers_headers_of_headers_flags_and_architecture_but_not_the_compiler(sources, monkeypatch):
    first = extension(sources)
    key = first.key("x86_64")
    monkeypatch.setenv("CXX", "clang++")
    assert first.key("x86_64") == key
    assert first.key("arm64") != key
    assert Extension(first.name, first.binding, first.include, defines=(("FAST", "1"),)).key("x86_64") != key
    assert Extension("other", first.binding, first.include).key("x86_64") != key
    plain = dataclasses.replace(first, python=False)
    plain_key = plain.key("x86_64")
    monkeypatch.setattr(toolchain, "python_abi", lambda: ".cpython-399-x86_64-linux-gnu.so")
    assert first.key("x86_64") != key
    assert plain.key("x86_64") == plain_key, "a shared library serves every Python"
    monkeypatch.undo()
    (sources / "include" / "answers" / "inner.h").write_text("#define ANSWER 43\n")
    assert first.key("x86_64") != key


def test_a_later_cache_folder_is_read_and_the_first_writable_one_is_written(project, monkeypatch):
    made = build.build(extension(project), toolchain.host_architecture(), out=project / "prebuilt")
    (project / "a-file").write_text("")
    unwritable, writable = project / "a-file" / "cache", project / "writable"
    folders = [unwritable, writable, project / "prebuilt"]
    monkeypatch.setenv("ELMAN_CACHE", os.pathsep.join(map(str, folders)))
    assert build.build(extension(project), toolchain.host_architecture()) == made
    assert not writable.exists()
    (project / "include" / "answers" / "inner.h").write_text("#define ANSWER 44\n")
    assert build.build(extension(project), toolchain.host_architecture()).parent == writable


def test_a_cache_folder_may_be_the_current_one_and_needs_a_home_only_where_it_names_one(project, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.setenv("ELMAN_CACHE", ".")
    made = build.build(extension(project), toolchain.host_architecture())
    assert made.parent == project, "the loader searches its own path for a name without a folder"
    monkeypatch.setenv("ELMAN_CACHE", os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(project))
    assert build.cache_dirs() == [project / "elman"]
    monkeypatch.setenv("ELMAN_CACHE", "~nobody_of_this_name/cache")
    with pytest.raises(KernelError, match=r"no home folder for ~nobody_of_this_name/cache; set ELMAN_CACHE"):
        build.load(extension(project))


def test_without_a_writable_folder_the_error_names_them(sources, monkeypatch):
    (sources / "a-file").write_text("")
    monkeypatch.setenv("ELMAN_CACHE", str(sources / "a-file" / "cache"))
    with pytest.raises(KernelError, match=r"no cache folder can be written .*a-file/cache.*ELMAN_CACHE"):
        build.build(extension(sources), "x86_64")


def test_a_folder_that_cannot_be_locked_is_an_error(project, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(KernelError, match=r"cache cannot be locked \(No locks available\); set ELMAN_CACHE to"):
        build.build(extension(project), toolchain.host_architecture())


def test_a_compile_error_gives_its_first_line_and_a_command_that_repeats_it(project):
    (project / "include" / "answers" / "inner.h").write_text("#define ANSWER undeclared_name\n")
    with pytest.raises(KernelError) as caught:
        build.load(extension(project))
    message = str(caught.value)
    assert "\n" not in message
    assert re.search(r"error: .*undeclared_name", message)
    command = message.split("to reproduce: ")[1]
    again = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False, cwd=project)
    assert again.returncode != 0
    assert "undeclared_name" in again.stderr
    assert not list((project / "cache").glob("*.so"))


def test_a_module_that_is_not_as_it_was_compiled_is_built_again_and_never_loaded(project, monkeypatch, caplog):
    """Cut, flipped, exchanged with another module's, or without its record; in another process it would crash."""
    monkeypatch.setenv("CXX", str(counting_compiler(project)))
    arch, other = toolchain.host_architecture(), dataclasses.replace(extension(project), name="other")
    path, other_path = build.build(extension(project), arch), build.build(other, arch)
    whole, record = path.read_bytes(), path.with_suffix(".json")
    said = record.read_bytes()
    for file, content in (
        (path, whole[:-100]),
        (path, whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:]),
        (path, other_path.read_bytes()),
        (record, said[:-10]),
        (record, other_path.with_suffix(".json").read_bytes()),
        (record, None),
    ):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        assert build.find(extension(project), arch) is None
        before, _ = (project / "runs").read_text().count("run"), caplog.clear()
        assert build.build(extension(project), arch) == path
        assert (project / "runs").read_text().count("run") == before + 1
        assert "damaged: it is built again" in caplog.text
    assert build.load(extension(project)).answer() == 42
    record.write_text(json.dumps({k: v for k, v in json.loads(said).items() if k not in ("sha256", "digest")}))
    assert build.find(extension(project), arch) == path, "a record of an older version has no digest"


def test_without_a_compiler_the_error_says_what_to_install(sources, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(toolchain, "_pip_toolkit", list)
    with pytest.raises(KernelError, match=r"no C\+\+ compiler.*install g\+\+"):
        build.build(extension(sources), "x86_64")
    with pytest.raises(KernelError, match=r"no CUDA compiler.*pip install nvidia-cuda-nvcc"):
        build.build(extension(sources, ".cu"), "sm_90")


def test_nvcc_is_looked_for_in_cuda_home_then_path_then_pip_packages(tmp_path, monkeypatch):
    def fake(folder: Path) -> Path:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "nvcc").write_text("#!/bin/sh\n")
        (folder / "bin" / "nvcc").chmod(0o755)
        return folder / "bin" / "nvcc"

    home, path = fake(tmp_path / "home"), fake(tmp_path / "path")
    pip = fake(tmp_path / "site" / "nvidia" / "cuda_nvcc")
    (tmp_path / "site" / "nvidia" / "cuda_runtime" / "include").mkdir(parents=True)
    packages = SimpleNamespace(submodule_search_locations=[tmp_path / "site" / "nvidia"])
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda _: packages)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(home.parent.parent))
    monkeypatch.setenv("PATH", str(path.parent))
    assert toolchain.find_nvcc() == home
    monkeypatch.delenv("CUDA_HOME")
    assert toolchain.find_nvcc() == path
    assert toolchain.pip_dirs(path, "include") == []
    monkeypatch.setenv("PATH", "")
    assert toolchain.find_nvcc() == pip
    assert toolchain.pip_dirs(pip, "include") == [tmp_path / "site" / "nvidia" / "cuda_runtime" / "include"]
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "empty"))
    with pytest.raises(KernelError, match="holds no bin/nvcc"):
        toolchain.find_nvcc()


def test_a_compiler_that_cannot_be_run_is_named(sources, monkeypatch):
    """Such as one for another processor."""
    nvcc = sources / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("not of this machine")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(sources))
    for run in (lambda: build.build(extension(sources, ".cu"), "sm_90"), lambda: build.version(nvcc)):
        with pytest.raises(KernelError, match=f"^cannot run {nvcc}: Exec format error; set CUDA_HOME"):
            run()


def test_a_comma_at_which_nvcc_would_split_a_path_is_told_before_it_runs(sources, monkeypatch):
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: sources / "nvcc")
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: pytest.fail("it runs"))
    odd, plain = sources / "a,b", extension(sources, ".cu")
    odd.mkdir()
    moved = dataclasses.replace(plain, include=(sources / "include", odd))
    for wanted, out, said in ((plain, odd, "set ELMAN_CACHE to another"), (moved, None, "move it to another")):
        with pytest.raises(KernelError, match=f"^nvcc takes the comma in {odd} for the end of a path: {said} folder$"):
            build.build(wanted, "sm_90", out)


def test_cuda_code_is_cross_built_without_a_gpu(sources):
    need_nvcc()
    made = {build.build(extension(sources, ".cu"), arch, sources / "out") for arch in ("sm_80", "sm_90")}
    assert {p.name.split("-")[1] for p in made} == {"sm_80", "sm_90"}
    flags = [json.loads(p.with_suffix(".json").read_text())["command"] for p in made]
    assert {f for command in flags for f in command if "gencode" in f} == {
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
    }


def test_many_are_compiled_at_once_and_the_first_error_is_told(project):
    arch = toolchain.host_architecture()
    right = [dataclasses.replace(extension(project), name=f"answering_{i}") for i in range(3)]
    paths = build.build_all([(e, arch) for e in right])
    assert [p.name for p in paths] == [e.file_name(arch) for e in right]
    gone = dataclasses.replace(right[0], binding=project / "nowhere.cpp")
    with pytest.raises(KernelError, match=r"nowhere\.cpp"):
        build.build_all([(right[0], arch), (gone, arch)])


def test_ctrl_c_compiles_nothing_more(project):
    compiler = counting_compiler(project, before="exec sleep 60")
    many = "build.build_all([(build.replace(extension, name=f'answering_{i}'), 'x86_64') for i in range(200)])"
    building = subprocess.Popen(
        [sys.executable, "-c", ASK.replace("print(build.load(extension).answer())", many), str(project)],
        env={**os.environ, "CXX": str(compiler)}, stderr=subprocess.PIPE, start_new_session=True, text=True,
    )  # fmt: skip
    wait_for((project / "runs").exists, 60)
    time.sleep(0.5)
    os.killpg(building.pid, signal.SIGINT)  # as a terminal does
    try:
        assert "KeyboardInterrupt" in building.communicate(timeout=30)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(building.pid, signal.SIGKILL)
    assert (project / "runs").read_text().count("run") <= (os.cpu_count() or 1)
    assert not list((project / "cache").glob("*.failed"))


def test_a_module_that_fails_is_compiled_once_however_many_ask_at_once(project, monkeypatch):
    monkeypatch.setenv("CXX", str(counting_compiler(project)))
    (project / "include" / "answers" / "inner.h").write_text("#define ANSWER undeclared_name\n")
    with pytest.raises(KernelError, match="undeclared_name"):
        build.build_all([(extension(project), toolchain.host_architecture())] * 2)
    assert (project / "runs").read_text().count("run") == 1


def test_who_waits_for_a_module_that_fails_does_not_compile_it_again_and_who_comes_later_does(project):
    compiler = counting_compiler(project, before=f"while [ -e {project}/wait ]; do sleep 0.05; done")
    header = project / "include" / "answers" / "inner.h"
    header.write_text("#define ANSWER undeclared_name\n")
    waits = project / "wait"
    waits.touch()
    asking = [start(project, f"open({str(project / str(i))!r}, 'w')\n", CXX=str(compiler)) for i in range(4)]
    wait_for(lambda: (project / "runs").exists() and all((project / str(i)).exists() for i in range(4)))
    time.sleep(1)  # all of them wait now
    waits.unlink()
    for process in asking:
        assert "undeclared_name" in process.communicate(timeout=120)[1]
        assert process.returncode == 1
    assert (project / "runs").read_text().count("run") == 1
    assert "undeclared_name" in start(project, CXX=str(compiler)).communicate(timeout=120)[1]
    assert (project / "runs").read_text().count("run") == 2


@pytest.mark.parametrize("compiles", [True, False])  # a stamp has such a lock too
def test_who_waits_says_for_whom(compiles, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(build, "said_when_slow", partial(build.said_when_slow, seconds=0.05))
    if compiles:
        (tmp_path / ".building-answering-x86_64-4711_ab").mkdir()
    held = open(tmp_path / ".answering-x86_64.lock", "w")  # noqa: SIM115 (closed by the timer)
    fcntl.flock(held, fcntl.LOCK_EX)
    threading.Timer(0.3, held.close).start()
    with caplog.at_level(logging.WARNING, logger="elman_core"), build.locked(tmp_path, "answering-x86_64"):
        pass
    other = f"process 4711, which compiles answering-x86_64 into {tmp_path}"
    waited = other if compiles else f"the process that has locked {tmp_path}/.answering-x86_64.lock"
    assert caplog.messages == [f"elman: still waiting for {waited}"]


def test_auto_warns_once_says_why_and_goes_on(monkeypatch, caplog):
    monkeypatch.delenv("ELMAN_KERNELS", raising=False)
    monkeypatch.setattr(runtime, "_warned", set())
    load = Mock(side_effect=KernelError("no CUDA compiler: type `pip install nvidia-cuda-nvcc`"))
    with caplog.at_level(logging.WARNING, logger="elman_core"):
        assert runtime.load_or_warn("thing", load) is None
        assert runtime.load_or_warn("thing", load) is None
    [record] = caplog.records
    assert "NO KERNEL for thing" in record.getMessage()
    assert "pip install nvidia-cuda-nvcc" in record.getMessage()


def test_require_raises_and_off_does_not_even_try(monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    with pytest.raises(KernelError, match="broken"):
        runtime.load_or_warn("thing", Mock(side_effect=KernelError("broken")))
    monkeypatch.setenv("ELMAN_KERNELS", "off")
    assert runtime.load_or_warn("thing", lambda: pytest.fail("off must not load")) is None
    monkeypatch.setenv("ELMAN_KERNELS", "maybe")
    with pytest.raises(ConfigError, match="auto, off or require"):
        runtime.mode()


def test_the_launcher_serves_a_torch_that_lends_no_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    """By the methods that Python sees: the same results, the same refusals."""
    need_host_compiler()
    program = """
import torch
from elman_e42.op import e42
from elman_core.kernels.dense import native
torch.manual_seed(0)
u, w, h0 = torch.randn(5, 2, 4, requires_grad=True), torch.nn.Parameter(torch.randn(4, 4)), torch.zeros(2, 4)
y, last = e42(u, w, h0, torch.arange(10).view(5, 2) > 2, backend="host")
print(y.tolist(), torch.autograd.grad(y.sum() + last.sum(), [u, w])[1].tolist())
for wrong in ({"w": w.detach().half()}, {"w": w[:3]}, {"u": u[:1].expand(2**31, 2, 4)}, {"w": 3}):
    try:
        native._cpu_module(e42.cell, 'host', torch.float32).run("forward", **({"u": u, "w": w} | wrong))
    except Exception as error:
        print(error)
"""
    without = f"import torch; del torch.Tensor.__dlpack_c_exchange_api__\n{program}"
    other = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, check=True)
    exec(program, {})
    said = capsys.readouterr().out
    assert said == other.stdout
    assert "w has the wrong dtype, torch.float16" in said
    assert "w must be a tensor, not 3" in said
    assert "u is (2147483648, 2, 4): a kernel takes sizes below 2^31" in said


def test_a_model_is_built_as_it_will_be_launched(capsys: pytest.CaptureFixture[str]) -> None:
    others = [f"{name}@128x1" for name in ("e2", "e23", "lstm", "m2rnn", "transformer") if name in list_variants()]
    has = {  # options that are on, V that is not N, the shared weights and the step of decoding, heads of any number
        "e88:conv_h5v256@64x1": {"e88_matrix_cuda_bfloat16_64x256_11_0_3_0_21", "causal_conv_cuda_bfloat16_4"},
        "e42@192x1": {"e42_tied_silu_dense_cuda_cluster_bfloat16_192", "e42_step_decode_bfloat16"},
        "e61@64x1": {"e61_elementwise_cuda_bfloat16"},
    }
    for model, wanted in (has | {model: set() for model in others}).items():
        assert main(["build", model, "--arch", "sm_90", "--dry-run", "--json"]) == 0
        found = {each["module"] for each in json.loads(capsys.readouterr().out)}
        assert found >= wanted | {"elman_launch"}
