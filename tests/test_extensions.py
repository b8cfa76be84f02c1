"""Extensions: commands and loggers of other packages, found without an import; what is wrong with one is one line."""

import functools
import importlib
import re
import sys
import tomllib
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
from broken_plugins import pip
from elman_authors.checks import Plugin
from train_helpers import losses, train_words

from elman_core import LadderLM, extension, kernels
from elman_core.cli import main
from elman_core.generation import decoder, generate_bytes
from elman_core.imports import homes_of
from elman_core.registry import ConfigError, KernelError, extensions

PAGE = Path(__file__).parents[1] / "docs/how-to/extension.md"


def leave(folder: Path, group: str, name: str, source: str, core: str = "elman-core>=0.1") -> None:
    """Put a module and its metadata into a folder, as an installer does."""
    module = f"elman_{name}_{folder.name}"
    facts = folder / f"{module}-1.0.dist-info"
    facts.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\nRequires-Dist: {core}\n")
    (facts / "entry_points.txt").write_text(f"[elman.{group}]\n{name} = {module}\n")


def test_the_extension_of_the_documentation_adds_a_command_and_a_logger(text, tmp_path, monkeypatch, capsys):
    folder, site, run = tmp_path / "csv", tmp_path / "site", tmp_path / "run"
    for name, content in re.findall(r"<!-- file (\S+) -->\n```\w+\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    pip("install", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site), str(folder))
    monkeypatch.syspath_prepend(site)
    assert main(["--help"]) == 0
    assert re.search(r"far +Show the last step of each run", capsys.readouterr().out)
    assert "elman_csv" not in sys.modules
    assert main(train_words(text, tmp_path / "quiet", "train.steps=1")) == 0
    assert main(train_words(text, run, "train.steps=3", "train.loggers=csv")) == 0
    assert not (tmp_path / "quiet" / "losses.csv").exists()
    assert (run / "losses.csv").read_text() == "".join(f"{step},{loss}\n" for step, loss in losses(run).items())
    capsys.readouterr()
    assert main(["far", str(run)]) == 0
    assert f"{fmean(losses(run).values()):.4f}" in capsys.readouterr().out
    assert main(["far", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"elman: {tmp_path} is not a run")
    assert [p for _, p in Plugin(folder).checks() if p] == ["missing: README.md, tests"]


@pytest.mark.parametrize(
    ("group", "source", "core", "says"),
    [
        ("commands", "raise RuntimeError('first\\nsecond')", ">=0.1", "is broken: RuntimeError: first second"),
        ("commands", "x = 1", ">=9", "needs elman-core>=9: pip install . in a checkout of elman"),
        ("commands", "x = 1", ">=0.1", "is broken: TypeError: its entry point names a module, which cannot be called"),
        ("loggers", "raise SystemExit(3)", ">=0.1", "is broken: SystemExit: 3"),
        ("loggers", "x = 1", ">=0.1", "it implements no hook"),
        ("loggers", "from elman_core import hookimpl\n@hookimpl\ndef elman_step_ed(run): ...", ">=0.1", "Did you mean"),
        (
            "loggers",
            "from elman_core import hookimpl\n@hookimpl\ndef elman_loss_terms(run): ...",
            ">=0.1",
            "it implements elman_loss_terms; a logger observes",
        ),
    ],
)
def test_a_faulty_extension_is_one_line_where_it_is_used(
    group, source, core, says, text, tmp_path, monkeypatch, capsys
):
    leave(tmp_path / "a", group, "odd", source, f"elman-core{core}")
    monkeypatch.syspath_prepend(tmp_path / "a")
    assert main(["--help"]) == 0
    assert main(["list"]) == 0
    capsys.readouterr()
    used = train_words(text, tmp_path / "run", "train.loggers=odd") if group == "loggers" else ["odd"]
    assert main(used) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()
    sys.modules.pop("elman_odd_a", None)
    leave(tmp_path / "b", group, "odd", "x = 1")
    monkeypatch.syspath_prepend(tmp_path / "b")
    assert main(used) == 2
    assert "odd' is in elman-odd-a and in elman-odd-b: uninstall one" in capsys.readouterr().err


@pytest.mark.parametrize("point", ["a\x1b = m", "x = not a module!!", "x = .m", "["])
def test_odd_metadata_breaks_no_other_command_and_help_controls_no_terminal(tmp_path, monkeypatch, capsys, point):
    leave(tmp_path, "commands", "far", "'A \x1b[2J command.'\n")
    leave(tmp_path, "commands", "odd", "")
    (tmp_path / f"elman_odd_{tmp_path.name}-1.0.dist-info/entry_points.txt").write_text(f"[elman.commands]\n{point}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"far +A \\x1b\[2J command", said)
    assert "\x1b" not in said


def test_what_is_not_installed_says_what_to_install(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(extensions, "extensions", lambda _: {})
    for words, says in (
        (["bench", "quick"], "command 'bench' is not installed: pip install ./extensions/bench in a checkout of elman"),
        (
            train_words(text, tmp_path / "a", "train.loggers=wandb"),
            "pip install ./extensions/wandb in a checkout of elman; without it: --set train.loggers=",
        ),
        (train_words(text, tmp_path / "b", "train.loggers=odd"), "there is no logger 'odd'. Installed: none"),
        (["new", "e99"], "command 'new' is not installed: pip install ./extensions/authors in a checkout of elman"),
        (["verify", "e1"], "command 'verify' is not installed: pip install ./extensions/authors in a checkout"),
        (["benhc"], "No such command 'benhc' (`elman --help`)"),
    ):
        assert main(words) == 2
        assert says in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
    assert main(train_words(text, tmp_path / "c", "train.steps=1", "train.loggers=wandb", "train.loggers=")) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("benhc", "No such command 'benhc'. Did you mean 'bench'? (`elman --help`)"),
        ("data pakc", "No such command 'pakc'. Did you mean 'pack'? (`elman data --help`)"),
        ("generate", "Missing argument 'model' (`elman generate --help`)"),
        ("compare", "Missing argument 'paths' (`elman compare --help`)"),
        ("resume none", "there is no folder 'none'. Check the path"),
    ],
)
def test_a_wrong_command_says_what_to_type(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"elman: {says}\n"


@pytest.mark.parametrize(
    ("source", "ways", "says"),
    [
        (None, ("auto", "off"), None),
        (
            None,
            ("on", "on", "off"),
            "program 'whole' is not installed: pip install ./extensions/megakernel in a checkout",
        ),
        ("raise RuntimeError('first\\nsecond')", ("auto", "auto"), "is broken: RuntimeError: first second"),
        ("x = 1", ("auto",), "is broken: TypeError: its entry point names a module, which cannot be called"),
        ("raise RuntimeError", ("off",), None),
    ],
)
def test_missing_and_broken_programs_end_no_text(source, ways, says, tmp_path, monkeypatch, caplog):
    on_gpu, found = SimpleNamespace(device=SimpleNamespace(type="cuda")), {"other": []}
    if source is not None:
        leave(tmp_path, "programs", "whole", source)
        monkeypatch.syspath_prepend(tmp_path)
        points = extensions.extensions("programs")["whole"]
        found = {"whole": [point for point in points if point.module == f"elman_whole_{tmp_path.name}"]}
    for module in (extensions, decoder):
        monkeypatch.setattr(module, "extensions", lambda _: found)
    monkeypatch.setattr(decoder, "_programs", functools.cache(decoder._programs.__wrapped__))
    for way in ways:
        monkeypatch.setenv("ELMAN_WHOLE", way)
        assert decoder.program_for(on_gpu, 10_000) is None
    assert len(caplog.messages) == (says is not None)
    assert (says or "") in caplog.text


def test_another_way_to_decode_is_an_error(monkeypatch):
    monkeypatch.setenv("ELMAN_WHOLE", "Off")
    with pytest.raises(ConfigError, match="ELMAN_WHOLE must be auto, on or off, not 'Off'"):
        decoder.program_for(SimpleNamespace(device=SimpleNamespace(type="cuda")), 10_000)


@pytest.mark.parametrize("source", [None, "raise RuntimeError"])
def test_without_what_repeats_steps_a_cpu_takes_each_and_a_long_text_says_so_once(
    source, tmp_path, monkeypatch, caplog
):
    says, found = "program 'steps' is not installed: pip install ./extensions/megakernel in a checkout", {}
    if source is not None:
        leave(tmp_path, "programs", "steps", source)
        monkeypatch.syspath_prepend(tmp_path)
        points = extensions.extensions("programs")["steps"]
        found = {"steps": [point for point in points if point.module == f"elman_steps_{tmp_path.name}"]}
        says = "is broken: RuntimeError"
    monkeypatch.setattr(extensions, "extensions", lambda _: found)
    monkeypatch.setattr(decoder, "_steps", functools.cache(decoder._steps.__wrapped__))
    model = LadderLM("e42", dim=16, depth=1).eval()
    monkeypatch.setenv("ELMAN_KERNELS", "off")
    plain = list(generate_bytes(model, b"def ", max_new_bytes=decoder.WORTH, seed=1))
    monkeypatch.setenv("ELMAN_KERNELS", "auto")
    for count in (decoder.WORTH - 1, decoder.WORTH, decoder.WORTH):
        assert list(generate_bytes(model, b"def ", max_new_bytes=count, seed=1)) == plain[:count]
        assert len(caplog.messages) == (count == decoder.WORTH)
    assert says in caplog.text
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    with pytest.raises(KernelError, match=re.escape(says)):
        list(generate_bytes(model, b"def ", max_new_bytes=decoder.WORTH, seed=1))


def test_the_known_extensions_are_those_of_this_repository():
    files = PAGE.parents[2].glob("extensions/*/pyproject.toml")
    projects = [tomllib.loads(file.read_text())["project"] for file in files]
    for kind in extensions.KINDS:
        named = {n: p["name"] for p in projects for n in p["entry-points"].get(f"elman.{kind}", ())}
        assert extensions.known(kind) == named


@pytest.mark.parametrize("module", [extension, kernels])
def test_every_public_name_is_there(module):
    assert {*homes_of(module.__name__)} <= {*module.__all__}
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []


def test_the_old_place_of_the_contract_names_the_new_one() -> None:
    says = r"^elman_core\.testing is elman_authors\.testing now: .* pip install \./extensions/authors .*$"
    with pytest.raises(ImportError, match=says):
        importlib.import_module("elman_core.testing.oracle")


def test_the_old_place_of_sizes_names_the_new_one() -> None:
    says = (
        r"^elman_core\.size\.solve_width is elman_bench\.size\.solve_width now: .* pip install \./extensions/bench .*$"
    )
    with pytest.raises(ImportError, match=says):
        from elman_core.size import solve_width  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from elman_core.size import nothing  # noqa: F401


@pytest.mark.parametrize("name", extension._MOVED)
def test_the_old_place_of_a_name_for_extensions_names_the_new_one(name) -> None:
    with pytest.raises(ImportError, match=rf"^elman_core\.extension\.{name} is elman_\w+\.") as raised:
        getattr(extension, name)
    module, _, new = str(raised.value).split()[2].rpartition(".")
    assert new == name
    assert getattr(importlib.import_module(module), name)
    assert f"pip install ./extensions/{module.split('.')[0].removeprefix('elman_')}" in str(raised.value)
