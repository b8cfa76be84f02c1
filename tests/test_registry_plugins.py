"""Each way in which a plugin can fail, with installed plugins: one broken plugin breaks one plugin."""

import json

import pytest
from broken_plugins import Shelf, install_all

BROKEN = {
    "importerror": "RuntimeError: first line second line",
    "exits": "SystemExit: 3",
    "halts": "Halt: no more",
    "mute": "Mute",
    "badpoint": "AttributeError: ",
    "wrongtype": "PluginError: aliases of variant 'wrongtype' cannot be [('Level7', 3)]",
    "misspelt": "PluginError: there is no hook 'elman_variant'. Did you mean 'elman_variants'?",
    "argument": "PluginError: hook elman_step_end has no argument 'metric'. Did you mean 'metrics'?",
    "unmarked": "PluginError: elman_step_end is not marked: write @hookimpl above it",
    "again": "PluginError: its module elman_good is that of elman-good, too: pip uninstall elman-again",
    "shares": "PluginError: it changes torch's defaults: dtype float64, device cpu, grad off",
    "nohook": "PluginError: it implements no hook; mark elman_variants with @hookimpl",
    "returns": "PluginError: elman_variants must yield Variant objects; it returned NoneType",
    "wrongthing": "PluginError: elman_variants must yield Variant objects, not str",
    "baddefault": "PluginError: option 'width' of variant 'baddefault' must be an integer, not '8', which is its default",
    "undecorated": "PluginError: config of 'undecorated' needs @dataclass(frozen=True) above it: <class ",
    "nospecs": "PluginError: kernels of variant 'nospecs' must be KernelSpecs: write kernels=KERNEL.specs()",
    "badchoice": "ConfigError: variant 'badchoice' has no preset 'wider'. Did you mean 'wide'? Presets: wide",
    "badpreset": "ConfigError: option 'width' of variant 'badpreset' must be at most 64",
}

LOAD = "from elman_core.registry import plugins; print(sorted(plugins().installed))"
ASK = "from elman_core.registry import get_variant; print(get_variant({!r}).name)"
CAUSE = """
from elman_core.registry import PluginError, get_variant
try:
    get_variant({!r})
except PluginError as error:
    assert "\\n" not in str(error)
    print(type(error.__cause__).__name__)
    print(error)
"""


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return install_all(tmp_path_factory.mktemp("plugins"))


@pytest.mark.parametrize("name", BROKEN)
def test_one_broken_plugin_breaks_one_plugin(shelf: Shelf, name: str) -> None:
    done = shelf.run(LOAD, "good", name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['good']"
    lines = [line for line in done.stderr.strip().splitlines() if "still waiting for torch" not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"elman: plugin elman-{name} 1.2.3 is broken: {BROKEN[name]}")


def test_metadata_that_cannot_be_read_and_names_that_cannot_be_parsed_break_one_plugin(shelf: Shelf) -> None:
    done = shelf.run(LOAD, "good", "garbled", "noname", "parses", "halts", only="good,elman_noname,parses")
    assert (done.returncode, done.stdout.strip()) == (0, "['good', 'parses']")
    assert "elman: plugin elman_garbled-1.2.3 ? is broken: " in done.stderr
    assert "elman: plugin elman_noname 1.2.3 is broken: RuntimeError: first line" in done.stderr
    done = shelf.run("elman show goof", "good", "parses")
    assert done.returncode == 2
    assert "parse_alias of plugin elman-parses==1.2.3 failed: ZeroDivisionError" in done.stderr
    assert "no variant 'goof' is installed. Did you mean 'good'?" in done.stderr
    done = shelf.run("elman show parses", "good", "parses", "halts", only="good,parses")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "needs elman_halts.part" in done.stderr


def test_names_are_found_beside_entry_points_that_cannot_be_read(shelf: Shelf) -> None:
    done = shelf.run("elman train no-such-recipe.toml", "good", "badpoint", "garbled", only="good")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "there is no recipe no-such-recipe.toml" in done.stderr


@pytest.mark.parametrize("code", ["import elman_core, torch; print('e42')", "elman show e42"])
def test_torch_is_imported_beside_entry_points_that_cannot_be_read(shelf: Shelf, code: str) -> None:
    """It reads all of them, too, to find further kinds of devices."""
    done = shelf.run(code, "garbled", only="e42")
    assert (done.returncode, "TypeError: " in done.stdout) == (0, False), done.stderr
    assert "e42" in done.stdout


def test_an_error_of_a_mixer_is_one_line_that_names_the_plugin(shelf: Shelf) -> None:
    done = shelf.run("elman show good@64x2", "good")  # its mixer cannot be made
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Mixer of elman_good cannot be built: TypeError: Mixer() takes no arguments" in done.stderr
    done = shelf.run("elman show good", "divides")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "plugin elman-divides failed: ZeroDivisionError: division by zero in " in done.stderr
    assert "Traceback" in shelf.run("elman show good", "divides", ELMAN_TRACEBACK="1").stderr


def test_a_broken_plugin_is_listed(shelf: Shelf) -> None:
    three = "good", "importerror", "mute"
    rows = {r["name"]: r for r in json.loads(shelf.run("elman list --json", *three).stdout)}
    assert [rows[name]["state"] for name in three] == ["ok", "broken", "broken"]
    assert rows["importerror"]["package"] == "elman-importerror==1.2.3"
    text = shelf.run("elman list", *three, COLUMNS="200").stdout
    assert "RuntimeError: first line second line" in text
    told = " ".join(shelf.run("elman doctor", *three, COLUMNS="200").stdout.split())
    assert "elman-mute broken 1.2.3: Mute" in told
    assert "good broken TypeError: Mixer() takes no arguments" in told


@pytest.mark.parametrize("name", ["importerror", "argument"])
def test_asking_for_a_broken_plugins_variant_chains_the_cause(shelf: Shelf, name: str) -> None:
    done = shelf.run(CAUSE.format(name), "good", name)
    kind, message = done.stdout.splitlines()
    assert kind == BROKEN[name].partition(":")[0]
    assert f"no variant '{name}' is installed" in message
    assert f"Plugin elman-{name} 1.2.3 is broken: {BROKEN[name]}" in message
    assert "Installed: good" in message


def test_strict_raises_at_once(shelf: Shelf) -> None:
    done = shelf.run(LOAD, "good", "importerror", ELMAN_STRICT="1")
    assert done.returncode != 0
    assert "PluginError: plugin elman-importerror 1.2.3 is broken: RuntimeError: first line second line" in done.stderr
    assert shelf.run("elman list", "good", "importerror", ELMAN_STRICT="1").returncode == 2
    assert shelf.run(LOAD, "good", "importerror", ELMAN_STRICT="0").returncode == 0


def test_two_plugins_with_one_name_say_which_and_how_to_choose(shelf: Shelf) -> None:
    done = shelf.run(CAUSE.format("good"), "good", "twin")
    expected = (
        "variant 'good' is defined twice, by elman-good and elman-twin: uninstall one, or choose with ELMAN_PLUGINS="
    )
    assert expected in done.stdout
    for choice in ("elman-good", "twin"):  # by package or by entry point
        done = shelf.run(ASK.format("good"), "good", "twin", only=choice)
        assert (done.stdout.strip(), done.stderr) == ("good", "")


def test_a_missing_dependency_is_listed_and_raises_only_when_used(shelf: Shelf) -> None:
    listed = json.loads(shelf.run("elman list --json", "good", "needy").stdout)
    assert {r["name"]: r["state"] for r in listed} == {
        "good": "ok",
        "needy": "needs no_such_library, no_such_package.part",
    }
    assert shelf.run(ASK.format("good"), "good", "needy").stdout.strip() == "good"
    used = shelf.run("elman show needy", "good", "needy")
    assert used.returncode == 2
    assert used.stderr.startswith("elman: variant 'needy' needs no_such_library, no_such_package.part: pip install ")


def test_a_plugin_for_another_core_is_left_out_and_listed(shelf: Shelf) -> None:
    done = shelf.run("elman list --json", "good", "newer")
    assert done.stderr == ""
    assert {r["name"]: r["state"] for r in json.loads(done.stdout)} == {
        "good": "ok",
        "newer": "needs elman-core<10,>=9",
    }
    used = shelf.run("elman show newer", "good", "newer")
    assert used.returncode == 2
    assert "elman-newer 1.2.3 needs elman-core<10,>=9: pip install . in a checkout of elman" in used.stderr


def test_elman_plugins_chooses(shelf: Shelf) -> None:
    everything = ("good", "needy", "importerror")
    assert shelf.run(LOAD, *everything, only="good").stdout.strip() == "['good']"
    assert shelf.run(LOAD, *everything, only="needy, elman-good").stdout.strip() == "['good', 'needy']"
    assert shelf.run(LOAD, *everything, only="").stdout.strip() == "[]"
    wrong = shelf.run("elman list", *everything, only="goood")
    assert wrong.returncode == 2
    assert "ELMAN_PLUGINS names goood, which is not installed. Did you mean 'good'?" in wrong.stderr


BAD_INPUT = {
    "verify good@64x2": "elman: no variant 'good@64x2' is installed. Did you mean 'good'? Give the name without a size: good",
    "show e97": "elman: no variant 'e97' is installed. e97 is in this checkout: pip install ./plugins/e97. Installed: good",
    "show goad": "elman: no variant 'goad' is installed. Did you mean 'good'? Installed: good",
    "show good,good": "elman: no variant 'good,good' is installed. Did you mean 'good'? Join the variants of one model with +",
    "show good:wid": "elman: variant 'good' has no preset 'wid'. Did you mean 'wide'? Presets: wide",
    "show good:width=8": "elman: options do not belong in a name: type good --set model.options.width=8, not good:width=8",
    "show good:wide:width=8,rate=0.5": "elman: options do not belong in a name: type good:wide --set model.options.width=8 --",
    "show good --set wdth=8": "elman: variant 'good' has no option 'wdth'. Did you mean 'width'? Options: width, rate",
    "show good --set width=8.5": "elman: option 'width' of variant 'good' must be an integer, not 8.5",
    "show good --set width=10": "elman: option 'width' of variant 'good' must be a multiple of 4, not 10; nearest: 8 or",
    "show good --set width=2": "elman: option 'width' of variant 'good' must be at least 4, not 2",
    "show good --set rate=1.0": "elman: option 'rate' of variant 'good' must be less than 1, not 1.0",
    "show good --set rate=nan": "elman: option 'rate' of variant 'good' must be finite, not nan",
    "show good --set bias=1": "elman: option 'bias' of variant 'good' must be true or false, not 1",
    "show good --set gate=relu": "elman: option 'gate' of variant 'good' must be one of 'none', 'silu', not 'relu'",
    "show good --set width": "elman: --set takes key=value, such as",
    "show good@1536": "elman: write a size as NAME@WIDTHxDEPTH, such as good@1536x6, not 'good@1536'",
    "show good:wide@100x2": "elman: width 100 is no multiple of 64; nearest: 64",
    "size good:wide --params 10 --dim 100": "elman: width 100 is no multiple of 64; nearest: 64",
}
ALL_OF_THEM = """
import contextlib, io, json
from elman_core.cli import main
said = {}
for command in json.loads(COMMANDS):
    with contextlib.redirect_stderr(io.StringIO()) as error:
        said[command] = [main(command.split()), error.getvalue()]
print(json.dumps(said))
"""


def test_bad_input_is_one_line_and_exit_code_2(shelf: Shelf) -> None:
    done = shelf.run(ALL_OF_THEM.replace("COMMANDS", repr(json.dumps([*BAD_INPUT]))), "good")
    assert done.returncode == 0, done.stderr
    for command, (code, said) in json.loads(done.stdout).items():
        assert code == 2, command
        assert len(said.strip().splitlines()) == 1, said
        assert said.startswith(BAD_INPUT[command])


def test_a_slow_import_of_torch_is_not_blamed_on_the_first_plugin(shelf: Shelf) -> None:
    (shelf.root / "good" / "torch.py").write_text("import time; time.sleep(1)\n")
    code = "from elman_core.registry import checks, plugins; checks.said_when_slow.__wrapped__.__defaults__ = (0.3,); plugins()"
    for name, what in (("good", "torch"), ("twin", "plugin elman-twin")):
        source = shelf.root / name / f"elman_{name}" / "__init__.py"
        whole = source.read_text()
        source.write_text(("import torch\n" if name == "good" else "import time; time.sleep(1)\n") + whole)
        assert f"still waiting for {what} to be imported" in shelf.run(code, name).stderr
        source.write_text(whole)
    (shelf.root / "good" / "torch.py").unlink()
