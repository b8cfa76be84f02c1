"""Bits per byte: by hand, on windows, over a whole file, and from the command line."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from train_helpers import checkpoint, metrics, settings, write_packed, write_text

from elman_core.cli import main
from elman_core.data import Batch, ByteFile, Heldout, heldout_offsets, heldout_windows, open_file, split
from elman_core.metrics import progress
from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.registry import ConfigError, DataError, Mixer
from elman_core.training.evaluate import on_everything, on_windows
from elman_core.training.start import start


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text", 20_000)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = LadderForCausalLM(LadderConfig(variant="e42", hidden_size=16, num_hidden_layers=2)).train()
    with torch.no_grad():
        made.model.embed_tokens.weight.mul_(30)  # far from uniform, so that positions differ
    return made


def nats_by_hand(model, tokens):
    tokens = torch.from_numpy(np.array(tokens)).long()[None]
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens[:, :-1]).logits.double()
    model.train()
    return torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:], reduction="sum").item()


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_windows_are_scored_as_by_hand_whatever_the_batch(rows, model, text):
    file = ByteFile(text)
    offsets, length = heldout_offsets(split(file.size), 50)
    got = on_windows(model, heldout_windows(file, split(file.size), 50, 7 * 50), rows)
    offsets = offsets[np.arange(7) * len(offsets) // 7]
    expected = sum(nats_by_hand(model, file.read(o, length + 1)) for o in offsets[:7])
    assert got["bytes"] == 7 * 50
    assert got["loss"] == pytest.approx(expected / 350, rel=1e-5)
    assert got["bits_per_byte"] == pytest.approx(got["loss"] / math.log(2))
    assert model.training


@pytest.mark.parametrize(
    ("size", "rows", "length"), [(1000, 1, 37), (1000, 4, 37), (1003, 4, 500), (9, 4, 3), (3, 16, 5)]
)
def test_a_whole_file_is_scored_with_each_byte_once_and_all_context(size, rows, length, model, text, tmp_path):
    (tmp_path / "part").write_bytes(text.read_bytes()[:size])
    file = ByteFile(tmp_path / "part")
    got = on_everything(model, file, length, rows)
    rows = min(rows, size - 1)
    part = (size - 1) // rows
    ends = [(r + 1) * part for r in range(rows - 1)] + [size - 1]
    expected = sum(nats_by_hand(model, file.read(r * part, end + 1 - r * part)) for r, end in enumerate(ends))
    assert got["bytes"] == size - 1
    assert got["loss"] == pytest.approx(expected / (size - 1), rel=1e-5)


def test_documents_side_by_side_are_scored_each_from_the_initial_state(model):
    tokens = np.arange(60, 80, dtype=np.uint8)[None]
    starts = np.isin(np.arange(19), [0, 7])[None]
    both = Batch(tokens, np.zeros(1, np.int64), np.ones(1, bool), counts=np.ones((1, 19), bool), starts=starts)
    got = on_windows(model, Heldout(1, 19, lambda _: both), 1)
    expected = nats_by_hand(model, tokens[0, :8]) + nats_by_hand(model, tokens[0, 7:])
    assert got["loss"] == pytest.approx(expected / 19, rel=1e-5)
    assert got["loss"] != pytest.approx(nats_by_hand(model, tokens[0]) / 19, rel=1e-4)


def test_what_has_no_target_is_refused_before_a_training_or_a_figure(model, text, tmp_path):
    (tmp_path / "one").write_bytes(b"a")
    with pytest.raises(DataError, match="the text is too short"):
        start(settings(text, f"data.heldout_file={str(tmp_path / 'one')!r}"), tmp_path / "run", quiet=True)
    masked = open_file(write_packed(tmp_path / "masked", np.full(100, 97, np.uint8), np.zeros(100, bool)))
    for score in (
        lambda: on_everything(model, masked, 50, 2),
        lambda: on_windows(model, heldout_windows(masked, split(100, 0.5), 10), 2),
    ):
        with pytest.raises(DataError, match="no target counts"):
            score()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_of_a_training_is_the_mean_over_the_targets_that_count_in_its_steps(tmp_path, accumulate):
    packed = write_packed(tmp_path / "masked", np.full(50_000, 97, np.uint8), np.arange(50_000) % 199 < 3)
    how = "train.steps=20", "train.batch_size=4", f"train.accumulate={accumulate}", "data.heldout=0"
    trainer = start(settings(packed, *how), tmp_path / "run", quiet=True)
    batches = [trainer.windows.batch(step) for step in range(20)]
    targets = [int(batch.counts.sum()) for batch in batches]
    assert min(targets) == 0 < max(targets)
    trainer.fit()
    lines = [line for line in metrics(tmp_path / "run") if line["kind"] == "step"]
    assert [line["counted"] for line in lines] == [n / batches[0].counts.size for n in targets]
    result = json.loads((tmp_path / "run/manifest.json").read_text())["result"]
    expected = np.average([line["loss"] for line in lines], weights=targets)
    assert result["loss_last_100_steps"] == pytest.approx(expected)
    assert progress(tmp_path / "run").loss > 1


def test_each_batch_of_a_long_evaluation_is_progress_for_the_watch_over_ranks(text, tmp_path, monkeypatch):
    trainer, beats = start(settings(text), tmp_path / "run", quiet=True), []
    monkeypatch.setattr(trainer.signals, "beat", lambda: beats.append(None))
    assert trainer.evaluate()["bytes"] == 640
    assert len(beats) == 640 / 16 / 4
    trainer.folder.close()


def test_a_growing_state_is_not_carried_over_a_file(model, text, monkeypatch):
    monkeypatch.setattr(type(model.model.layers[0].mixer), "state_growth", "per_token")
    with pytest.raises(ConfigError, match="grows"):
        on_everything(model, ByteFile(text), 50, 2)
    assert Mixer.state_growth == "constant"


def test_eval_of_a_run_gives_the_figure_of_its_last_evaluation(text, tmp_path, capsys):
    sets = ("train.optimizer=schedulefree", "train.lr=0.01", "train.steps=12")
    start(settings(text, *sets), tmp_path / "run", quiet=True).fit()
    logged = metrics(tmp_path / "run", "evaluation")[-1]
    for model in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000012"):
        assert main(["eval", str(model), "--json"]) == 0
        got = json.loads(capsys.readouterr().out)
        assert got["bits_per_byte"] == pytest.approx(logged["bits_per_byte"], rel=1e-6)
        assert got["bytes"] == logged["bytes"]


@pytest.mark.parametrize("heldout", [0.2, 0.0])
def test_only_what_a_training_held_out_is_called_so(heldout, text, tmp_path, capsys):
    """For the run, its checkpoint elsewhere, without the manifest, and its export; of the text and of another."""
    run, other = tmp_path / "run", tmp_path / "other"
    start(settings(text, "train.steps=2", "train.warmup=1", f"data.heldout={heldout}"), run, quiet=True).fit()
    other.write_bytes(text.read_bytes()[:-1])
    assert main(["export", str(run), str(tmp_path / "export")]) == 0
    shutil.copytree(checkpoint(run), tmp_path / "moved")
    shutil.copytree(run, tmp_path / "bare")
    (tmp_path / "bare" / "manifest.json").unlink()
    shutil.copytree(tmp_path / "export", tmp_path / "again")
    LadderForCausalLM.from_pretrained(tmp_path / "again").save_pretrained(tmp_path / "again")

    def part(model: str, data: object, *more: str) -> tuple[str, float]:
        capsys.readouterr()
        assert main(["eval", str(tmp_path / model), "--data", str(data), "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["part"], found["loss"]

    own = "held out" if heldout else "not held out"
    asked = () if heldout else ("--heldout", "0.2")
    of_run = part("run", text, *asked)
    for model in ("run", "moved", "bare", "export"):
        assert part(model, text, *asked) == of_run == (own, of_run[1])
        assert part(model, text, "--heldout", "0.1")[0] == own
        assert part(model, text, "--heldout", "0.3")[0] == "not held out"
        assert part(model, other, "--heldout", "0.1")[0] == "another text"
        if not heldout:
            assert main(["eval", str(tmp_path / model), "--data", str(text)]) == 2
            assert "--all scores all of it, --heldout 0.1 a tenth" in capsys.readouterr().err
    assert part("again", text, "--heldout", "0.2")[0] == "unknown"


def test_eval_of_a_folder_needs_a_text_and_scores_all_of_it(model, text, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    assert main(["eval", str(tmp_path / "model")]) == 2
    assert "--data FILE" in capsys.readouterr().err
    words = ["eval", str(tmp_path / "model"), "--data", str(text), "--window", "64"]
    assert main([*words, "--all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == text.stat().st_size - 1
    assert main([*words, "--all", "--bytes", "100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == 100
    assert main(words) == 0
    assert "bits per byte" in capsys.readouterr().out
    assert main([*words, "--window", str(2**30)]) == 2
    assert "held-out stretches have" in capsys.readouterr().err
    assert main([*words, "--heldout", "0"]) == 2
    assert "nothing is held out" in capsys.readouterr().err
