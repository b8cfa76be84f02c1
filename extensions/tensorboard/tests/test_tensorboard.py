"""The logger of TensorBoard: its files are read as TensorBoard reads them."""

import pytest
from train_helpers import metrics, train_words

from elman_core.cli import main

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def test_a_resumed_run_has_one_curve_and_one_without_the_setting_none(text, tmp_path):
    run, quiet = tmp_path / "run", tmp_path / "quiet"
    assert main(train_words(text, quiet, "train.steps=1")) == 0
    assert not (quiet / "tensorboard").exists()
    assert main(train_words(text, run, "train.steps=3", "train.eval_every=2", "train.loggers=tensorboard")) == 0
    assert main(["resume", str(run), "--steps", "+2"]) == 0
    read = accumulator.EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    losses = {event.step: event.value for event in read.Scalars("train/loss")}
    assert losses == pytest.approx({m["step"]: m["loss"] for m in metrics(run)})
    assert list(losses) == [1, 2, 3, 4, 5]
    scored = {event.step: event.value for event in read.Scalars("heldout/bits_per_byte")}
    assert scored == pytest.approx({m["step"]: m["bits_per_byte"] for m in metrics(run, "evaluation")})
    assert '"batch_size": 4' in read.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
