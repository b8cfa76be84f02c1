"""Checkpoints that released versions wrote keep loading, and compute what they did. Each minor version adds a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elman_core.model import LadderForCausalLM

FOLDERS = sorted((Path(__file__).parent / "checkpoints").glob("*/*"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f"{f.parent.name}-{f.name}")
def test_an_old_checkpoint_computes_what_it_did(folder: Path) -> None:
    model = LadderForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        logits_BTV = model(torch.arange(12).view(1, 12) * 7 % 32).logits
    expected_BTV = load_file(folder / "expected.safetensors")["logits"]
    torch.testing.assert_close(logits_BTV, expected_BTV, rtol=1e-4, atol=1e-6)
