"""Mixtures of sources, generated sources and loss masks: functions of the step, and the loss is over what counts."""

import shutil
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from train_helpers import assert_same_bits, checkpoint, losses, manifest, metrics, settings, write_text

from elman_core.cli import main
from elman_core.data import Batch, Mixture, Source, TrainingWindows, hash_u64, open_file, split
from elman_core.registry import ConfigError, DataError, ElmanError
from elman_core.training.evaluate import on_mixture
from elman_core.training.start import resume, start
from elman_core.training.text import open_text

ROWS, LENGTH, WEIGHTS = 16, 20, (6, 3, 1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three texts, each of the letters of one third of the alphabet."""
    made = []
    for i, name in enumerate(("one", "two", "three")):
        made.append(tmp_path_factory.mktemp("data") / name)
        np.random.default_rng(i).integers(97 + 8 * i, 105 + 8 * i, 60_000, dtype=np.uint8).tofile(made[-1])
    return made


@pytest.fixture
def coins(tmp_path, monkeypatch):
    """The example of the documentation, installed."""
    code = textwrap.dedent(Source.__doc__.split("::\n\n")[1].split("\n\n    Args:")[0])
    imports = "import numpy as np\nfrom elman_core.extension import Batch, Source, hash_u64\n"
    site = tmp_path / "site"
    (site / "coins-1.0.dist-info").mkdir(parents=True)
    (site / "coins.py").write_text(imports + code)
    (site / "coins-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: coins\nVersion: 1.0\n")
    (site / "coins-1.0.dist-info/entry_points.txt").write_text("[elman.sources]\ncoins = coins:make\n")
    monkeypatch.syspath_prepend(site)
    yield "coins:"
    sys.modules.pop("coins", None)


def mixed(files, *sets):
    values = ", ".join(f"'{file}:{weight}'" for file, weight in zip(files, WEIGHTS, strict=False))
    sets = (f"data.path=[{values}]", f"train.batch_size={ROWS}", f"train.chunk_size={LENGTH}", "train.steps=8", *sets)
    return settings(files[0], *sets)


@pytest.mark.parametrize("sampling", ["random", "stream", "tbptt"])
def test_a_mixture_is_the_same_on_any_number_of_ranks_and_has_its_weights(sampling, files):
    windows = open_text(mixed(files, f"data.sampling={sampling}")).windows
    counts = np.zeros(3)
    for step in range(200):
        whole = windows.batch(step)
        letters = (whole.tokens - 97) // 8
        assert (letters == letters[:, :1]).all(), "a window is of one source"
        counts += np.bincount(letters[:, 0], minlength=3)
        if step % 50 == 3:
            shuffled = np.random.default_rng(step).permutation(ROWS)
            for parts in (1, 2, 8, 16):
                got = [windows.batch(step, rows) for rows in np.array_split(shuffled, parts)]
                assert np.array_equal(np.concatenate([b.tokens for b in got]), whole.tokens[shuffled])
                assert np.array_equal(np.concatenate([b.fresh for b in got]), whole.fresh[shuffled])
            origin = windows.origin(step)
            assert origin == {"sources": letters[:, 0].tolist(), "offsets": whole.offsets.tolist()}
    expected = [0.6, 0.3, 0.1] if sampling == "random" else [9 / 16, 5 / 16, 2 / 16]
    assert counts / counts.sum() == pytest.approx(expected, abs=0.02 if sampling == "random" else 0)


def test_one_source_is_what_it_was_before_there_were_several(files):
    file = open_file(files[0])
    alone = TrainingWindows(file, split(file.size), LENGTH, ROWS, 42).batch(5)
    for path in (str(files[0]), f"{files[0]}:0.5"):
        text = open_text(mixed(files, f"data.path={path!r}"))
        assert np.array_equal(text.windows.batch(5).tokens, alone.tokens)
        assert (text.path, text.fingerprint()) == (str(files[0]), file.fingerprint())


@pytest.mark.parametrize("reading", ["sampling=random", "sampling=tbptt", "documents=pack"])
def test_a_run_on_a_mixture_resumes_to_the_bit_and_scores_every_source(reading, files, tmp_path, capsys):
    sets = (f"data.{reading}", "train.save_every=3")
    whole = start(mixed(files, *sets), tmp_path / "whole", quiet=True)
    whole.fit()
    broken = start(mixed(files, *sets), tmp_path / "broken", quiet=True)
    broken.advance(5)
    broken.folder.close()
    resume(tmp_path / "broken", quiet=True).fit()
    assert losses(tmp_path / "whole") == losses(tmp_path / "broken")
    assert_same_bits(checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "broken"))
    last = metrics(tmp_path / "whole", "evaluation")[-1]
    assert last["bits_per_byte"] == pytest.approx(np.average(last["sources"], weights=WEIGHTS))
    assert main(["eval", str(tmp_path / "whole")]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{last['bits_per_byte']:.4f} bits per byte")
    assert "held out, windows" in said
    for wrong in ([f"{files[0]}:6", f"{files[2]}:3", f"{files[1]}:1"], [str(file) for file in files]):
        with pytest.raises(DataError, match=r"is not the text of this run.*give each --data FILE:WEIGHT"):
            resume(tmp_path / "broken", steps="+1", data=wrong)


def test_a_training_text_is_not_held_out_as_well(files, tmp_path):
    (tmp_path / "link").symlink_to(files[1])
    for name in (files[1], tmp_path / "link"):
        with pytest.raises(ConfigError, match="is a training text, too"):
            start(mixed(files, f"data.heldout_file={str(name)!r}"), tmp_path / "run", quiet=True)


def test_another_text_to_evaluate_on_leaves_the_whole_text_to_training(files, tmp_path, capsys):
    held = Path(shutil.copy(files[1], tmp_path / "held"))
    trainer = start(mixed(files[:1], f"data.heldout_file={str(held)!r}"), tmp_path / "run", quiet=True)
    assert "nothing held out" in trainer.windows.in_words
    trainer.fit()
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert f"of {held}, held out" in capsys.readouterr().out
    moved = held.rename(tmp_path / "moved")
    resume(tmp_path / "run", steps="+1", sets=[f"data.heldout_file={str(moved)!r}"], quiet=True).fit()
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert f"of {moved}, held out" in capsys.readouterr().out
    for other in ("", str(files[0])):
        with pytest.raises(DataError, match=r"data\.heldout_file is not the text"):
            resume(tmp_path / "run", steps="+1", sets=[f"data.heldout_file={other!r}"])
    moved.write_bytes(moved.read_bytes()[::-1])
    with pytest.raises(DataError, match=r"data\.heldout_file is not the text"):
        resume(tmp_path / "run", steps="+1")


# generated sources, targets of their own, masks ----------------------------------------------------------------------


def test_a_generated_source_trains_on_its_targets_where_they_count(coins, files, tmp_path):
    how = settings(files[0], f"data.path={coins}", "train.steps=6", "train.accumulate=2")
    trainer = start(how, tmp_path / "run", quiet=True)
    assert trainer.model.config.vocab_size == 2
    batch = trainer.windows.batch(0)
    assert batch.tokens.shape == batch.targets.shape == (4, 16)
    with torch.no_grad():
        logits = trainer.model(input_ids=torch.from_numpy(batch.tokens).long()).logits.double()
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(batch.targets).long().flatten(), reduction="none"
    )
    by_hand = each[torch.from_numpy(batch.counts.flatten())].mean()
    trainer.fit()
    assert losses(tmp_path / "run")[1] == pytest.approx(float(by_hand), rel=1e-5)
    assert manifest(tmp_path / "run")["settings"]["data"]["path"] == coins
    resume(tmp_path / "run", steps="+2", quiet=True).fit()


def test_a_source_without_a_fingerprint_is_its_extensions_fault(coins, tmp_path, monkeypatch, capsys):
    code = (tmp_path / "site/coins.py").read_text()
    (tmp_path / "site/coins.py").write_text(code.replace("def fingerprint", "def other"))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "e42@16x1", "--data", coins, "--steps", "2"]) == 2
    assert "Coins has no fingerprint()" in capsys.readouterr().err


def test_packing_is_for_files_alone(coins, files):
    with pytest.raises(ConfigError, match=r"'pack' packs a file, and coins: makes its own rows: leave it out$"):
        open_text(settings(files[0], f"data.path={coins}", "data.documents=pack"))
    assert open_text(settings(files[0], f"data.path=['{coins}', '{files[0]}']", "data.documents=pack")).windows


class Masked(Source):
    """Rows of which the last has few targets that count, and the first none."""

    vocab_size = 7

    def read(self, step, rows):
        tokens = (hash_u64(self.seed, step, rows[:, None], np.arange(self.length + 1)) % 7).astype(np.uint32)
        counts = np.arange(self.length) < (rows[:, None] * self.length) // (3 * self.rows)
        return Batch(tokens, rows, np.ones(len(rows), bool), counts=counts)


def test_micro_batches_weigh_each_target_alike(files, tmp_path):
    """A batch in parts with different numbers of targets that count has the loss and the gradient of the whole."""
    seen = {}
    for accumulate in (1, 2, 4):
        trainer = start(mixed(files[:1], f"train.accumulate={accumulate}"), tmp_path / str(accumulate), quiet=True)
        trainer.feed.windows = Masked(LENGTH, ROWS, 0)
        values, _, _ = trainer.compute.gradients(trainer.feed.get(0, None))
        seen[accumulate] = torch.cat([values, *(p.grad.flatten() for p in trainer.model.parameters())])
        trainer.folder.close()
    for accumulate in (2, 4):
        torch.testing.assert_close(seen[accumulate], seen[1], rtol=1e-4, atol=1e-6)
    assert seen[1].abs().sum() > 0


def test_one_target_in_the_rows_of_all_processes_weighs_what_it_weighs_in_one(files, tmp_path, monkeypatch):
    class One(Masked):
        def read(self, step, rows):
            batch = super().read(step, rows)
            batch.counts[:] = (rows[:, None] == 0) & (np.arange(self.length) == 3)
            return batch

    trainer = start(mixed(files[:1]), tmp_path / "run", quiet=True)
    trainer.feed.windows = One(LENGTH, ROWS, 0)
    loss = []
    for processes in (1, 2):  # of the second no target counts
        monkeypatch.setattr(trainer.processes, "mean", lambda values, n=processes: values / n)
        loss.append(float(trainer.compute.gradients(trainer.feed.get(0, None))[0][0]))
    assert loss[0] == pytest.approx(loss[1])
    assert loss[0] > 0
    trainer.folder.close()


def test_a_mixture_of_masked_and_plain_sources_counts_all_of_the_plain(files):
    plain = open_text(mixed(files[:1])).windows
    both = Mixture([Masked(LENGTH, ROWS, 0), plain], [1, 1], ROWS, seed=3, streams=False)
    batch, which = both.batch(4), np.array(both.origin(4)["sources"])
    assert batch.tokens.dtype == np.uint32
    assert batch.counts[which == 1].all()
    assert not batch.counts[which == 0].all(axis=1).any()


def test_a_mixture_has_the_widest_of_all_tokens_and_the_fresh_rows_of_sources_without_starts():
    class Streams(Source):
        """Rows that begin afresh in even steps; with `starts`, targets are wider than inputs."""

        def __init__(self, starts):
            super().__init__(LENGTH, 2, 0)
            self.starts, self.vocab_size = starts, 50_001

        def read(self, step, rows):
            fresh, inputs = np.full(len(rows), step % 2 == 0), np.zeros((len(rows), LENGTH + 1), np.uint8)
            if not self.starts:
                return Batch(inputs, rows, fresh)
            targets = np.full((len(rows), LENGTH), 50_000, np.uint16)
            return Batch(inputs[:, 1:], rows, fresh, targets, starts=np.zeros(targets.shape, bool))

    both = Mixture([Streams(True), Streams(False)], [1, 1], 4, 0, streams=True)
    for step in range(2):
        batch = both.batch(step)
        assert batch.targets.tolist() == 2 * [LENGTH * [50_000]] + 2 * [LENGTH * [0]]
        assert batch.starts[2:, 0].all() == (step == 0)
        assert not batch.starts[:2].any()
        assert not batch.starts[:, 1:].any()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["a:0", "b"], "the weight of a is 0: a weight is above 0"),
        (["a:-1", "b"], "the weight of a is -1"),
        (["a", "none:2"], "there is no file none: correct the path"),
        (["a:half"], "there is no file a:half: each text has its own --data FILE:NUMBER"),
        (["~nobody.has.this.name/text"], "cannot be used: Could not determine home directory"),
        (["a" * 5000], ": File name too long"),
        (["a", ""], "no training text: give one with --data FILE"),
        ([], "no training text: give one with --data FILE"),
        (["a", 3], "no training text: give one with --data FILE"),
        (["a:1", "b:0.001"], "train.batch_size must be about 1,001"),
    ],
)
def test_values_that_cannot_be_read_are_said_in_one_line(values, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_text(tmp_path / name, 5000)
    wrong = settings("a", f"data.path={values!r}", "data.sampling=stream")
    with pytest.raises(ElmanError) as raised:
        open_text(wrong)
    assert says in str(raised.value)
    assert isinstance(raised.value, (ConfigError, DataError))


def test_a_token_beyond_the_vocabulary_is_an_error_that_names_it():
    class Wide(Masked):
        name, vocab_size = "wide", 5

    with pytest.raises(DataError, match="wide has the token 6, beyond its vocabulary of 5"):
        Wide(LENGTH, ROWS, 0).batch(0)


def test_evaluating_ends_with_no_result_if_it_is_told_to(files, tmp_path):
    trainer = start(mixed(files), tmp_path / "run", quiet=True)
    assert on_mixture(trainer.model, trainer.plan.text.heldout, 4, stop=lambda: True) == {}
    trainer.folder.close()
