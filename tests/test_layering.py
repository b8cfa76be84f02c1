"""Who may import whom, and what may stand where: read from the syntax trees, so that nothing has to be installed or run."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "elman_core"

# A package may import those named, itself, and what needs no torch at all: `registry`.
MAY_IMPORT = {
    "registry": set(),
    "kernels": {"registry"},
    "nn": {"registry", "kernels"},  # linear maps of few rows
    "model": {"registry", "kernels", "nn"},
    "data": {"registry", "kernels", "nn", "model"},
    "generation": {"registry", "kernels", "nn", "model"},
    "training": {"registry", "kernels", "nn", "model", "data", "generation"},
}
MAY_IMPORT["cli"] = {*MAY_IMPORT}

# Whoever may import a library or a module of the standard library that others may not, and why.
ONLY = {
    "transformers": ("elman_core/model/", "extensions/data/elman_data/encode.py"),
    "pluggy": ("elman_core/registry/",),
    "pytest": ("extensions/authors/elman_authors/testing/",),
    "typer": (
        "elman_core/cli/",
        "extensions/authors/elman_authors/cli/",
        "extensions/bench/elman_bench/cli/",
        "extensions/data/elman_data/cli/",
        "extensions/evals/elman_evals/command.py",
        "extensions/serve/elman_serve/cli/",
        "extensions/tasks/elman_tasks/cli/",
    ),
    "matplotlib": ("extensions/bench/elman_bench/results/plots.py",),  # slow to import
    "jinja2": ("extensions/bench/elman_bench/results/report.py",),
    "ray": ("extensions/ray/",),
    "subprocess": (
        "elman_core/kernels/build.py",  # compilers
        "elman_core/training/run/facts.py",  # the commit of the code, for the manifest
        "extensions/authors/elman_authors/checks.py",  # pip, and a plugin's own tests
        "extensions/bench/elman_bench/jobs/local.py",  # jobs
        "extensions/bench/elman_bench/jobs/child.py",  # the command of a job
        "extensions/bench/elman_bench/probe.py",  # a measurement may run out of memory: each has its own process
    ),
}
PRINTS = (
    "elman_core/cli/", "extensions/authors/elman_authors/cli/", "extensions/bench/elman_bench/cli/",
    "extensions/data/elman_data/cli/", "extensions/serve/elman_serve/cli/", "extensions/tasks/elman_tasks/cli/",
)  # fmt: skip
PLUGIN_MAY_IMPORT = {"elman_core", "elman_core.kernels", "elman_core.nn", "elman_core.registry", "elman_csrc"}
EXTENSION_MAY_IMPORT = {"elman_core", "elman_core.extension"}  # and other extensions that it declares


def sources(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    """(path in the repository, syntax tree) of every module below `folder` that is not a test."""
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if "/tests/" not in name:
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def module_of(node: ast.ImportFrom, package: list[str]) -> str:
    """The full name of the module in `from MODULE import ...`, written in a package."""
    base = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def imports(name: str, tree: ast.Module) -> Iterator[str]:
    """Full names of the modules that a module imports; relative ones are resolved."""
    package = name.removesuffix(".py").removesuffix("/__init__").split("/")
    if not name.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = module_of(node, package)
            yield module
            if module in ("elman_core", ""):
                yield from (f"elman_core.{a.name}" for a in node.names if (CORE / a.name).is_dir())


def is_below(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


CORE_SOURCES = list(sources(CORE))
PLUGINS, EXTENSIONS = (sorted(f.parent for f in (ROOT / d).glob("*/pyproject.toml")) for d in ("plugins", "extensions"))
EXTENSION_SOURCES = [source for folder in EXTENSIONS for source in sources(folder)]


@pytest.mark.parametrize(("name", "tree"), CORE_SOURCES, ids=[n for n, _ in CORE_SOURCES])
def test_the_core_imports_downwards_only(name: str, tree: ast.Module) -> None:
    package = name.split("/")[1] if name.count("/") > 1 else ""
    assert not package or package in MAY_IMPORT, f"elman_core/{package} has no place in the order of imports"
    for module in imports(name, tree):
        target = module.split(".")[1] if module.startswith("elman_core.") else ""
        if target in MAY_IMPORT and package and target != package:
            assert target in MAY_IMPORT[package], f"{name} imports {module}: {package} is below {target}"


def test_some_libraries_have_one_place() -> None:
    for name, tree in (*CORE_SOURCES, *EXTENSION_SOURCES):
        for module in imports(name, tree):
            for library, owners in ONLY.items():
                assert not is_below(module, library) or name.startswith(owners), (
                    f"{name} imports {library}; only {owners} may"
                )


@pytest.mark.parametrize("folder", EXTENSIONS, ids=lambda p: p.name)
def test_extensions_import_public_names_and_extensions_that_they_declare(folder: Path) -> None:
    needs = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    may = {re.split("[^a-z-]", line)[0].replace("-", "_") for line in needs} - {"elman_core"}
    for name, tree in sources(folder):
        for module in imports(name.removeprefix(f"extensions/{folder.name}/"), tree):
            first = module.split(".")[0]
            if first.startswith("elman_") and first != f"elman_{folder.name}":
                assert first in may or module in EXTENSION_MAY_IMPORT, f"{name} imports {module}"


@pytest.mark.parametrize("folder", [*PLUGINS, ROOT / "baselines", ROOT / "csrc_common"], ids=lambda p: p.name)
def test_plugins_import_public_names_only(folder: Path) -> None:
    own = {p.name for p in folder.iterdir() if (p / "__init__.py").is_file()}
    assert own
    for name, tree in sources(folder):
        for module in imports("/".join(name.split("/")[len(folder.relative_to(ROOT).parts) :]), tree):
            first = module.split(".")[0]
            if first in own or not (first.startswith("elman_") or first == "transformers"):
                continue
            allowed = ", ".join(sorted(PLUGIN_MAY_IMPORT))
            assert module in PLUGIN_MAY_IMPORT, f"{name} imports {module}; a plugin may import {allowed}"


def graph_of(folders: Iterable[Path]) -> dict[str, set[str]]:
    """For every module in packages, or lying apart in a folder, the modules of the same tree that it imports anywhere.

    Imports in functions and for type checkers count; that a module needs the packages that it lies in does not.
    """
    files: dict[str, Path] = {}
    for folder in folders:
        root = folder.parent if (folder / "__init__.py").is_file() else folder
        for path in folder.rglob("*.py") if root != folder else folder.glob("*.py"):
            files[".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = path
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        found = graph.setdefault(name, set())
        above = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names} & files.keys()
            elif isinstance(node, ast.ImportFrom):
                module = module_of(node, above)
                for full in (f"{module}.{alias.name}" for alias in node.names):
                    found |= {full if full in files else module} & files.keys()
        found.discard(name)
    return graph


def circle(graph: dict[str, set[str]]) -> str:
    """One circle of imports, in words; an empty string if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " imports ".join(reversed(error.args[1]))
    return ""


def test_the_tree_has_no_circle_of_imports() -> None:
    packages = [
        p.parent
        for d in (ROOT, *PLUGINS, *EXTENSIONS, ROOT / "baselines", ROOT / "csrc_common")
        for p in d.glob("*/__init__.py")
    ]
    assert len(packages) >= len(PLUGINS) + 3
    graph = graph_of([*packages, ROOT / "benchmarks", ROOT / "tests"])
    graph["elman_core"] = {"elman_core._auto"}  # the names it offers are imported when somebody asks for them
    assert graph["elman_core.nn.linear"] >= {"elman_core.kernels.decode.op", "elman_core.nn.joined"}
    assert not circle(graph)


@cache
def texts_of(tree: ast.Module) -> list[tuple[int, str]]:
    """The strings of a module, docstrings aside, and what it imports, each with its line."""
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    texts = [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]
    texts += [
        (node.lineno, name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (getattr(node, "module", None) or "", *(a.name for a in node.names))
    ]
    return texts


def named(tree: ast.Module, plugin: str) -> list[str]:
    """Where a module's code names a plugin: its module, its distribution, or a model of its variant; docstrings aside.

    Many a variant's name is also a word, such as "diagonal". Alone it counts only if it has a digit.
    """
    alone = "(?![0-9])" if re.search("[0-9]", plugin) else "@"
    pattern = re.compile(rf"(?i)elman[-_]{plugin}(?!\w)|(?<![\w.]){plugin}{alone}")
    return [f"line {line}: {text!r}" for line, text in texts_of(tree) if pattern.search(text)]


@pytest.mark.parametrize("plugin", [p.name for p in (*PLUGINS, *EXTENSIONS)])
def test_the_core_names_no_plugin_and_no_extension(plugin: str) -> None:
    assert {name: found for name, tree in CORE_SOURCES if (found := named(tree, plugin))} == {}


def test_only_the_command_line_prints_and_no_name_controls_the_terminal() -> None:
    for name, tree in (*CORE_SOURCES, *EXTENSION_SOURCES):
        taken = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "typer.echo"):
                assert name.startswith(PRINTS), f"{name}:{node.lineno} prints"
                escapes = "print" in taken and ast.unparse(node.func) == "print"
                assert escapes or name.endswith("cli/__init__.py"), (
                    f"{name}:{node.lineno}: import print of cli/_text.py"
                )


def test_tracked_files_name_no_place_on_a_machine() -> None:
    """No home directory, no temporary folder, no host but public ones of documentation: all of it works anywhere."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    places = re.compile(
        "|".join([r"/ro" + r"ot/", r"/ho" + r"me/\w", r"/wo" + r"rk/\w", r"/opt/py" + r"pi", r"/Use" + r"rs/\w"])
    )
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path.stat().st_size < 1_000_000:
            hit = places.search(path.read_text(encoding="utf-8", errors="replace"))
            assert not hit, f"{name} names {hit.group()}"


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_core_is_cheap() -> None:
    heavy = python(
        "import elman_core, sys; print([m for m in ('torch', 'transformers', 'numpy', 'pluggy') if m in sys.modules])"
    )
    assert heavy.strip() == "[]"


HELP = """
import contextlib, io, sys
from elman_core.cli import build_app, main
import typer
names = sorted(typer.main.get_command(build_app()).list_commands(None))
for name in [None, *names]:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert main([*([name] if name else []), "--help"]) == 0, name
    assert "Usage:" in text.getvalue(), name
    heavy = [m for m in ("torch", "transformers", "numpy", "rich.progress") if m in sys.modules]
    assert not heavy, f"elman {name or ''} --help imports {heavy}"
print(" ".join(names))
"""


def test_help_of_every_command_imports_nothing_heavy() -> None:
    names = python(HELP).split()
    assert {"list", "show", "size", "bench"} <= set(names)
