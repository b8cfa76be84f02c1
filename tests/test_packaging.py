"""The packages of this repository: one version, one form, constraints that pin what they need."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import elman_core

ROOT = Path(__file__).parents[1]
FILES = [
    file for where in ("", "*/", "plugins/*/", "extensions/*/") for file in sorted(ROOT.glob(f"{where}pyproject.toml"))
]
PACKAGES = [file.parent.relative_to(ROOT).as_posix() for file in FILES]


def project(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): str(r.specifier) for r in wanted}


def test_the_default_requirements_are_packages_of_this_repository() -> None:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    folders = {Path(line.removeprefix("-e ")).as_posix() for line in lines if line.startswith("-e ")}
    assert (
        {
            ".",
            "baselines",
            "csrc_common",
            "checkpoints",
            "extensions/authors",
            "extensions/bench",
            "extensions/data",
            "extensions/megakernel",
        }
        < folders
        <= set(PACKAGES)
    )


@pytest.mark.parametrize("folder", PACKAGES)
def test_all_packages_have_one_version(folder: str) -> None:
    settings = project(folder)
    assert settings["project"]["version"] == elman_core.__version__
    init = ROOT / folder / settings["project"]["name"].replace("-", "_") / "__init__.py"
    written = re.findall(r'^__version__ = "(.*)"', init.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert written in ([], [elman_core.__version__])


@pytest.mark.parametrize("folder", PACKAGES)
def test_packages_are_alike(folder: str) -> None:
    settings = project(folder)["project"]
    assert settings["requires-python"] == ">=3.11"
    assert settings["license"] == "Apache-2.0"
    assert (ROOT / folder / settings["readme"]).is_file()
    assert project(folder)["build-system"]["requires"] == ["hatchling>=1.27"], (
        "nothing is compiled, nothing local is needed"
    )
    name = settings["name"].replace("-", "_")
    assert (ROOT / folder / name / "py.typed").is_file(), "typed packages say so"
    if folder.startswith("plugins/"):
        variant = Path(folder).name
        assert settings["name"] == f"elman-{variant}"
        assert settings["entry-points"]["elman"] == {variant: f"elman_{variant}"}
    if folder.startswith("extensions/"):
        assert settings["name"] == f"elman-{Path(folder).name}"


@pytest.mark.parametrize("folder", PACKAGES)
def test_constraints_pin_every_dependency(folder: str) -> None:
    pinned = pins()
    for line in project(folder)["project"].get("dependencies", []):
        wanted = Requirement(line)
        if wanted.name.startswith("elman-"):
            assert wanted.specifier.contains(elman_core.__version__), f"{line} excludes this version"
        else:
            pin = pinned.get(canonicalize_name(wanted.name), "")
            assert pin.startswith("=="), f"constraints.txt does not pin {wanted.name}"
            assert wanted.specifier.contains(pin.removeprefix("==")), f"{line} excludes the tested {pin}"


def test_development_requirements_are_pinned_too() -> None:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements-dev.txt").read_text().splitlines()]
    named = [canonicalize_name(line) for line in lines if line and not line.startswith("-")]
    assert named
    assert set(named) <= pins().keys()
    extra = [Requirement(r).name for r in project(".")["project"]["optional-dependencies"]["test"]]
    assert {canonicalize_name(r) for r in extra} <= set(named)


def test_the_tests_of_a_plugin_in_this_tree_need_no_xdist() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--collect-only", "plugins/e1/tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
