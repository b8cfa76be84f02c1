"""`elman list`, `show` and `doctor`: what they print is what is built."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_plugins import install_all
from elman_authors.cli import doctor

import elman_core
from elman_core.cli import main
from elman_core.cli._text import table
from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.registry import plugins, resolve


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def read(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(run(capsys, *words, "--json"))


def test_the_version_is_said_and_a_bare_command_gets_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == f"elman {elman_core.__version__}\n"
    for words in ([], ["tokenizer"]):
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert (out, err.splitlines()[0]) == ("", " ".join(["Usage: elman", *words, "[OPTIONS] COMMAND [ARGS]..."]))


def test_the_help_has_sections_and_a_line_for_each_command(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    lines = run(capsys, "--help").partition("\nLook:\n")[2].splitlines()
    titles = [line for line in lines if line and not line.startswith("  ")]
    assert titles == ["Train:", "Use a model:", "Write a variant:", "Extensions:"]
    rows = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    named = [row[0] for row in rows]
    assert len(set(named)) == len(named) > 20, "a summary takes more than a line"
    assert [row for row in rows if not row[1:] or row[1].endswith("...")] == []
    assert all(line.startswith("  ") and line[2] != " " for line in lines if line and line not in titles)


def test_a_shell_can_be_told_the_commands(tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("elman"), "--install-completion", "bash"]
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_ELMAN_COMPLETE" in (tmp_path / ".bash_completions" / "elman.sh").read_text()


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second is that of the C locale
def test_a_terminal_without_the_characters_of_an_equation_gets_them_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: str
) -> None:
    with (tmp_path / "out").open("w", encoding="ascii", errors=errors) as file:
        monkeypatch.setattr("sys.stdout", file)
        assert main(["show", "e88"]) == 0
    assert r"S_{t-1}\u1d40 k_t" in (tmp_path / "out").read_text()


@pytest.mark.parametrize(
    ("name", "said", "unsaid"),
    [
        ("e88:h32n16", "S_t = tanh(decay_t S_{t-1} + k_t (v_t - S_{t-1}ᵀ k_t)ᵀ),", "β"),
        ("e88:conv_linear", "S_t = decay_t S_{t-1} + β_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ,", "tanh"),
        ("e97:linear", "S_t = λ_t S_{t-1} + k_t (w_t v_t - S_{t-1}ᵀ (b_t k_t))ᵀ,", "tanh"),
        ("e42:radius099", "|W|₂ = 0.99", "0.999"),
        ("e61:b", "h_t = α h_{t-1} + W_v x_t + b", "1 - α"),
        ("e74:retain", "S' = tanh(S + k ((1 - σ(d_g mean(S²) + b_g)) (v - Sᵀ k))ᵀ)", "W_zg"),
    ],
)
def test_show_prints_the_equation_of_the_preset(name: str, said: str, unsaid: str, capsys: Any) -> None:
    equation = read(capsys, "show", name)["equation"]
    assert said in equation
    assert unsaid not in equation
    assert said in run(capsys, "show", name)


def test_presets_that_compute_otherwise_have_other_equations() -> None:
    """Two options of a variant's whose kernels, maps or vectors differ never print the same."""
    seen = 0
    for installed in plugins().installed.values():
        variant, found = installed.variant, {}
        for preset in (None, *variant.presets):
            config = variant.make_config(preset=preset)
            form = getattr(variant.branch(0), "form_of", lambda _config: None)(config)
            if form is None:
                continue
            kernel = getattr(form.kernel, "name", None) or (form.kernel.func.__name__, str(form.kernel.keywords))
            more = (getattr(form, "options", ()), str(getattr(form, "inputs", "")), getattr(config, "gate", ""))
            key = (kernel, form.maps, tuple(form.biases), tuple(form.vectors), *more)
            assert found.setdefault(variant.equation_of(config), key) == key, f"{variant.name}:{preset}"
            seen += 1
    assert seen > 50


def test_show_prints_options_with_ranges_figures_and_if_asked_presets(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("show", "e42:radius099", "--set", "expansion=2", "--set", "model.options.use_conv=true")
    text = run(capsys, *words)
    for wanted in ("h_t = W x_t", "elman-e42==", "0.99", "greater than 0.0", "42,880,512", "elman show e42 --presets"):
        assert wanted in text, wanted
    assert "e42:mamba2_init" not in text
    assert "e42:mamba2_init" in run(capsys, *words, "--presets")
    assert "\n1 preset: elman show lstm --presets\n" in run(capsys, "show", "lstm@64x1")
    text = run(capsys, "show", "e72")
    assert "recommended: e72:unit_keys\n  unit_keys=True\n" in text
    assert text.index("k_t of length 1") > text.index("recommended: ")  # its equation, not that of the defaults
    options = {o["name"]: o["value"] for o in read(capsys, "show", "e42:radius099", "--set", "expansion=2")["options"]}
    assert (options["expansion"], options["spectral_radius"]) == (2.0, 0.99)


def test_show_prints_each_variant_of_a_pattern_and_counts_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("show", "e1*3+transformer@128x4", "--set", "e1.use_conv=true")
    facts, text = read(capsys, *words), run(capsys, *words)
    each = dict(zip(("e1", "transformer"), facts["layers"], strict=True))
    assert facts["parameters"] == 3 * each["e1"]["layer"] + each["transformer"]["layer"] + 257 * 128
    assert each["e1"]["layer"] == read(capsys, "show", "e1@128x1", "--set", "use_conv=true")["layer"]
    counts = [f"  {number:,}\n" for number in (each["e1"]["layer"], each["transformer"]["layer"], facts["parameters"])]
    for wanted in ("h_t = tanh(", "softmax(", *counts):
        assert wanted in text, wanted


def built(variant: str, width: int, depth: int, options: Any = None) -> int:
    """The parameters of a model of this variant."""
    config = LadderConfig(variant=variant, options=options, hidden_size=width, num_hidden_layers=depth, vocab_size=256)
    with torch.device("meta"):
        return LadderForCausalLM(config).num_parameters()


def test_show_counts_a_pattern_with_its_presets(capsys: pytest.CaptureFixture[str]) -> None:
    pattern = "lstm+e88:conv_h5n128v256*6+lstm"
    assert read(capsys, "show", f"{pattern}@640x8")["parameters"] == built(pattern, 640, 8)
    facts = read(capsys, "show", "e88+e88:conv_h5n128v256@640x4")
    assert facts["parameters"] == built("e88+e88:conv_h5n128v256", 640, 4)
    assert [layer["preset"] for layer in facts["layers"]] == [None, "conv_h5n128v256"]


def test_show_says_what_a_recipe_trains_and_how_to_start_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    facts, text = read(capsys, "show", "hybrid"), run(capsys, "show", "hybrid")
    pattern, options = "lstm+e88:conv_h5n128v256*6+lstm", {"lstm": {"in_proj": False, "expansion": 0.8}}
    assert text.startswith(f"hybrid: a recipe, which trains {pattern}@640x8\n  elman train hybrid --data FILE\n")
    assert facts["recipe"].endswith("recipes/hybrid.toml")
    assert facts["parameters"] == built(pattern, 640, 8, options)
    assert text.endswith(f"\n  {facts['parameters']:,}\n")
    assert [o["value"] for o in facts["layers"][0]["options"] if o["name"] == "in_proj"] == [False]

    own = tmp_path / "my recipe.toml"
    own.write_text('[model]\nvariant = ["e1", "e42"]\nhidden_size = 64\nnum_hidden_layers = 2\nmlp_ratio = 2.0\n')
    text = run(capsys, "show", str(own), "--set", "e1.use_conv=true")
    assert f"which trains e1+e42@64x2\n  elman train '{own}' --data FILE\n" in text

    own.write_text('[model]\nvariant = ["e1", "e1"]\noptions = [{}, {use_conv = true}]\nnum_hidden_layers = 2\n')
    plain, windowed = read(capsys, "show", str(own))["layers"]
    assert plain["layer"] < windowed["layer"]

    assert main(["show", "small"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("small is a recipe for any variant: elman train small --data FILE --set model.variant=NAME\n")


@pytest.mark.parametrize("name", sorted(plugins().installed))
def test_show_works_for_every_variant_with_one_layer(capsys: pytest.CaptureFixture[str], name: str) -> None:
    facts = read(capsys, "show", f"{name}@128x1")
    assert facts["parameters"] == facts["layer"] + 257 * 128
    assert {o["name"] for o in facts["options"]} == set(resolve(name).options)


def test_list_imports_torch_only_when_a_plugin_has_changed(tmp_path: Path) -> None:
    code = "import sys; from elman_core.cli import main; main(['list', '--json'])"
    code += "; print('torch' in sys.modules, file=sys.stderr)"
    shelf, source = install_all(tmp_path / "plugins"), tmp_path / "plugins/good/elman_good/__init__.py"
    source.write_text("import torch\n" + source.read_text())
    (source.parent / ".#mixer.py").symlink_to("me@here.123")  # an editor's lock
    said = []
    for change in ("a test", "a test", "another", "another"):
        if change not in source.read_text():
            source.write_text(source.read_text().replace("a test", change))
        done = shelf.run(code, "good", ELMAN_CACHE=str(tmp_path / "cache"))
        said.append(
            (done.stderr.splitlines()[-1], next(r["summary"] for r in json.loads(done.stdout) if r["name"] == "good"))
        )
    assert [summary for _, summary in said] == ["a test", "a test", "another", "another"]
    assert [imported for imported, _ in said] == ["True", "False", "True", "False"]


def test_list_names_every_variant_once(capsys: pytest.CaptureFixture[str]) -> None:
    rows = read(capsys, "list")
    assert [r["name"] for r in rows] == sorted(plugins().installed)
    assert {r["state"] for r in rows} == {"ok"}
    assert len(run(capsys, "list").splitlines()) >= 1 + len(rows)


def test_doctor_names_machine_plugins_and_back_ends(capsys: pytest.CaptureFixture[str]) -> None:
    sections = read(capsys, "doctor")
    assert list(sections) == ["machine", "kernels", "plugins", "extensions", "variants"]
    rows = {(title, r["what"]): r for title, found in sections.items() for r in found}
    assert rows["machine", "torch"]["is"].startswith(torch.__version__)
    assert rows["plugins", "elman-e42"]["is"].endswith(": e42")
    assert "backend" in rows["variants", "e42"]["is"]
    assert all(r["fix"] for r in rows.values() if r["state"] in ("missing", "broken"))


def test_doctor_is_brief_unless_all_is_asked_for(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    text = run(capsys, "doctor")
    assert len(text.splitlines()) <= 12
    assert "C++ compiler missing" in text
    assert "elman-e42" not in text
    assert "elman-e42" in run(capsys, "doctor", "--all")


def test_doctor_says_how_to_get_what_kernels_need(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    (tmp_path / "a-file").touch()
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path / "a-file"))
    rows = {r["what"]: r for r in read(capsys, "doctor")["kernels"]}
    assert (rows["Python.h"]["state"], rows["Python.h"]["fix"][:14]) == ("missing", "install python")
    assert (rows["cache"]["state"], rows["cache"]["fix"]) == ("missing", "set ELMAN_CACHE to another")
    assert rows["C++ compiler"]["state"] == "missing"
    assert "install" in rows["C++ compiler"]["fix"]


def test_doctor_says_what_a_first_use_will_meet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A driver that torch does not take, a cache that cannot be locked, and no headers of Python, where none was compiled."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor, "_driver", lambda: "470.82.01")
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path))
    monkeypatch.setenv("ELMAN_KERNELS", "auto")
    rows = {r["what"]: r for found in read(capsys, "doctor").values() for r in found}
    said = "torch for CUDA 13.0 finds no GPU, although driver 470.82.01 is here: it may be too old"
    assert (rows["GPU"]["state"], rows["GPU"]["is"]) == ("missing", said)
    assert (rows["cache"]["state"], rows["cache"]["fix"]) == ("missing", "set ELMAN_CACHE to a local disk")
    assert rows["e42"]["is"].startswith("backend torch (no Python headers) on cpu")


def test_no_line_of_a_table_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    narrow = table([["name", "some words " * 9], ["n" * 40, "some words " * 9], ["n" * 40, "words"]])
    assert max(map(len, narrow.splitlines())) <= 60
    assert narrow.splitlines()[-1].endswith("words"), "a short cell stays in its row"
    assert table([["n" * 30, "runs/" * 7]]).endswith("\n      " + "runs/" * 7), (
        "a long word stays whole, on a line below"
    )


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupt_while_the_command_is_imported_ends_it_without_a_traceback(ignored):
    """Unless it is ignored, as of a command that a script runs in the background."""
    code = (
        "import os, runpy, signal, sys\n"
        "class Hit:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'elman_core.registry':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Hit())\n"
        f"if {ignored}:\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sys.argv[1:] = ['--version']\n"
        "runpy.run_module('elman_core', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0 if ignored else 130, "")
    assert done.stdout.startswith("elman ") == ignored
