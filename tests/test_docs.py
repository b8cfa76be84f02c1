"""The documentation is true: hooks and their arguments, environment variables, commands, links, tutorial, README."""

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from broken_plugins import leave_installed
from elman_authors.scaffold import render

from elman_core.registry import hookspecs, installing, plugins

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("[pe]*s/*/README.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


def test_every_hook_is_documented_with_its_exact_arguments() -> None:
    text = (ROOT / "docs/reference/hooks.md").read_text(encoding="utf-8")
    hooks = {n: f for n, f in vars(hookspecs).items() if n.startswith("elman_")}
    expected = {f"### `{n}({', '.join(inspect.signature(f).parameters)})`" for n, f in hooks.items()}
    assert {line for line in text.splitlines() if line.startswith("### ")} == expected


def test_every_environment_variable_is_documented() -> None:
    text = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(ELMAN_[A-Z_]+)`", text, flags=re.MULTILINE))
    used = set()
    for folder in ("elman_core", "plugins", "extensions", "baselines", "csrc_common", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            used |= set(re.findall(r"environ(?:\.get\(|\.setdefault\(|\[)\s*\"(ELMAN_[A-Z_]+)\"", source))
            used |= set(re.findall(r"getenv\(\"(ELMAN_[A-Z_]+)\"", source))
    assert used, "no variable found: the pattern is out of date"
    assert documented == {name for name in used if not name.startswith("ELMAN_TEST_")}


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8")
    from elman_core.registry import errors

    codes = {c.exit_code for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.ElmanError)}
    documented = {int(c) for c in re.findall(r"^\| (\d+) \|", text, flags=re.MULTILINE)}
    assert codes | {0, 130, 143} <= documented


def test_the_reference_of_commands_is_their_help() -> None:
    command = [sys.executable, str(ROOT / "docs/commands.py")]
    wanted = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8") == wanted, "type: make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """The commands, which take longer to make than a page to read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        from commands import commands

        return commands()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_in_the_text_exist_with_their_flags(page: Path, known: dict[str, Any]) -> None:
    text = page.read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()]
    lines += re.findall(r"`(elman [a-z][^`]*)`", text)
    for line in lines:
        for words in re.findall(r"(?:^|[/ ])elman ([a-z]+[^&|;]*)", line):
            name, *rest = words.split()
            assert name in known, f"{page.name}: there is no command 'elman {name}'"
            group = known[name]
            if rest and (inner := getattr(group, "get_command", lambda *_: None)(None, rest[0])):
                group = inner.load() if hasattr(inner, "load") else inner
                rest.pop(0)
            flags = {f for p in group.params for f in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
            own = rest[: rest.index("--")] if "--" in rest else rest  # what stands behind is another command's
            used = {w.partition("=")[0] for w in own if w.startswith("--")}
            assert used <= flags, f"{page.name}: elman {name} has no {used - flags}"


def test_tables_of_options_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    import options

    texts = {page: page.read_text(encoding="utf-8") for page in options.pages()}
    for page, text in texts.items():
        assert text == options.render(text), f"{page}: type make docs"
    assert any("<!-- /options -->" in text for text in texts.values())

    # One switch turns every command that installs a package of ours, and back.
    monkeypatch.setattr(installing, "SOURCE", "index")
    index = {page: options.render(text) for page, text in texts.items()}
    assert "pip install elman-e42" in index[ROOT / "plugins/e42/README.md"]
    assert not [page for page, text in index.items() if re.search(r"pip install '?\.[ /]", text)]
    monkeypatch.setattr(installing, "SOURCE", "git+https://host/elman")
    wanted = "pip install openai 'elman-e42 @ git+https://host/elman#subdirectory=plugins/e42'"
    assert installing.how_to_install("openai", "elman-e42==0.1.0") == wanted
    monkeypatch.setattr(installing, "SOURCE", "")
    assert {page: options.render(text) for page, text in index.items()} == texts


def test_every_variant_is_drawn_with_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drawing of the gallery is read from the equation: some box reads its own past, another is read by nothing."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    from equations import STREAM, display, drawing, graph, statements

    for name, installed in plugins().installed.items():
        variant = installed.variant
        for preset in (None, *variant.presets):
            equation = variant.equation_of(variant.make_config(preset=preset))
            nodes = graph(equation)
            kept = variant.branch(0).state_growth == "constant"
            assert any(n.again for n in nodes) == kept, f"{name}:{preset}: {equation}"
            assert {n.name for n in nodes} >= {r for n in nodes for r in n.reads}
            assert any(not n.reads and n.name in STREAM for n in nodes) or not kept, f"{name}:{preset}: no input"
            ET.fromstring(drawing(equation, False, name))
            made = display(statements(equation))
            assert made.count("{") == made.count("}")


def test_the_gallery_counts_seeds_and_has_readmes_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    from gallery import ADAMW, MUON, best

    found = [best(name, what, least=True) for name, what in (("transformer", MUON), ("e97", MUON), ("gdn", ADAMW))]
    assert [(f.text, f.setting) for f in found if f] == [
        ("0.859 bits/byte", "lr 0.006, 3 seeds, H100 and H200"),
        ("0.899 bits/byte", "lr 0.01, 3 seeds, H100 and H200"),
        ("0.893 bits/byte", "lr 0.003, 1 seed, H200"),
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_in_the_text_is_python(page: Path) -> None:
    """That of whole pages runs, too, here and in `test_hf_docs.py`; excerpts of a plugin cannot."""
    for block in re.findall(
        r"^```py(?:thon)?\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    ):
        compile(block, page.name, "exec")


@pytest.mark.parametrize("page", ["use", "layer"])
def test_the_python_of_a_first_page_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELMAN_KERNELS", "off")
    for block in re.findall(
        r"```python\n(.*?)```", (ROOT / f"docs/start/{page}.md").read_text(encoding="utf-8"), flags=re.DOTALL
    ):
        exec(block.replace("max_new_tokens=100", "max_new_tokens=8"), {})


def test_lines_of_a_decision_fit_the_width_of_the_code() -> None:
    longer = [
        f"{page.name}:{number}"
        for page in (ROOT / "docs/decisions").glob("0*.md")
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 128 and not line.startswith("|")
    ]
    assert longer == []


def test_every_decision_is_listed() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs/decisions").glob("0*.md"):
        number = int(page.name[:4])
        assert page.read_text(encoding="utf-8").startswith(f"# {number}. ")
        assert f"{number}. [" in index
        assert page.name in index


# the tutorial --------------------------------------------------------------------------------------------------------


def edits() -> list[tuple[str, str]]:
    """(file, body of its diff) of every edit in the tutorial, in order."""
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    return re.findall(r"<!-- edit (\S+) -->\n```diff\n(.*?)```", text, flags=re.DOTALL)


def apply(text: str, diff: str) -> str:
    """Replace each run of lines with - by the run of lines with + that follows; + without - goes above the local imports."""
    for old, new in re.findall(r"((?:^-.*\n)*)((?:^\+.*\n)+)", diff, flags=re.MULTILINE):
        before, after = (re.sub(r"^[-+]", "", part, flags=re.MULTILINE) for part in (old, new))
        if before:
            assert text.count(before) == 1, f"the template no longer holds\n{before}"
            text = text.replace(before, after)
        else:
            text = text.replace("\nfrom .", f"{after}\nfrom .", 1)
    return text


def test_the_tutorial_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(plugins().installed, "e99", raising=False)  # of whoever has followed it in this repository
    folder, _ = render("e99", tmp_path)
    assert len(edits()) == 4
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\S+)` \|", tutorial, flags=re.MULTILINE)
    assert f"in {sum(len((folder / file).read_text().splitlines()) for file in named)} lines:" in tutorial
    for file, diff in edits():
        (folder / file).write_text(apply((folder / file).read_text(), diff))
    leave_installed(folder)
    env = {**os.environ, "PYTHONPATH": str(folder), "ELMAN_PLUGINS": "e99"}
    wanted = "equal_the_equation or pieces_equal"
    test = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", wanted, "tests"]
    # In one process, which imports everything once.
    code = f"import sys, pytest; from elman_core.cli import main; code = pytest.main({test})"
    verify = ["verify", "e99", "--backend", "host", "--dtype", "fp64"]
    compiles = shutil.which("g++") is not None or os.environ.get("ELMAN_REQUIRE_HOST", "0") not in ("", "0")
    code += f"; sys.exit(code or main({verify}))" if compiles else "; sys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if not compiles:
        pytest.skip("no g++ for the host build of the tutorial's cell")


# the README ----------------------------------------------------------------------------------------------------------


def readme_commands() -> list[str]:
    return re.findall(r"```bash\n(python3 -m venv .*?)\n```", README)


def test_the_readme_sets_up_a_fresh_machine_with_two_commands() -> None:
    first, test = readme_commands()
    start, pip = "python3 -m venv .venv && ", ".venv/bin/pip install"
    assert (
        first
        == f'{start}{pip} -r requirements.txt && .venv/bin/elman generate pretrained/e88-small -p "def " --seed 246'
    )
    assert len(README.splitlines()) <= 100
    builder = "-c constraints.txt hatchling editables"  # once, not in an environment for each package
    every = "--no-build-isolation -r requirements-dev.txt $(printf ' -e %s' plugins/*/)"
    assert test == f"{start}{pip} {builder} && {pip} {every} && .venv/bin/python -m pytest -n auto --dist worksteal"
    ci = (ROOT / ".ci/run").read_text()
    marks = re.findall(r"<!-- test command -->\n```bash\n(.*)\n```", README)
    assert marks == [test]
    assert "<!-- test command -->" in ci


def test_the_readmes_first_command_and_lines_of_python_write_text(capsys: pytest.CaptureFixture[str]) -> None:
    """As they stand there, with fewer bytes."""
    words = shlex.split(readme_commands()[0].rpartition(" && ")[2].replace(".venv/bin", str(BIN)))
    done = subprocess.run([*words, "-n", "8"], capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    python = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    assert len([line for line in python.splitlines() if line]) == 3
    exec(python.replace("max_new_tokens=200", "max_new_tokens=8"), {})
    assert capsys.readouterr().out.startswith("def ")
