"""The static checks of `elman check`: what the folder of a plugin or an extension, and its wheel, must hold."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from elman_core import __version__
from elman_core.extension import ConfigError, is_missing, one_line

# Of the package of each variant; and op.py, if the mixer imports it.
INNER = ("__init__.py", "mixer.py", "reference.py")
FORBIDDEN = ("transformers", "pluggy")
PUBLIC: tuple[str, ...] = ("elman_core", "elman_core.kernels", "elman_core.nn", "elman_core.registry")
FOR_EXTENSIONS: tuple[str, ...] = ("elman_core", "elman_core.extension")


class Plugin:
    """The folder of a plugin, or of an extension, which has entry points in groups `elman.NAME` only."""

    def __init__(self, folder: Path) -> None:
        file = folder / "pyproject.toml"
        if not file.is_file():
            raise ConfigError(f"{folder} is not a plugin: it has no pyproject.toml; `elman new NAME` writes one")
        try:
            self.settings = tomllib.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: {error}") from error
        self.folder = folder.resolve()
        try:
            self.project: dict[str, Any] = self.settings["project"]
            points = self.project["entry-points"]
            groups = [entries for group, entries in points.items() if group.startswith("elman.")]
            self.extends = "elman" not in points and bool(groups)
            if self.extends:
                (self.package,) = {re.split("[.:]", value.strip())[0] for group in groups for value in group.values()}
                self.name = self.package.removeprefix("elman_")
            else:
                ((self.name, package),) = points["elman"].items()
                self.package = package.strip()
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            wanted = '[project.entry-points.elman] with NAME = "elman_NAME"'
            raise ConfigError(f"{file} needs one entry point: {wanted}") from error
        try:
            self.needs = [Requirement(line) for line in self.project.get("dependencies", [])]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{file}: dependencies must be a list of requirements: {one_line(error)}") from error

    def checks(self) -> Iterator[tuple[str, str]]:
        """(what, what is wrong or an empty string) for every check."""
        yield "has the files of every plugin", self._files()
        yield "one name everywhere", self._names()
        yield "the range of the core is stated", self._core()
        yield "imports public names only", self._imports()
        yield "the wheel holds all sources", self._wheel()

    def untested(self, variants: Sequence[str]) -> str:
        """What is wrong if no contract of the plugin's tests names one of its variants: another's tests pass, too."""
        tests = "".join(path.read_text(encoding="utf-8") for path in sorted((self.folder / "tests").rglob("*.py")))
        named = re.findall(r"[\"'](\w+)[\"']", tests) if "VariantContract" in tests else []
        wanted = [f'a VariantContract with variant = "{name}"' for name in variants if name not in named]
        return f"its tests need {', '.join(wanted)}" if wanted else ""

    def _files(self) -> str:
        """In a package of several variants each sub-package with a mixer needs the files of a variant."""
        package = self.folder / self.package
        variants = [m.parent for m in sorted(package.glob("*/mixer.py"))]
        if not variants or (package / "mixer.py").exists():
            variants = [package]
        wanted = [self.folder / "README.md", self.folder / "tests", package / "__init__.py"]
        wanted += [v / name for v in variants for name in INNER if not self.extends]
        takes_op = re.compile(rb"from \.(op import| import .*\bop\b)")
        wanted += [v / "op.py" for v in variants if (m := v / "mixer.py").exists() and takes_op.search(m.read_bytes())]
        missing = [p.relative_to(self.folder).as_posix() for p in dict.fromkeys(wanted) if not p.exists()]
        return f"missing: {', '.join(missing)}" if missing else ""

    def _names(self) -> str:
        wanted = (f"elman-{self.name}", f"elman_{self.name}")
        actual = (self.project.get("name"), self.package)
        if actual == wanted:
            return ""
        return f"distribution and package are {actual}, by the entry point they should be {wanted}"

    def _core(self) -> str:
        for wanted in self.needs:
            if canonicalize_name(wanted.name) == "elman-core":
                if not any(s.operator in ("<", "<=", "==", "~=") for s in wanted.specifier):
                    return f"'{wanted}' has no upper end: a later core may differ"
                fits = wanted.specifier.contains(__version__, prereleases=True)
                return "" if fits else f"'{wanted}' excludes {__version__}"
        return "dependencies do not name elman-core"

    def _imports(self) -> str:
        """A plugin imports no other plugin; an extension may import others that it declares."""
        kind, public, others = "a plugin", PUBLIC, ["elman_csrc"]
        if self.extends:
            kind, public = "an extension", FOR_EXTENSIONS
            others = [canonicalize_name(wanted.name).replace("-", "_") for wanted in self.needs]
        for path in sorted((self.folder / self.package).rglob("*.py")):
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError) as error:  # ValueError: null bytes
                return f"{path.relative_to(self.folder)} is not Python: {one_line(error)}"
            for module in _modules(tree):
                first = module.partition(".")[0]
                other = first.startswith("elman_") and first not in ("elman_core", self.package, *others)
                inside = first == "elman_core" and module not in public
                if other or inside or (first in FORBIDDEN and not self.extends):
                    return f"{path.relative_to(self.folder)} imports {module}; {kind} may import {', '.join(public)}"
            for module, name in _private(tree, public):
                return f"{path.relative_to(self.folder)} takes {name} from {module}, where it is not public"
        return ""

    def _wheel(self) -> str:
        """Builds the wheel: hatchling omits what .gitignore matches, so a kernel might be published without its sources."""
        command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
        if importlib.util.find_spec("hatchling") is not None:
            command += ["--no-build-isolation"]  # no network needed
        with tempfile.TemporaryDirectory() as out:
            done = _said([*command, "-w", out, str(self.folder)])
            if done.returncode:
                return " ".join(done.stderr.split())[-300:] or "pip could not build it"
            (wheel,) = Path(out).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                held = set(archive.namelist())
        files = (self.folder / self.package).rglob("*")
        wanted = {p.relative_to(self.folder).as_posix() for p in files if p.is_file() and "__pycache__" not in p.parts}
        missing = sorted(wanted - held)
        return f"missing in {wheel.name}: {', '.join(missing)}" if missing else ""


def _said(command: list[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)


def _modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


def _private(tree: ast.Module, modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names that are taken from a public module of the core and are not public."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module and node.module in modules:
            public = importlib.import_module(node.module).__all__
            yield from ((node.module, alias.name) for alias in node.names if alias.name not in (*public, "*"))


def kernel_checks(specs: Sequence[Any]) -> Iterator[tuple[str, str | None]]:
    """(what, what is wrong or "", None if not checked) of what a GPU would run, as far as this machine can tell."""
    from elman_authors import grids
    from elman_core.extension import (
        KernelError,
        build_kernel,
        check_inputs,
        failures,
        find_host_compiler,
        find_nvcc,
        verify_kernel,
    )

    def error_of(call: Callable[[], Any]) -> str:
        try:
            call()
        except KernelError as error:
            return str(error)
        return ""

    def emulate(spec: Any) -> None:
        report = grids.verify(spec, "emulated", opcheck=False)
        if not report.passed:
            wrong = next(iter(failures(report)))
            if "host" in spec.targets:
                on_cpu = verify_kernel(spec, "host", grids.cases(spec, "host")[:3], opcheck=False)
                header = spec.extension("cuda").header
                if on_cpu.passed:
                    wrong += f"; its build for the CPU is right, so look at {_for_gpus_alone(header)}"
                else:
                    wrong += f"; its build for the CPU: {next(iter(failures(on_cpu)))}{_denied(header)}"
            raise KernelError(wrong)

    no_host, no_nvcc = error_of(find_host_compiler), error_of(find_nvcc)
    for spec in specs:
        if "cuda" in spec.targets:
            finite = partial(check_inputs, spec, grids.cases(spec, "cuda"))
            yield f"{spec.name} is finite on the inputs of a GPU's grid", error_of(finite)
        if why := no_host or ("" if spec.emulated else "its KernelSpec has no cases for one"):
            yield f"{spec.name} on an emulated GPU: not checked: {why}", None
        else:
            yield f"{spec.name} on an emulated GPU", error_of(partial(emulate, spec))
        if why := no_nvcc or no_host:
            yield f"{spec.name} for a GPU: not compiled: {why}", None
        elif "cuda" in spec.targets:
            yield f"{spec.name} compiles for sm_90", error_of(partial(build_kernel, spec.extension("cuda"), "sm_90"))


def _for_gpus_alone(header: Path) -> str:
    """Return the place in a cell header that its build for a CPU does not read, or not wholly."""
    lines = header.read_text(encoding="utf-8").splitlines()
    for word in ("__CUDA_ARCH__", "backward_uses_r =", "scalar_keep =", "delta ="):
        if number := next((i for i, line in enumerate(lines, 1) if word in line), None):
            return f"{word.removesuffix(' =')} in line {number} of {header.name}"
    return f"what only a GPU reads in {header.name}"


def _denied(header: Path) -> str:
    """Return what a cell header says that its own backward seems to contradict."""
    for cell in re.split(r"\bstruct\b", header.read_text(encoding="utf-8")):
        for flag, used, what in (
            ("backward_uses_r = false", r"line_backward\([^)]* (\w+)\).*\b\1\.r\b", "line_backward reads r"),
            ("uses_prev = false", r"\bbackward\(T \w*, T \w*, T \w*, T \w+", "backward takes h_prev by name"),
        ):
            if flag in cell and re.search(used, cell, re.DOTALL):
                return f"; {header.name} says {flag}, and {what}: one of the two is wrong"
    return ""


def tests_of(folder: Path) -> tuple[int, str]:
    """Run the plugin's own tests: (exit code of pytest, its last line or what to install)."""
    if is_missing("pytest"):
        return 1, "pytest is not installed: pip install pytest"
    marks = "markers=gpu: needs an NVIDIA GPU"  # of the contract
    flags = ("-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-o", marks)
    command = [sys.executable, "-m", "pytest", *flags, "tests"]
    done = _said(command, folder)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in done.stdout.strip().splitlines() or [done.stderr.strip()]]
    if done.returncode:
        kinds = ("FAILED", "ERROR"), "E ", "INTERNALERROR>"  # the last line of an error in pytest itself says why
        failed, why, inside = ([line for line in lines if line.startswith(kind)] for kind in kinds)
        # Each reason and each test once: pytest leaves reasons out of long lines, unless it runs in CI.
        once = {line.partition(" - ")[2] or line: line for line in reversed(failed)}.values()
        failed = list({re.split(r"\[| - ", line)[0]: line for line in once}.values())[::-1]
        numbers = r"\b[A-Za-z]=\d.*?(: |\)|$)|-?\d[\d.e+-]*"
        why = [line for line in reversed(why) if re.match(r"E +[\w.]+: ", line)] or why[::-1]
        why = list({re.sub(numbers, "", line).lstrip("E "): line for line in why}.values())[::-1]
        lines = [*failed[:8], *why[:8], *inside[-1:], lines[-1]]
    return done.returncode, "\n".join(lines if done.returncode else lines[-1:])
