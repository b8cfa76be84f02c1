"""Settings: one tree, checked leaf by leaf, from TOML and from the command line."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.cuda._utils import _get_device_index as strict

from elman_core.cli.train import read_settings
from elman_core.registry import ConfigError
from elman_core.training.precision import pick_device
from elman_core.training.settings import (
    apply_sets,
    from_dict,
    known_keys,
    put,
    read_recipe,
    resolve,
)

# Decided once: recipes and scripts rely on them.
FROZEN = {
    "model": ("variant", "options", "hidden_size", "num_hidden_layers"),
    "data": ("path", "sampling", "documents", "heldout"),
    "train": ("batch_size", "chunk_size", "steps", "lr", "warmup", "schedule", "optimizer", "weight_decay", "clip",
              "accumulate", "precision", "seed", "save_every", "eval_every", "log_every"),
}  # fmt: skip


def test_the_names_that_recipes_rely_on_exist():
    assert {f"{table}.{name}" for table, names in FROZEN.items() for name in names} <= set(known_keys())


def test_a_recipe_survives_a_round_trip():
    tree = {"model": {"variant": "e42", "options": {"expansion": 2.0}}, "train": {"lr": 0.01, "minutes": 2.5}}
    assert from_dict(from_dict(tree).to_dict()) == from_dict(tree)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("train.learning_rate", "'train.lr'"), ("train.stesp", "'train.steps'"), ("lr", "'train.lr'"), ("trian.lr", "'train.lr'"),
     ("model.lr", "'train.lr'"), ("data.heldut", "'data.heldout'")],
)  # fmt: skip
def test_an_unknown_key_is_an_error_with_a_suggestion(key, meant):
    with pytest.raises(ConfigError, match=f"no setting '{key}'.*{meant}"):
        apply_sets({}, [f"{key}=1"])


@pytest.mark.parametrize("key", ["expansion", "model.expansion", "options.expansion"])
def test_an_option_of_the_variant_is_told_where_it_stands(key):
    with pytest.raises(ConfigError, match=rf"no setting '{key}'\. Did you mean 'model\.options\.expansion'"):
        apply_sets({"model": {"variant": "e42:radius099"}}, [f"{key}=2"])
    with pytest.raises(ConfigError, match=r"Did you mean 'model\.options\.expansion'"):
        from_dict({"model": {"variant": "e42", "expansion": 2}})


def test_an_unknown_key_in_a_recipe_blames_the_recipe(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("[train]\nstpes = 3\n")
    with pytest.raises(ConfigError, match=r"r\.toml: there is no setting 'train\.stpes'\. Did you mean 'train\.steps'"):
        from_dict(read_recipe(path), f"{path}: ")


def test_values_are_toml_and_bare_words_are_text():
    sets = [
        "train.lr=3e-4",
        "train.schedule=cosine",
        "data.path='a b'",
        "model.options.n=[1, 2]",
        "model.options.e1.use_conv=true",
    ]
    tree = apply_sets({}, [*sets, "train.gradient_checkpointing=true"])
    assert tree == {
        "train": {"lr": 3e-4, "schedule": "cosine", "gradient_checkpointing": True},
        "data": {"path": "a b"},
        "model": {"options": {"n": [1, 2], "e1": {"use_conv": True}}},
    }


@pytest.mark.parametrize("text", ["train.lr", "train.lr=[1", "data.path=a b"])
def test_what_is_not_an_assignment_of_toml_is_an_error(text):
    with pytest.raises(ConfigError):
        apply_sets({}, [text])


@pytest.mark.parametrize(
    "wrong",
    ["train.lr='fast'", "train.lr=-1", "train.lr=true", "train.batch_size=1.5", "train.optimizer=sgd", "data.heldout=0.9",
     "train.beta1=1.0", "train.steps=-1", "train.seed=9223372036854775808", f"train.lr=1{400 * '0'}"],
)  # fmt: skip
def test_a_wrong_value_names_its_key(wrong):
    with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
        from_dict(apply_sets({}, [wrong]))


def test_an_option_beside_what_is_no_table_of_options_is_an_error():
    for options, key in (([{}, {}], "n"), ("abc", "n"), ({"e88": 5}, "e88.n")):
        with pytest.raises(ConfigError, match=r"model\.options(\.e88)? is no table of options, but "):
            apply_sets({"model": {"options": options}}, [f"model.options.{key}=1"])


def test_applying_sets_leaves_the_tree_it_got_alone():
    tree = {"model": {"options": {"a": 1}}, "train": {"lr": 1.0}}
    put(copied := apply_sets(tree, ["train.lr=2.0"]), "model.options.a", 2)
    assert tree == {"model": {"options": {"a": 1}}, "train": {"lr": 1.0}}
    assert copied["model"]["options"]["a"] == 2


def resolved(*sets, device="cpu", bf16=False):
    return resolve(from_dict(apply_sets({}, sets)), device, bf16).train


@pytest.mark.parametrize("documents", ["keep", "pack"])
def test_tokens_are_places_of_rows_whether_they_are_filled_or_not(documents):
    sets = ["train.batch_size=4", "train.chunk_size=64", f"data.documents={documents}"]
    assert read_settings("e42", "FILE", tokens=20_000, sets=sets).train.steps == 79


def test_what_is_left_open_is_decided():
    train = resolved()
    assert (train.steps, train.warmup, train.schedule, train.precision) == (1000, 100, "cosine", "fp32")
    assert resolved("train.steps=40").warmup == 4
    assert resolved("train.minutes=1.0").schedule == "wsd"
    assert resolved("train.minutes=1.0").steps is None
    assert resolved("train.optimizer=schedulefree").schedule == "constant"
    assert resolved(device="cuda", bf16=True).precision == "bf16"
    assert resolved("train.precision=fp32", device="cuda", bf16=True).precision == "fp32"
    assert resolved("train.warmup=0").warmup == 0


@pytest.mark.parametrize(
    "sets",
    [("train.steps=5", "train.minutes=1.0"), ("train.accumulate=3",), ("data.documents=reset",),
     ("train.optimizer=schedulefree", "train.schedule=cosine"), ("train.minutes=1.0", "train.schedule=cosine")],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(sets):
    with pytest.raises(ConfigError):
        resolved(*sets)


def test_the_reference_of_settings_is_the_code():
    root = Path(__file__).parent.parent
    spec = importlib.util.spec_from_file_location("settings_page", root / "docs" / "settings.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert (root / "docs" / "reference" / "settings.md").read_text(encoding="utf-8") == page.render(), "type: make docs"


def test_every_setting_says_what_it_is():
    from dataclasses import fields

    from elman_core.training.settings import TABLES

    assert all(f.metadata.get("help") for kind in TABLES.values() for f in fields(kind))


# which device a name means, without one ------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, of which this process has used none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


@pytest.mark.parametrize(("name", "number"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_has_its_number_which_torch_asks_for(name, number, gpus):
    """`set_per_process_memory_fraction` and `set_device` refuse one without."""
    with pytest.raises(ValueError, match="with a specified index"):
        strict(torch.device("cuda"))
    assert strict(pick_device(name)) == number


def test_it_is_the_one_that_the_process_has_made_its_own(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert pick_device("cuda") == torch.device("cuda", 1)
    assert pick_device("cuda:0") == torch.device("cuda", 0)


def test_a_gpu_that_is_not_there_is_a_mistake(gpus):
    with pytest.raises(ConfigError, match="has 2 CUDA devices"):
        pick_device("cuda:2")
    assert pick_device("cpu") == torch.device("cpu")
