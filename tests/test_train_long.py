"""Long windows: carried state, recomputed blocks and a loss in pieces together, and what they cost in memory."""

import json
from pathlib import Path

import pytest
import torch
import toy_mixers
from train_helpers import assert_same_bits, losses, metrics, settings, write_text

from elman_core.training.start import start


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text", 600_000, document=40)


VARIANTS = {
    "spectral": ("model.variant=e42",),
    "dropout": ("model.variant=e1", "model.options.use_conv=true", "model.options.dropout=0.2"),
    "matrix": ("model.variant=e88", "model.options.n_heads=2", "model.options.n_state=4"),
    "autocast": ("model.variant=e42", "train.precision=bf16"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_recomputing_blocks_of_a_carried_window_changes_no_bit(variant, text, tmp_path):
    """Spectral norm takes one round a step, dropout the same mask, a state is cut at the same documents: recomputed or not."""
    sets = ["train.steps=8", "train.lr=0.01", "data.sampling=tbptt", "data.documents=reset", *VARIANTS[variant]]
    plain = start(settings(text, *sets), tmp_path / "plain", quiet=True).fit()
    again = start(settings(text, *sets, "train.gradient_checkpointing=true"), tmp_path / "again", quiet=True).fit()
    assert losses(tmp_path / "again") == losses(tmp_path / "plain")
    assert [m["grad_norm"] for m in metrics(tmp_path / "again")] == [
        m["grad_norm"] for m in metrics(tmp_path / "plain")
    ]
    assert_same_bits(plain.checkpoint, again.checkpoint)


def test_recomputation_really_happens_in_carried_windows(text, tmp_path):
    sets = ["train.steps=1", "data.sampling=tbptt", "train.gradient_checkpointing=true", "train.warmup=0"]
    trainer = start(settings(text, *sets), tmp_path / "run", quiet=True)
    calls = []
    trainer.model.model.layers[0].mixer.register_forward_pre_hook(
        lambda mixer, _: calls.append(torch.is_grad_enabled() and mixer.training)  # in evaluation mode: the estimate's
    )
    trainer.fit()
    assert sum(calls) == 2  # the evaluation's calls are without gradients


def peak_of(code):
    """Peak resident bytes of this process while `code` runs, above what it held before."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _status("VmRSS")
    code()
    return _status("VmHWM") - before


def _status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


LONG = 65_536
LONG_SETS = (
    "model.hidden_size=8", f"train.chunk_size={LONG}", "train.batch_size=1", "data.sampling=tbptt", "data.documents=reset",
    "train.gradient_checkpointing=true", "train.loss_chunk=512", "train.steps=3", "train.warmup=0", "train.lr=0.01",
    "data.eval_bytes=1000",
)  # fmt: skip


@pytest.fixture
def parallel_mixer():
    """A mixer whose loop over time is one sum: 65,536 steps in milliseconds."""
    toy_mixers.install()
    yield "toypair"
    toy_mixers.uninstall()


def test_a_window_of_65536_bytes_trains_in_memory_that_does_not_hold_its_logits(parallel_mixer, tmp_path):
    text = write_text(tmp_path / "text", 600_000, document=40_000)
    asked = settings(text, *LONG_SETS, f"model.variant={parallel_mixer}")
    trainer = start(asked, tmp_path / "run", quiet=True)
    trainer.train_step()  # what is made once is made
    peak = peak_of(trainer.train_step)
    trainer.fit()
    got = metrics(tmp_path / "run")
    assert [m["bytes_seen"] for m in got] == [3 * LONG]  # the first two steps were not recorded
    assert got[0]["loss"] < 5.545
    state = tmp_path / "run/checkpoints/step-00000003/state"
    assert json.loads((state / "trainer.json").read_text())["carry"] == 4  # two layers of two branches
    whole = start(
        settings(text, *LONG_SETS, "train.loss_chunk=0", f"model.variant={parallel_mixer}"), tmp_path / "whole"
    )
    whole.train_step()
    logits = LONG * 256 * 4
    assert peak < logits
    assert peak_of(whole.train_step) > peak + 2 * logits
    whole.folder.close()


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["e1", "e42", "e88"])
def test_a_window_of_65536_bytes_trains_on_a_gpu(variant, tmp_path):
    text = write_text(tmp_path / "text", 600_000, document=40_000)  # a launch begins anew at every document
    sets = [s for s in LONG_SETS if not s.startswith("model.")]
    sets += [f"model.variant={variant}", "model.hidden_size=512", "model.num_hidden_layers=6", "train.device=cuda"]
    trainer = start(settings(text, *sets), tmp_path / "run", quiet=True)
    torch.cuda.reset_peak_memory_stats()  # other tests ran in this process
    trainer.fit()
    assert losses(tmp_path / "run")[3] < losses(tmp_path / "run")[1]
    assert torch.cuda.max_memory_allocated() < 16 * 2**30
