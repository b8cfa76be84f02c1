"""Trained models that a package brings along do what their cards say; checkpoints of released versions keep loading."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elman_core import ElmanError
from elman_core.cli import main
from elman_core.model import LadderForCausalLM, byte_tokenizer, find_checkpoint, shipped

HOME = Path(__file__).parents[1] / "checkpoints" / "elman_checkpoints"
CARDS = sorted(HOME.glob("*/README.md"))
CODE = '''class Reader:
    """Reads lines from a file."""

    def __init__(self, path):
        self.path = path
        self.lines = []

    def read(self):
        with open(self.path) as file:
            for line in file:
                self.lines.append(line.strip())
        return self.lines
'''


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.parent.name)
def test_a_shipped_model_knows_python(card: Path) -> None:
    name = card.parent.name
    model = LadderForCausalLM.from_pretrained(f"pretrained/{name}", dtype=torch.float32).eval()
    assert f"| parameters | {model.num_parameters():,} |" in card.read_text()
    assert model.num_parameters() <= 6_000_000
    assert (card.parent / "model.safetensors").stat().st_size <= 12_000_000
    tokens_1T = byte_tokenizer()(CODE, return_tensors="pt").input_ids
    with torch.no_grad():
        bits = model(tokens_1T, labels=tokens_1T).loss.item() / 0.6931472
    assert bits < 2.0, "an untrained model needs 8 bits per byte"


def test_the_command_line_takes_a_shipped_model(capsys: pytest.CaptureFixture) -> None:
    assert main(["generate", "pretrained/e42-small", "-p", "import ", "-n", "12", "-t", "0"]) == 0
    assert re.fullmatch(r"[\x20-\x7e\n]+", capsys.readouterr().out)


def test_a_missing_or_altered_model_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["generate", "pretrained/e88-smal"]) == 2
    assert "Did you mean 'e88-small'? Installed: e42-small, e88-small" in capsys.readouterr().err
    monkeypatch.setattr(shipped, "package_folders", lambda _: [])
    assert main(["generate", "pretrained/e88-small"]) == 2
    assert capsys.readouterr().err.endswith("pip install -r requirements.txt in a checkout of elman\n")
    copy = shutil.copytree(HOME / "e42-small", tmp_path / "e42-small")
    (copy / "config.json").write_text((copy / "config.json").read_text().replace("0.999", "0.998"))
    monkeypatch.setattr(shipped, "package_folders", lambda _: [tmp_path])
    with pytest.raises(ElmanError, match=r"config\.json has been altered.*; copy .*, or delete checksums\.json if"):
        find_checkpoint("pretrained/e42-small")


FOLDERS = sorted((Path(__file__).parent / "checkpoints").glob("*/*"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f"{f.parent.name}-{f.name}")
def test_an_old_checkpoint_computes_what_it_did(folder: Path) -> None:
    """Each minor version adds a folder."""
    model = LadderForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        logits_BTV = model(torch.arange(12).view(1, 12) * 7 % 32).logits
    expected_BTV = load_file(folder / "expected.safetensors")["logits"]
    torch.testing.assert_close(logits_BTV, expected_BTV, rtol=1e-4, atol=1e-6)
