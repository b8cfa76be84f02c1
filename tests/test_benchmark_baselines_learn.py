"""The script that watches the baselines' losses fall, at tiny sizes on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import baselines_learn
import pytest


def test_a_loss_has_fallen_only_if_every_mean_is_below_the_one_before() -> None:
    falling = [5.0] * 10 + [3.0] * 50 + [2.0] * 50
    assert baselines_learn.fallen(falling) == {"means": [5.0, 3.0, 2.0], "fell": True}
    assert not baselines_learn.fallen(falling + [2.1] * 50)["fell"]
    assert not baselines_learn.fallen(falling + [float("nan")] * 50)["fell"]
    assert not baselines_learn.fallen([5.0] * 10)["fell"]


def test_models_train_beside_each_other_and_one_that_cannot_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text", tmp_path / "result.json"
    text.write_bytes(Path(__file__).read_bytes() * 8)
    words = ["--models", "gru@32x1,gru@0x1", "--steps", "60", "--data", str(text), "--out", str(out)]
    more = ["train.batch_size=4", "train.chunk_size=32", "train.lr=1e-2", "train.device=cpu"]
    assert baselines_learn.main([*words, *(word for each in more for word in ("--set", each))]) == 1
    good, bad = json.loads(out.read_text())["rows"]
    assert good["fell"], good
    assert good["steps"] == 60
    assert 0 < good["heldout_bits_per_byte"] < 8
    assert bad["exit_code"] != 0
    assert "elman: " in bad["said"]
    assert "gru@32x1" in capsys.readouterr().out
