"""Checkpoint folders on disk: every way of being broken is named, and a run falls back to its last good one."""

import json
import shutil
import struct

import pytest
import torch
import toy_mixers
from safetensors.torch import load_file, save_file

from elman_core.model import LadderForCausalLM, LadderLM
from elman_core.model.checkpoint import (
    check_checkpoint,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
)
from elman_core.registry import CheckpointError
from elman_core.storage import CHECKSUMS, checksums

toys = toy_mixers.toys  # for every test here


def write_checksums(folder):
    (folder / CHECKSUMS).write_text(json.dumps(checksums(folder)))


@pytest.fixture
def saved(tmp_path):
    LadderLM("toy", dim=16, depth=1).save_pretrained(tmp_path / "ck")
    write_checksums(tmp_path / "ck")
    return tmp_path / "ck"


def _cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def _flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


WEIGHTS = "model.safetensors"
DAMAGE = {
    "weights cut in the tensors": (WEIGHTS, lambda p: _cut(p, p.stat().st_size - 7)),
    "weights cut in the header": (WEIGHTS, lambda p: _cut(p, 100)),
    "weights cut in the length": (WEIGHTS, lambda p: _cut(p, 5)),
    "weights empty": (WEIGHTS, lambda p: _cut(p, 0)),
    "weights too long": (WEIGHTS, lambda p: p.write_bytes(p.read_bytes() + b"x")),
    "header not JSON": (WEIGHTS, lambda p: _flip(p, 8)),
    "header length absurd": (WEIGHTS, lambda p: p.write_bytes(struct.pack("<Q", 1 << 60) + p.read_bytes()[8:])),
    "weights gone": (WEIGHTS, lambda p: p.unlink()),
    "config cut": ("config.json", lambda p: _cut(p, 50)),
    "config not an object": ("config.json", lambda p: p.write_text("[]")),
    "config gone": ("config.json", lambda p: p.unlink()),
    "checksums cut": (CHECKSUMS, lambda p: _cut(p, 30)),
    "checksums of nothing": (CHECKSUMS, lambda p: p.write_text('{"a": 1}')),
    "config of another model": ("config.json", lambda p: p.write_text('{"model_type": "llama"}')),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("checksums", [True, False])
def test_a_damaged_file_is_named(damage, checksums, saved):
    check_checkpoint(saved, checksums)
    name, act = DAMAGE[damage]
    act(saved / name)
    if name == CHECKSUMS and not checksums:
        check_checkpoint(saved, checksums)
        return
    for attempt in (lambda: check_checkpoint(saved, checksums), lambda: load_checkpoint(saved)):
        with pytest.raises(CheckpointError) as caught:
            attempt()
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_missing_state_file_is_named_and_an_edited_card_is_not(saved):
    (saved / "README.md").write_text("my card")
    (saved / "state").mkdir()
    (saved / "state" / "optimizer.safetensors").write_bytes(b"x")
    write_checksums(saved)
    (saved / "README.md").write_text("my better card")
    check_checkpoint(saved)
    (saved / "state" / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing"):
        check_checkpoint(saved)


def test_a_missing_tensor_is_an_error_and_not_a_random_weight(saved):
    tensors = load_file(saved / WEIGHTS)
    del tensors["model.layers.0.mixer.rec"]
    save_file(tensors, saved / WEIGHTS, {"format": "pt"})
    write_checksums(saved)
    with pytest.raises(CheckpointError, match=r"of different models.*mixer\.rec"):
        load_checkpoint(saved)


def test_a_layer_too_many_is_an_error(saved):
    tensors = load_file(saved / WEIGHTS)
    more = {name.replace(".layers.0.", ".layers.7."): x.clone() for name, x in tensors.items()}
    save_file(tensors | more, saved / WEIGHTS, {"format": "pt"})
    write_checksums(saved)
    with pytest.raises(CheckpointError, match=r"of different models.*layers\.7\."):
        load_checkpoint(saved)


def test_shards_are_checked_too(tmp_path):
    LadderLM("toy", dim=16, depth=2).save_pretrained(tmp_path, max_shard_size="8KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    load_checkpoint(tmp_path)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=shards[1].name):
        load_checkpoint(tmp_path)


def test_a_run_means_its_newest_good_checkpoint(saved, caplog):
    run = saved.parent / "run"
    for step in (5, 10, 100):
        shutil.copytree(saved, run / "checkpoints" / f"step-{step:08d}")
    shutil.copytree(saved, run / "checkpoints" / "step-00000200.partial")
    assert [p.name for p in list_checkpoints(run / "checkpoints")] == [f"step-{n:08d}" for n in (5, 10, 100)]
    assert find_checkpoint(run).name == "step-00000100"
    _cut(run / "checkpoints" / "step-00000100" / WEIGHTS, 300)
    assert find_checkpoint(run).name == "step-00000010"
    assert "step-00000100/model.safetensors is truncated" in caplog.text
    assert "using step-00000010" in caplog.text
    for path in list_checkpoints(run / "checkpoints"):
        (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no good checkpoint: .*step-00000100/config\.json is missing"):
        find_checkpoint(run)


def test_what_is_no_checkpoint_says_so(tmp_path):
    for path, message in ((tmp_path / "none", "there is no folder"), (tmp_path, "neither a checkpoint .* nor a run")):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(CheckpointError, match=r"is an adapter: save the model of its merge_and_unload\(\)"):
        load_checkpoint(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="none was written yet"):
        load_checkpoint(tmp_path)


def test_load_checkpoint_gives_the_model_in_evaluation_mode_and_the_saved_dtype(saved, tmp_path):
    model = load_checkpoint(saved)
    assert (model.training, model.dtype) == (False, torch.float32)
    load_checkpoint(saved, dtype="bfloat16").save_pretrained(tmp_path / "b")
    assert load_checkpoint(tmp_path / "b").dtype == torch.bfloat16


def test_a_run_in_training_that_replaces_its_checkpoint_still_loads(saved, monkeypatch):
    folder = saved.parent / "training" / "checkpoints"
    shutil.copytree(saved, folder / "step-00000005")
    load = LadderForCausalLM.from_pretrained

    def replaced(source, **how):
        if (folder / "step-00000005").exists():
            (folder / "step-00000005").rename(folder / "step-00000010")
        return load(source, **how)

    monkeypatch.setattr(LadderForCausalLM, "from_pretrained", replaced)
    assert load_checkpoint(folder.parent).num_parameters() == load(saved).num_parameters()
