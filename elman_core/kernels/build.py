"""Compile a binding and a cell header once, into a shared library or a Python module, and find it again.

A kernel is delivered as source. The compiled module goes into a cache, as `NAME-ARCH-KEY.so` with `NAME-ARCH-KEY.json` beside
it. The key covers the sources, every header they include, the architecture, the flags, and Python's ABI for a Python module.
It does not cover the compiler, which the JSON records: so a cache filled elsewhere serves a machine without a compiler. The
JSON has the module's SHA-256, which is compared before the module is loaded: a damaged module is built again.

Several processes may ask at once: one compiles under a file lock; the others wait and load its module. A module is written
under another name and then renamed, so a file with the final name is always complete.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from filelock import FileLock, Timeout

from elman_core.registry.checks import said_when_slow
from elman_core.registry.errors import CheckpointError, KernelError, StorageError
from elman_core.registry.installing import how_to_install
from elman_core.storage import read_bytes, read_json, write_json, write_text

from . import toolchain

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>|(ELMAN_CELL_HEADER)\b)', re.MULTILINE)
_COMMON_FLAGS = ("-std=c++17", "-DNDEBUG", "-shared")
_HOST_FLAGS = (*_COMMON_FLAGS, "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
# Sums keep their order, and NaN stays NaN. Only errno and the flags of exceptions are left out, which nothing reads.
_CPU_FLAGS = (
    *_COMMON_FLAGS, "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast",
)  # fmt: skip
_CUDA_FLAGS = (*_COMMON_FLAGS, "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", "--expt-relaxed-constexpr", "-lineinfo")
# -Og: the quickest for compiling and running together. Misaligned addresses are reported to emulated/alignment.h of elman_csrc.
_EMULATED_FLAGS = (
    *_COMMON_FLAGS, "-xc++", "-Og", "-fPIC", "-fvisibility=hidden", "-Wno-unknown-pragmas", "-D__CUDA_ARCH__=900",
    "-D__CUDA_ARCH_LIST__=900", "-fsanitize=alignment", "-fno-sanitize-recover=alignment",
)  # fmt: skip
_BUILDING = ".building-"
Target = Literal["host", "cuda", "cpu"]
_failed: dict[Path, KernelError] = {}
log = logging.getLogger("elman_core")


@dataclass(frozen=True)
class Extension:
    """One extension module, as source.

    Attributes:
        name: of the module, an identifier: "e99_dense".
        binding: the translation unit. nvcc compiles a `.cu`, the C++ compiler a `.cpp`.
        include: folders of headers that belong to the sources (they are part of the key).
        header: a header that the binding includes as `#include ELMAN_CELL_HEADER`.
        defines: further macros.
        declared: what Python says of the cell in the header, compared when the module is opened: ((name, value), …).
        python: whether it is a Python module: `PYBIND11_MODULE(ELMAN_MODULE, m)`, compiled for this Python's ABI and opened by
            `load`. Otherwise it is a plain shared library, which serves every Python and is opened by the launcher (launch.py).
        cpu: whether it is optimised for the instructions of this machine's processor; else it is for tests.
        emulated: whether the C++ compiler compiles a `.cu` for an emulated GPU; see `emulated`.
    """

    name: str
    binding: Path
    include: tuple[Path, ...] = ()
    header: Path | None = None
    defines: tuple[tuple[str, str], ...] = ()
    python: bool = True
    cpu: bool = False
    emulated: bool = False
    declared: tuple[tuple[str, int], ...] = ()

    @property
    def is_cuda(self) -> bool:
        return self.binding.suffix == ".cu" and not self.emulated

    def sources(self) -> list[Path]:
        """The binding and every header that it includes from this extension's folders, directly or not, in a fixed order.
        Raises `KernelError`: a file is missing."""
        found: list[Path] = []
        waiting = [self.binding]
        while waiting:
            path = waiting.pop(0)
            if path in found:
                continue
            try:
                text = path.read_bytes()
            except OSError as error:
                raise KernelError(f"kernel {self.name}: cannot read its source {path}: {error.strerror}") from error
            found.append(path)
            for quoted, angled, cell in _INCLUDE.findall(text):
                if cell and self.header is not None:
                    waiting.append(self.header.resolve())
                    continue
                folders = (path.parent, *self.include) if quoted else self.include
                wanted = (quoted or angled).decode()
                waiting += [(f / wanted).resolve() for f in folders if (f / wanted).is_file()][:1]
        return found

    def flags(self, arch: str) -> list[str]:
        """The flags that determine the compiled code, without paths."""
        flags = [*(_EMULATED_FLAGS if self.emulated else _HOST_FLAGS)]
        comma = ","
        if self.is_cuda:
            features = _feature_set(arch)
            comma = r"\,"  # of a list, to nvcc
            flags = [*_CUDA_FLAGS, f"-gencode=arch=compute_{features},code=sm_{features}"]
        elif self.cpu:
            flags = [*_CPU_FLAGS, *([f"-march={arch}"] if arch.startswith("x86-64") else [])]
        elif not self.emulated:  # a kernel of the host runs for less time than it is compiled, the launcher for longer
            flags.append("-O1" if self.python else "-O0")
        flags += [f"-D{name}={value.replace(',', comma)}" for name, value in self.defines]
        return [*flags, f"-DELMAN_MODULE={self.name}"] if self.python else flags

    def key(self, arch: str) -> str:
        """A hash of everything that determines the module, except the compiler."""
        digest = hashlib.sha256()
        for part in (arch, toolchain.python_abi() if self.python else "", *self.flags(arch)):
            digest.update(part.encode() + b"\0")
        for path in self.sources():
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()[:20]

    def file_name(self, arch: str) -> str:
        return f"{self.name}-{arch}-{self.key(arch)}.so"


def shipped(
    name: str,
    binding: str | Path,
    header: Path | None = None,
    python: bool = False,
    cpu: bool = False,
    declared: Mapping[str, int] = MappingProxyType({}),
    **defines: Any,
) -> Extension:
    """A binding that `elman_csrc` ships, or a plugin's own, given as a path, with the headers of `elman_csrc`.

    `defines`: its macros, without ELMAN_ in front; a dtype becomes its number in elman/dtype.h. `declared`: of the cell.

    Raises:
        KernelError: the sources are not installed, or there is no kernel of a CPU in this dtype.
    """
    if not targets():
        raise KernelError(f"the kernel sources are not installed: {how_to_install('elman-csrc')}")
    import elman_csrc

    from .runtime import CPU_DTYPES, DTYPE_CODES

    if cpu and defines["DTYPE"] not in CPU_DTYPES:
        raise KernelError(f"{name}: kernels of a CPU store float32 and bfloat16, not {defines['DTYPE']}")
    return Extension(
        name=name,
        binding=elman_csrc.get_bindings() / binding,
        include=(elman_csrc.get_include(),),
        header=header,
        defines=tuple((f"ELMAN_{macro}", str(DTYPE_CODES.get(value, value))) for macro, value in defines.items()),
        python=python,
        cpu=cpu,
        declared=tuple(declared.items()),
    )


def for_target(name: str, binding: str, target: Target, *words: Any, **how: Any) -> Extension:
    """As `shipped`, of a binding with a file for each target: NAME_TARGET, then the dtype, if there is one, and the words."""
    dtypes = [str(how["DTYPE"]).removeprefix("torch.")] if "DTYPE" in how else []
    title = "_".join(map(str, (name, target, *dtypes, *words)))
    return shipped(title, f"{binding}_{target}.{'cu' if target == 'cuda' else 'cpp'}", cpu=target == "cpu", **how)


def emulated(extension: Extension) -> Extension:
    """A CUDA extension as the C++ compiler builds it with headers that stand for a GPU: every thread is a fiber."""
    import elman_csrc

    includes = (elman_csrc.get_emulated(), *extension.include, extension.binding.parent)
    return replace(extension, name=f"{extension.name}_emulated", include=includes, emulated=True)


def targets() -> tuple[Target, ...]:
    """The targets for which the skeletons of `elman_csrc` can be compiled; none if it is not installed."""
    return () if importlib.util.find_spec("elman_csrc") is None else ("host", "cuda", "cpu")


def cache_dirs() -> list[Path]:
    """The folders searched, in order: those of ELMAN_CACHE, or ~/.cache/elman. New modules go to the first writable one."""
    asked = [p for p in os.environ.get("ELMAN_CACHE", "").split(os.pathsep) if p]
    folders = asked or [os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "elman")]
    try:  # absolute: a module is not looked for on the loader's path, nor elsewhere after a chdir
        return [Path(folder).expanduser().absolute() for folder in folders]
    except RuntimeError as error:
        raise KernelError(f"there is no home folder for {' and '.join(folders)}; set ELMAN_CACHE to another") from error


def local_arch(extension: Extension) -> str:
    """The architecture of this machine: "x86_64" for the host, its level ("x86-64-v3") for a CPU, "sm_90" for the current GPU.
    Raises `KernelError`: a CUDA extension on a machine without a GPU."""
    if not extension.is_cuda and not extension.cpu:
        return toolchain.host_architecture()
    import torch

    if extension.cpu:  # what torch itself uses, so that ATEN_CPU_CAPABILITY lowers both
        levels = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}
        return levels.get(torch.backends.cpu.get_cpu_capability(), toolchain.host_architecture())

    if not torch.cuda.is_available():
        raise KernelError(f"kernel {extension.name}: no GPU here; name one (--arch sm_90), or add --backend cpu")
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def find(extension: Extension, arch: str, folders: Sequence[Path] = ()) -> Path | None:
    """The compiled module, if it is undamaged in one of these folders, by default those of `cache_dirs`."""
    name = extension.file_name(arch)
    return next((folder / name for folder in folders or cache_dirs() if _is_whole(folder / name)), None)


def _is_whole(module: Path) -> bool:
    """Whether a module is there as it was compiled. Records of older versions do not tell."""
    try:
        return module.is_file() and read_json(module.with_suffix(".json")).get("sha256") in (None, _sha256(module))
    except (OSError, CheckpointError):
        return False


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_bytes(path)).hexdigest()


def load(extension: Extension, arch: str | None = None) -> ModuleType:
    """The extension module; compiled first, which needs a compiler, if it is in no cache folder.

    Raises:
        KernelError: there is no compiler, it fails (the message has its first error and the command), no cache is writable, or
            the module does not load.
    """
    return _import(extension.name, build(extension, arch or local_arch(extension)))


def build(extension: Extension, arch: str, out: Path | None = None) -> Path:
    """The path of the compiled module; compiles it if needed.

    Args:
        arch: "sm_80", "sm_90", … for CUDA (no GPU is needed), the processor's name for the host.
        out: the folder to search and to write to, instead of those of `cache_dirs`.

    Raises:
        KernelError: as `load`.
    """
    if there := find(extension, arch, [out] if out else ()):
        return there
    folder = out or writable_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelError(f"cannot write to {folder}: {error.strerror}") from error
    target = folder / extension.file_name(arch)
    failure = target.with_suffix(".failed")
    before = _modified(failure)
    with locked(folder, target.stem):
        if _modified(failure) not in (None, before):  # in another process, while this one waited
            _failed[target] = KernelError(read_bytes(failure).decode())
        if target in _failed:  # not compiled again for every size, thread and rank that needs it
            raise _failed[target]
        if not _is_whole(target):  # another process may have built it while this one waited
            if target.exists():
                log.warning("elman: %s or its record is damaged: it is built again", target)
            try:
                _compile(extension, arch, target)
            except KernelError as error:
                _failed[target] = error
                with contextlib.suppress(StorageError):
                    write_text(failure, str(error))
                raise
            except OSError as error:
                raise KernelError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def _modified(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return None


def beside(work: Callable[[], object], what: str) -> threading.Thread:
    """The thread that compiles something beside what runs; a process that ends before that waits for it, so that it happens
    once."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    atexit.register(awaited, thread, what)
    return thread


def awaited(thread: threading.Thread, what: str) -> None:
    """Wait for a thread of `beside`, and say why."""
    if thread.is_alive():
        log.warning("elman: compiling what %s, once on this machine (Ctrl-C: not now)", what)
        with contextlib.suppress(KeyboardInterrupt):
            thread.join()


def locked(folder: Path, stem: str) -> contextlib.AbstractContextManager[Any]:
    """The lock of what has this name in a cache folder. Raises `KernelError` if it cannot be locked."""

    def other() -> str:
        scratch = next(folder.glob(f"{_BUILDING}{stem}-*"), None)
        if scratch is None:
            return f"the process that has locked {folder}/.{stem}.lock"
        process, _, _ = scratch.name.rpartition("-")[2].partition("_")
        return f"process {process}, which compiles {stem} into {folder}"

    try:
        with said_when_slow(other):
            return FileLock(folder / f".{stem}.lock").acquire()  # the system drops it if this process dies
    except OSError as error:  # as on NFS without its lock service
        raise KernelError(f"{folder} cannot be locked ({error.strerror}); set ELMAN_CACHE to a local disk") from error


def build_all(wanted: Sequence[tuple[Extension, str]], out: Path | None = None) -> list[Path]:
    """`build` for (extension, arch) pairs, with as many compilers at once as there are processors. Raises as `build`, for the
    first pair that fails, after all have ended; at once without Python's headers."""
    for extension, arch in wanted:  # what is wrong or missing is told before anything is compiled
        extension.flags(arch)
        if extension.python and find(extension, arch, [out] if out else ()) is None:
            toolchain.python_include_dirs()
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        waiting = [pool.submit(build, extension, arch, out) for extension, arch in wanted]
        try:
            wait(waiting)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    return [each.result() for each in waiting]


def _compile(extension: Extension, arch: str, target: Path) -> None:
    compiler = toolchain.find_nvcc() if extension.is_cuda else toolchain.find_host_compiler()
    includes = [*extension.include, *(toolchain.python_include_dirs() if extension.python else ())]
    libraries: list[Path] = []
    if extension.is_cuda:
        includes += toolchain.pip_dirs(compiler, "include")
        libraries = toolchain.pip_dirs(compiler, "lib")
        if odd := [str(folder) for folder in (target.parent, *includes) if "," in str(folder)]:
            how = "set ELMAN_CACHE to another folder" if odd[0] == str(target.parent) else "move it to another folder"
            raise KernelError(f"nvcc takes the comma in {odd[0]} for the end of a path: {how}")
    command = [str(compiler), *extension.flags(arch)]
    if extension.header is not None:
        command.append(f'-DELMAN_CELL_HEADER="{extension.header.resolve()}"')
    command += [f"-I{folder}" for folder in includes] + [f"-L{folder}" for folder in libraries]
    command.append(str(extension.binding))
    _remove_leftovers(target)
    mine = f"{_BUILDING}{target.stem}-{os.getpid()}_"  # who waits for this process names it
    with tempfile.TemporaryDirectory(prefix=mine, dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        start = time.monotonic()
        for _ in range(2):
            # A killed one leaves files in TMPDIR.
            done = _run([*command, "-o", str(made)], env={**os.environ, "TMPDIR": scratch})
            if done.returncode == -signal.SIGINT:  # in a thread, as Ctrl-C is for the main one
                raise KeyboardInterrupt
            if done.returncode >= 0 and "signal terminated program" not in done.stderr:
                break  # else the system killed it, for want of memory: that says nothing about the source
        if done.returncode != 0 or not made.is_file():
            again = shlex.join([*command, "-o", f"{extension.name}.so"])
            raise KernelError(
                f"kernel {extension.name} for {arch} does not compile: {_first_error(done)}; to reproduce: {again}"
            )
        record = {
            "name": extension.name,
            "arch": arch,
            "compiler": str(compiler),
            "compiler_version": version(compiler),
            "command": command,
            "seconds": round(time.monotonic() - start, 2),
            "python_abi": toolchain.python_abi() if extension.python else None,
            "sources": {str(p): _sha256(p) for p in extension.sources()},
            "sha256": _sha256(made),
        }
        write_json(target.with_suffix(".json"), record)
        made.replace(target)


def _remove_leftovers(target: Path) -> None:
    """Delete what killed builds left: of each module whose lock nobody has. Nothing where locks exclude nobody, as on some
    NFS: that of `target`, which this process has, can then be taken again."""

    def lock(stem: str) -> FileLock:
        return FileLock(target.parent / f".{stem}.lock", timeout=0)

    with contextlib.suppress(Timeout, OSError), lock(target.stem):
        return
    for left in target.parent.glob(f"{_BUILDING}*-*"):
        with contextlib.suppress(Timeout, OSError), lock(left.name.removeprefix(_BUILDING).rpartition("-")[0]):
            shutil.rmtree(left)


def _first_error(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b|\bfatal\b", line, re.IGNORECASE)]
    return (errors or lines or [f"the compiler left with status {done.returncode} and said nothing"])[0]


def _run(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        variable = "CUDA_HOME" if Path(command[0]).name == "nvcc" else "CXX"
        raise KernelError(f"cannot run {command[0]}: {error.strerror}; set {variable} to another compiler") from error


def version(compiler: Path) -> str:
    said = _run([str(compiler), "--version"])
    lines = [line.strip() for line in said.stdout.splitlines() if line.strip()]
    return next((line for line in lines if "release" in line), (lines or ["unknown"])[0])


@cache
def _import(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    try:
        if spec is None:
            raise ImportError(f"not an extension module: {path}")
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise KernelError(f"kernel {name} does not load: {error}; delete {path} to build it again") from error
    return module


def writable_cache() -> Path:
    folders = cache_dirs()
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise KernelError(f"no cache folder can be written ({', '.join(map(str, folders))}); set ELMAN_CACHE to another")


def _feature_set(arch: str) -> str:
    """From Hopper on, code is built for one architecture only, with the instructions that only it has."""
    match = re.fullmatch(r"sm_(\d{2,3})", arch)
    if match is None or int(match[1]) < 80:
        raise KernelError(f"{arch!r} is not an architecture kernels are built for: sm_80, sm_86, sm_90, sm_100, …")
    return match[1] + ("a" if int(match[1]) >= 90 else "")
