"""Writing plugins: `elman new`, `elman check`."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer
from packaging.utils import canonicalize_name

from elman_authors.checks import Plugin, kernel_checks, tests_of
from elman_authors.scaffold import equations, render
from elman_core.extension import ConfigError, is_missing, packages, plugins, print


def new(
    name: Annotated[str, typer.Argument(help="Name of the variant, in lower case, such as e99.")],
    source: Annotated[str | None, typer.Option("--from", metavar="NAME", help="Copy an installed variant.")] = None,
    skeleton: Annotated[
        Literal["dense", "gates", "elementwise", "matrix", "reference"] | None,
        typer.Option(help="What runs over time, by default dense; the limits of each: docs/how-to/variant.md."),
    ] = None,
    folder: Annotated[Path, typer.Option("--dir", help="Where; in a repository of plugins: plugins/.")] = Path(),
) -> None:
    """Write a plugin that passes its contract, for you to change."""
    if source and skeleton:
        raise ConfigError(f"a copy of {source} has the skeleton of {source}: leave out --skeleton, or --from")
    target, files = render(name, folder, source, skeleton or "dense")
    print(f"{target}")
    for file in files:
        print(f"  {file}")
    whose = f"the equation of {source}" if source else "the equation"
    print(f"\n{whose} is in\n" + "\n".join(f"  {place}" for place in equations(target, files)))
    where = shlex.quote(str(target))
    print(f"\npip install -e {where}{' pytest' if is_missing('pytest') else ''}\nelman check {where}")


def check(
    folder: Annotated[Path, typer.Argument(help="Folder of a plugin or an extension.")] = Path(),
    tests: Annotated[bool, typer.Option(help="Run its kernels on an emulated GPU and its own tests, too.")] = True,
) -> None:
    """Check a plugin or an extension. Files, names, imports and wheel, then kernels on an emulated GPU, and its own tests."""
    plugin = Plugin(folder)
    count = wrong = 0

    def say(what: str, problem: str | None) -> None:
        nonlocal count, wrong
        mark = "-   " if problem is None else "FAIL" if problem else "ok  "
        print(f"  {mark}  {what}" + (f": {problem}" if problem else ""), flush=True)
        count, wrong = count + 1, wrong + bool(problem)

    for what, problem in plugin.checks():
        say(what, problem)
    if tests:
        name, loaded = canonicalize_name(str(plugin.project.get("name"))), plugins()  # e99_b: elman-e99-b
        for broken in loaded.broken:
            if broken.package == name:
                raise ConfigError(f"{broken}; its tests run when it can be imported")
        install = f"pip install -e {shlex.quote(str(folder))}"
        if plugin.package not in packages():
            raise ConfigError(f"{name} is not installed, so its tests cannot run: {install}")
        used = Path(import_module(plugin.package).__file__ or "").parent
        if used.resolve() != (folder / plugin.package).resolve():
            raise ConfigError(
                f"{name} is installed from {used.parent}, and its kernels there would be checked: {install}"
            )
        mine = [entry.variant for entry in loaded.installed.values() if entry.package == name]
        for twice, entries in loaded.conflicts.items():
            if any(entry.package == name for entry in entries):
                loaded.get(twice)  # raises, with both packages
        if mine:
            say("its tests name every variant", plugin.untested([variant.name for variant in mine]))
        print("  ...   kernels on an emulated GPU, then its own tests: minutes", file=sys.stderr, flush=True)
        for what, fault in kernel_checks([spec for variant in mine for spec in variant.kernels]):
            say(what, fault)
            if fault and "does not compile" in fault:
                again = f"elman check {shlex.quote(str(folder))}"
                raise ConfigError(
                    f"{name} does not compile, so nothing after that was checked: mend its source, then {again}"
                )
        code, said = tests_of(folder)
        say("its own tests" if code else f"its own tests: {said}", said if code else "")
    else:
        say("kernels on an emulated GPU and its own tests: not checked: --no-tests", None)
    if wrong:
        raise ConfigError(f"{wrong} of {count} checks failed for {folder}")
