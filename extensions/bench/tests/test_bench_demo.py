"""The demo: a variant is chosen by what its plugin says of it, and the whole way from text to text works in a few steps."""

import pytest
import torch
from elman_bench.cli import demo

from elman_core.cli import main
from elman_core.registry import PluginError, list_variants, plugins


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_demo_trains_saves_reloads_and_writes(tmp_path, capsys):
    assert main(["demo", "e42", "--steps", "3", "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "variant     e42" in said
    written = said.split("it writes:")[1]
    for prompt in ("import ", "def ", "class "):
        assert f"\n{prompt}" in written
    assert (tmp_path / "run" / "checkpoints" / "step-00000003" / "model.safetensors").is_file()
    assert "from transformers import AutoModelForCausalLM, AutoTokenizer" in said


def test_the_first_variant_with_a_preset_for_the_demo_is_chosen():
    with_preset = [name for name, entry in list_variants().items() if "demo" in entry.variant.presets]
    assert demo.choose_variant() == f"{with_preset[0]}:demo"
    assert demo.choose_variant("e42") == "e42:demo"
    assert demo.choose_variant("e42:radius099") == "e42:radius099"
    assert demo.choose_variant("gru") == "gru"


def test_without_such_a_preset_the_first_variant_is_chosen(monkeypatch):
    monkeypatch.setattr(demo, "PRESET", "another")
    assert demo.choose_variant() == next(iter(list_variants()))


def test_without_variants_the_demo_says_to_install_one(monkeypatch):
    monkeypatch.setattr(plugins(), "installed", {})
    with pytest.raises(PluginError, match="pip install"):
        demo.choose_variant()
