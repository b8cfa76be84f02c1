"""A training that begins with a model: its weights in float32, its optimizer if asked, and what the run says of it."""

import json
import shutil

import pytest
import torch
from train_helpers import TINY, assert_same_bits, checkpoint, losses, manifest, settings, tensors, write_text

from elman_core.cli import main
from elman_core.model.checkpoint import load_checkpoint
from elman_core.registry import CheckpointError, ConfigError
from elman_core.training.objective import forward_loss
from elman_core.training.settings import apply_sets, from_dict
from elman_core.training.start import resume, start
from elman_core.training.text import open_text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text", 20_000)


@pytest.fixture(scope="module")
def models(text, tmp_path_factory):
    """A run, its export in bfloat16, and the same weights in shards."""
    root = tmp_path_factory.mktemp("models")
    start(settings(text, "train.steps=12", "train.lr=0.01"), root / "run", quiet=True).fit()
    assert main(["export", str(root / "run"), str(root / "export"), "--dtype", "bf16"]) == 0
    load_checkpoint(root / "run").save_pretrained(root / "shards", max_shard_size="5KB")
    assert len(list((root / "shards").glob("model-*.safetensors"))) > 1
    return root


def begun(text, init, *sets):
    tree = {table: dict(values) for table, values in TINY.items() if table != "model"}
    tree["data"]["path"], tree["model"] = str(text), {"init": str(init)}
    return from_dict(apply_sets(tree, ["train.seed=7", "train.steps=3", *sets]))


@pytest.mark.parametrize("name", ["run", "export", "shards"])
def test_training_begins_with_the_weights_in_float32_and_with_their_loss(name, models, text, tmp_path):
    source = load_checkpoint(models / name, dtype="float32")
    trainer = start(begun(text, models / name), tmp_path / "run", quiet=True)
    ours, theirs = trainer.model.state_dict(), source.state_dict()
    assert all(torch.equal(ours[n], theirs[n]) and ours[n].dtype == torch.float32 for n in theirs)
    tokens = torch.from_numpy(open_text(trainer.settings).windows.batch(0).tokens).long()
    expected = float(forward_loss(source, tokens[:, :-1], tokens[:, 1:]).loss.detach())
    trainer.fit()
    assert losses(tmp_path / "run")[1] == pytest.approx(expected, rel=1e-6)
    facts = manifest(tmp_path / "run")
    assert facts["init"]["model"] == str(checkpoint(models / "run") if name == "run" else models / name)
    assert (facts["init"]["optimizer"], facts["protocol"]["init"]) == ("dropped", "drop")
    assert "begun with" in (checkpoint(tmp_path / "run") / "README.md").read_text()


@pytest.mark.parametrize("optimizer", ["adamw", "schedulefree", "muon"])
def test_the_state_of_the_optimizer_is_kept_if_asked(optimizer, text, tmp_path):
    sets = f"train.optimizer={optimizer}", "train.steps=3", "train.warmup=1"
    start(settings(text, *sets), tmp_path / "one", quiet=True).fit()
    for how, alike in (("keep", True), ("drop", False)):
        wanted = begun(text, tmp_path / "one", *sets, f"model.init_optimizer={how}", "train.steps=0", "train.warmup=0")
        start(wanted, tmp_path / how, quiet=True).fit()
        one, two = (tensors(checkpoint(tmp_path / run)) for run in ("one", how))
        state = [n for n in one if n.startswith(("optimizer", "last"))]
        assert all(n in two and torch.equal(one[n], two[n]) for n in state) == alike
        assert manifest(tmp_path / how)["init"]["optimizer"] == {"keep": "kept", "drop": "dropped"}[how]


def test_a_run_that_began_with_a_model_is_resumed_without_it(models, text, tmp_path):
    shutil.copytree(models / "export", tmp_path / "source")
    start(begun(text, tmp_path / "source"), tmp_path / "whole", quiet=True).fit()
    cut = start(begun(text, tmp_path / "source", "train.save_every=1"), tmp_path / "cut", quiet=True)
    cut.advance(2)
    cut.folder.close()
    shutil.rmtree(tmp_path / "source")
    resume(tmp_path / "cut", quiet=True).fit()
    assert_same_bits(checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "cut"))


def test_a_run_without_a_checkpoint_begins_again_only_with_the_same_model(models, text, tmp_path):
    shutil.copytree(models / "shards", tmp_path / "source")
    start(begun(text, tmp_path / "source"), tmp_path / "run", quiet=True).folder.close()
    model = load_checkpoint(tmp_path / "source")
    torch.nn.init.zeros_(model.model.norm.weight)
    model.save_pretrained(tmp_path / "source", max_shard_size="5KB")
    with pytest.raises(CheckpointError, match="no longer the model that this run began with"):
        resume(tmp_path / "run", quiet=True)


def test_a_run_without_a_checkpoint_finds_its_model_from_another_folder(models, text, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    start(begun(text, "run"), tmp_path / "run", quiet=True).folder.close()
    monkeypatch.chdir(tmp_path)
    assert resume(tmp_path / "run", quiet=True).fit().status == "ok"


@pytest.mark.parametrize(
    ("name", "sets", "error", "said"),
    [
        ("run", ["model.hidden_size=8"], ConfigError, r"decides model\.hidden_size"),
        ("export", ["model.init_optimizer=keep"], CheckpointError, "no state of an optimizer"),
        ("run", ["model.init_optimizer=keep", "train.optimizer=muon"], CheckpointError, "another optimizer"),
        ("nothing", [], CheckpointError, "there is no folder"),
    ],
)
def test_what_cannot_be_begun_with_is_one_line_and_leaves_no_run(name, sets, error, said, models, text, tmp_path):
    with pytest.raises(error, match=said):
        start(begun(text, models / name, *sets), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_the_command_line_says_how_to_begin_with_a_model(models, text, tmp_path, capsys):
    for words in (["resume", str(models / "export")], ["train", str(models / "export")]):
        assert main(words) != 0
        assert f"elman train --init {models / 'export'} --data FILE" in capsys.readouterr().err
    assert main(["train", "--data", str(text)]) == 2
    assert "--init MODEL" in capsys.readouterr().err
    flags = [f"{t}.{k}={json.dumps(v)}" for t, values in TINY.items() if t != "model" for k, v in values.items()]
    words = [
        "train",
        "--init",
        str(models / "run"),
        "--data",
        str(text),
        "--out",
        str(tmp_path / "run"),
        "--steps",
        "1",
    ]
    assert (
        main(
            [*words, *(w for flag in flags if "steps" not in flag for w in ("--set", flag)), "--set", "train.warmup=0"]
        )
        == 0
    )
    assert "begun with" in capsys.readouterr().out
