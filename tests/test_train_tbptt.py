"""Truncated backpropagation through time: what is carried is the state that the text before left behind, and no gradient."""

import itertools

import pytest
import torch
from train_helpers import metrics, settings, write_text

from elman_core.registry import ConfigError, get_variant
from elman_core.training.objective import forward_loss
from elman_core.training.start import start

STEPS, ROWS, LENGTH = 12, 4, 16


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text", 300_000, document=40)


def frozen(text, out, documents, variant):
    """A training whose gradients are nothing, so that every step has the weights of the first."""
    sets = ["data.sampling=tbptt", f"data.documents={documents}", f"model.variant={variant}", "train.accumulate=2"]
    trainer = start(
        settings(text, *sets, "train.weight_decay=0", f"train.steps={STEPS}", "train.warmup=0"), out, quiet=True
    )
    trainer.optimizer.step = lambda **_: None
    trainer.model.train(False)
    return trainer


@pytest.mark.parametrize("variant", ["e1", "e88"])
@pytest.mark.parametrize("documents", ["keep", "reset"])
def test_carried_windows_are_one_long_text(documents, variant, text, tmp_path):
    trainer = frozen(text, tmp_path / "run", documents, variant)
    batches = [trainer.windows.batch(s) for s in range(STEPS)]
    trainer.fit()
    nats = torch.zeros(STEPS * LENGTH)
    resets = 0
    for row in range(ROWS):
        stream = torch.cat([torch.from_numpy(b.tokens[row]).long()[:-1] for b in batches])
        targets = torch.cat([torch.from_numpy(b.tokens[row]).long()[1:] for b in batches])
        fresh = torch.zeros(STEPS * LENGTH, dtype=torch.bool)
        fresh[[i * LENGTH for i, b in enumerate(batches) if b.fresh[row]]] = True
        if documents == "reset":
            fresh |= stream == 0x1E
        starts = [*fresh.nonzero().flatten().tolist(), len(stream)]
        resets += len(starts) - 2
        for first, end in itertools.pairwise(starts):
            with torch.no_grad():
                logits = forward_loss(trainer.model, stream[None, first:end], targets[None, first:end]).logits[0]
            nats[first:end] += torch.nn.functional.cross_entropy(logits, targets[first:end], reduction="none")
    expected = nats.reshape(STEPS, LENGTH).sum(1) / (ROWS * LENGTH)
    assert (resets > 5) == (documents == "reset")
    for line, loss in zip(metrics(tmp_path / "run"), expected.tolist(), strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-5)


def test_the_carried_state_has_no_history_and_all_rows(text, tmp_path):
    trainer = frozen(text, tmp_path / "run", "keep", "e42")
    trainer.train_step()
    assert len(trainer.progress.carry) == 2
    for state in trainer.progress.carry:
        for tensor in state.values():
            assert not tensor.requires_grad
            assert tensor.shape[0] == ROWS
    trainer.folder.close()


def test_a_state_that_grows_is_not_carried(text, tmp_path, monkeypatch):
    monkeypatch.setattr(get_variant("e42").mixer, "state_growth", "per_token")
    with pytest.raises(ConfigError, match="needs a state of constant size"):
        start(settings(text, "data.sampling=tbptt"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
