"""`elman new` writes plugins that install and pass their contract at once; `elman check` sees what is wrong with one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from broken_plugins import leave_installed, run_contracts
from elman_authors import checks
from elman_authors.checks import Plugin
from elman_authors.scaffold import NOT_COPIED, _without, class_name, equations, render

from elman_core.cli import main
from elman_core.registry import ConfigError, StorageError, get_variant, plugins

ROOT = Path(__file__).parents[3]
LINES = 150  # of a rendered variant, all files together


@pytest.fixture(autouse=True)
def e99_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has followed the tutorial in this repository has one of that name."""
    monkeypatch.delitem(plugins().installed, "e99", raising=False)


def test_new_plugins_are_small_and_pass_their_contract(tmp_path: Path) -> None:
    """`.ci/run` installs one and runs all of its tests, and test_docs.py those of the tutorial's."""
    folders = [
        render(f"new_{each}", tmp_path, skeleton=each)[0] for each in ("gates", "elementwise", "matrix", "reference")
    ]
    for folder in folders:
        assert sum(len(f.read_text().splitlines()) for f in folder.rglob("*") if f.is_file()) < LINES
        assert [problem for _, problem in Plugin(folder).checks() if problem] == []
    run_contracts(folders, "pieces or equation or initial_values or refused or packed")


def test_check_runs_a_plugins_own_tests(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    test = tmp_path / "tests" / "test_it.py"
    test.write_text("def test_it() -> None: ...\n")
    code, said = checks.tests_of(tmp_path)
    assert code == 0
    assert said.startswith("1 passed")
    test.write_text("def test_it() -> None: assert False\n")
    assert checks.tests_of(tmp_path)[0] == 1
    test.write_text("\n".join(f"def test_{i}(): raise OSError('of {i % 2}')" for i in range(6)))
    code, said = checks.tests_of(tmp_path)
    assert (code, said.count("FAILED"), said.count("- OSError: of 0"), said.count("6 failed")) == (1, 2, 1, 1)
    cases = "import pytest\n@pytest.mark.parametrize('i', [f'T={i} ' + 'long ' * 20 for i in range(6)])\n"
    cases += f"def test_{'case' * 9}(i): raise OSError(f'{{i}}: error {{hash(i)}}')\n"
    test.write_text(f"{cases}def test_other(): raise ValueError('1')\n")
    code, said = checks.tests_of(tmp_path)
    assert (code, said.count("FAILED"), said.count("E   OSError: T="), said.count("7 failed")) == (1, 2, 1, 1), said


def test_the_lines_that_say_the_equation_are_named(tmp_path: Path) -> None:
    folder, files = render("e99", tmp_path)
    lines = (folder / "elman_e99" / "op.py").read_text().splitlines()
    on_a_cpu = [i for i, line in enumerate(lines, 1) if "lambda" in line]
    assert len(on_a_cpu) == 2
    assert f"elman_e99/op.py:{','.join(map(str, on_a_cpu))}" in equations(folder, files)


def test_check_names_the_word_of_a_header_that_only_a_gpu_follows(tmp_path: Path) -> None:
    folder, _ = render("e99", tmp_path, skeleton="matrix")
    header = folder / "elman_e99" / "csrc" / "e99_cell.h"
    text = header.read_text()
    line = text[: text.index("backward_uses_r =")].count("\n") + 1
    assert checks._for_gpus_alone(header) == f"backward_uses_r in line {line} of e99_cell.h"
    header.write_text(text.replace("#pragma once", "#ifdef __CUDA_ARCH__"))
    assert checks._for_gpus_alone(header) == "__CUDA_ARCH__ in line 2 of e99_cell.h"


def test_check_says_that_an_installed_plugin_is_broken(tmp_path: Path) -> None:
    folder, _ = render("e99", tmp_path)
    op = folder / "elman_e99" / "op.py"
    op.write_text(op.read_text().replace("from pathlib", "import nothing_of_that_name\nfrom pathlib", 1))
    leave_installed(folder)
    env = os.environ | {"PYTHONPATH": str(folder)}
    env.pop("ELMAN_STRICT", None)  # under which a broken plugin ends every command
    command = [sys.executable, "-m", "elman_core", "check", str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    says = "elman: plugin elman-e99 1.2.3 is broken: ModuleNotFoundError: No module named 'nothing_of_that_name'; its tests run"
    assert says in done.stderr
    assert "not installed" not in done.stderr


def test_check_refuses_a_folder_that_is_not_the_installed_one(tmp_path: Path) -> None:
    folder, _ = render("e99", tmp_path)
    leave_installed(folder)
    copy = shutil.copytree(folder, tmp_path / "copy")
    command = [sys.executable, "-m", "elman_core", "check", str(copy)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert (
        f"elman-e99 is installed from {folder}, and its kernels there would be checked: pip install -e {copy}"
        in done.stderr
    )
    assert "emulated" not in done.stdout


def test_arguments_are_taken_out_of_a_call_however_it_is_laid_out() -> None:
    text = 'from a import Published, other\nx = Variant(name="µ", aliases={"b": ""}, published=(Published(),))\n'
    assert _without(text, NOT_COPIED) == 'from a import other\nx = Variant(name="µ", )\n'


def test_copied_plugins_are_variants_of_their_own(tmp_path: Path) -> None:
    sources = {"alpha": "e1", "beta_cell": "e63", "gamma": "e88"}
    folders = [render(name, tmp_path, source)[0] for name, source in sources.items()]
    for folder, source in zip(folders, sources.values(), strict=True):
        assert [problem for _, problem in Plugin(folder).checks() if problem] == []
        for path in (p for p in folder.rglob("*") if p.is_file()):
            assert source not in path.name
            assert path.name != "errors.json", "measured of the original"
            for own in ("Config", "Mixer"):
                assert class_name(source) + own not in path.read_text(), path
            assert "published figures" not in path.read_text(), path
        done = subprocess.run([sys.executable, "-m", "ruff", "check", "--select", "F", str(folder)], check=False)
        assert done.returncode == 0, "imports for what is not copied"
        assert get_variant(source).equation_of() in (folder / "README.md").read_text()
        places = "\n".join(
            equations(folder, [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()])
        )
        assert all(each in places for each in ("README.md:3", "__init__.py:1,", "_cell.h:1,", "tests/test_"))
    run_contracts(folders[1:], "pieces or equation or initial_values")


def test_a_full_disk_leaves_no_half_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageError, match=r"cannot write .*e99: No space left"):
        render("e99", tmp_path)
    assert not (tmp_path / "e99").exists()


def test_a_new_plugin_in_a_repository_of_plugins_goes_beside_them(tmp_path: Path) -> None:
    first, second = tmp_path / "plugins" / "e98", tmp_path / "plugins" / "e99"
    assert render("e98", tmp_path / "plugins")[0] == first
    assert render("e99", tmp_path)[0] == second
    assert [*tmp_path.iterdir()] == [tmp_path / "plugins"]
    assert {*(tmp_path / "plugins").iterdir()} == {first, second}


@pytest.mark.parametrize(
    ("name", "source", "says"),
    [
        ("E99", None, "lower case"),
        ("e-99", None, "lower case"),
        ("class", None, "lower case"),
        ("e99_", None, "lower case"),  # no package may be called so
        ("double", None, "'double' has another meaning in C"),
        ("silu", None, "'silu' has another meaning in C"),
        ("e42", None, "already exists, from elman-e42=="),
        ("core", None, "the package elman_core already exists"),
        ("e99", "gru", "has no package elman_gru of its own"),
    ],
)
def test_names_that_cannot_be_used_are_refused(name: str, source: str | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        render(name, tmp_path, source)
    assert not list(tmp_path.iterdir())


def test_a_copy_takes_no_skeleton(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "e99", "--skeleton", "gates", "--from", "e42", "--dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said == "elman: a copy of e42 has the skeleton of e42: leave out --skeleton, or --from\n"
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "e99").mkdir()
    with pytest.raises(ConfigError, match="exists: choose another name"):
        render("e99", tmp_path)


def test_a_package_of_several_variants_has_the_rooms_in_each(tmp_path: Path) -> None:
    folder = tmp_path / "baselines"
    shutil.copytree(ROOT / "baselines", folder)
    assert [problem for _, problem in Plugin(folder).checks() if problem] == []
    (folder / "elman_baselines" / "gdn" / "op.py").unlink()
    assert next(Plugin(folder).checks())[1] == "missing: elman_baselines/gdn/op.py"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (("README.md", None, None), "missing: README.md"),
        (("pyproject.toml", 'name = "elman-e99"', 'name = "e99"'), "by the entry point they should be ('elman-e99'"),
        (("pyproject.toml", '"elman-core>=0.1,<0.2", ', ""), "dependencies do not name elman-core"),
        (("pyproject.toml", "elman-core>=0.1,<0.2", "elman-core>=0.1"), "has no upper end"),
        (("pyproject.toml", "elman-core>=0.1,<0.2", "elman-core>=7,<8"), "excludes"),
        (("elman_e99/op.py", "from pathlib", "import transformers\nfrom pathlib"), "op.py imports transformers"),
        (("elman_e99/op.py", "from pathlib", "import elman_core.model\nfrom pathlib"), "imports elman_core.model"),
        (
            ("elman_e99/op.py", "import DenseKernel", "import DenseKernel, dispatch"),
            "takes dispatch from elman_core.kernels, where it is not public",
        ),
        (("elman_e99/op.py", "from pathlib", "def broken(:\nfrom pathlib"), "op.py is not Python: SyntaxError: invalid syntax"),
        (("elman_e99/op.py", "from pathlib", "import elman_e42\nfrom pathlib"), "op.py imports elman_e42"),
        (("pyproject.toml", "[project]", '[tool.hatch.build]\nexclude = ["*.h"]\n\n[project]'), "e99_cell.h"),
    ],
)  # fmt: skip
def test_check_says_what_is_wrong(damage: tuple[str, str | None, str | None], says: str, tmp_path: Path) -> None:
    folder, _ = render("e99", tmp_path)
    file, old, new = damage
    if old is None or new is None:
        (folder / file).unlink()
        pyproject = folder / "pyproject.toml"
        pyproject.write_text(pyproject.read_text().replace('readme = "README.md"\n', ""))
    else:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))
    first = next((problem for _, problem in Plugin(folder).checks() if problem), "nothing is wrong with it")
    assert says in first


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("elman-core>=0.1,<0.2", "elman-core>>0.1", "dependencies must be"),
        ('e99 = "elman_e99"', "e99 = 3", "one entry point"),
    ],
)
def test_a_faulty_pyproject_is_refused(old: str, new: str, says: str, tmp_path: Path) -> None:
    file = render("e99", tmp_path)[0] / "pyproject.toml"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=says):
        Plugin(file.parent)


OURS = [file.parent for where in ("plugins", "extensions") for file in sorted(ROOT.glob(f"{where}/*/pyproject.toml"))]


@pytest.mark.parametrize("folder", OURS, ids=lambda folder: folder.name)
def test_our_own_plugins_and_extensions_pass_the_static_checks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plugin, "_wheel", lambda _: "")  # release.py builds them all
    assert [p for _, p in Plugin(folder).checks() if p] == []


def test_check_wants_a_plugin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a plugin"):
        Plugin(tmp_path)
