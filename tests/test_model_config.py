"""LadderConfig: what is accepted, what is expanded, and what is an error before anything is built."""

import logging

import numpy as np
import pytest
import torch
import toy_mixers

from elman_core.model import LadderConfig, LadderForCausalLM, LadderLM, LadderModel
from elman_core.registry import ConfigError, PluginError

toys = toy_mixers.toys  # for every test here


def test_a_bare_config_is_made_and_refused_when_a_model_is_built():
    config = LadderConfig()
    assert (config.vocab_size, config.norm_eps, config.tie_word_embeddings) == (256, 1e-5, True)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (255, 30, 30)
    with pytest.raises(ConfigError, match="needs a variant"):
        LadderModel(config)


def test_presets_and_level_names_are_written_as_the_variant_with_every_option(caplog):
    for name in ("toy:tight", "TOY901B", "toy"):
        config = LadderConfig(variant=name, hidden_size=16, num_hidden_layers=1, options={"width": 4})
        LadderModel(config)
        assert config.variant == "toy"
        assert config.options == {"rho": 0.9 if name == "toy" else 0.5, "width": 4}
    assert "level TOY901B is variant toy:tight" in caplog.text


def test_levels_are_said(caplog):
    with caplog.at_level(logging.WARNING):
        model = LadderLM(level=901, dim=16, depth=1)
    assert model.config.variant == "toy"
    assert "level 901 is variant toy" in caplog.text


def test_a_list_of_variants_is_one_for_each_layer():
    config = LadderConfig(
        variant=["toy:tight", "toypair", "toy"], options=[None, None, {"rho": 0.7}], hidden_size=16, num_hidden_layers=3
    )
    model = LadderModel(config)
    assert config.variant == ["toy", "toypair", "toy"]
    assert [o["rho"] for o in config.options] == [0.5, 0.9, 0.7]
    assert [type(b.mixer).__name__ for b in model.layers] == ["ToyElman", "ToyPair", "ToySilu", "ToyElman"]
    assert config.num_blocks == 4
    assert len(config.layer_types) == 3


def test_a_pattern_repeats_over_the_layers_and_options_have_the_names_of_their_variants():
    config = LadderConfig(
        variant="toy:tight*2+toypair", options={"toypair": {"rho": 0.7}}, hidden_size=16, num_hidden_layers=6
    )
    LadderModel(config)
    assert config.variant == ["toy", "toy", "toypair"] * 2
    assert [o["rho"] for o in config.options] == [0.5, 0.5, 0.7] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "toyy"}, "no variant 'toyy' is installed. Did you mean 'toy'"),
        ({"variant": "toy:tigt"}, "no preset 'tigt'. Did you mean 'tight'"),
        ({"variant": "toy", "options": {"roh": 1.0}}, "no option 'roh'. Did you mean 'rho'"),
        ({"variant": "toy", "options": {1: 1.0}}, "no option 1. Options: "),
        ({"variant": "toy", "norm_eps": 0}, "norm_eps must be greater than 0, not 0"),
        ({"variant": "toy", "initializer_range": -0.1}, "initializer_range must be at least 0, not -0.1"),
        ({"variant": "toy", "initializer_range": float("nan")}, "initializer_range must be finite, not nan"),
        ({"variant": "toy", "options": {"rho": "big"}}, "option 'rho' of variant 'toy' must be a number"),
        ({"variant": "toy", "options": {"rho": 3.0}}, "must be at most 2.0"),
        ({"variant": "toy", "rho": 0.5}, "rho is an option of toy: write LadderConfig(options={'rho': …})"),
        ({"variant": "toy", "options": [{}, {}]}, "options is a list, so variant must be a list"),
        ({"variant": ["toy"]}, "variant is a list of 1, but there are 2 layers: give one name for each layer"),
        (
            {"variant": "toy+toysum", "options": {"toysum": {}, "e2": {"rho": 0.5}}},
            "options are for 'e2', which this model does not have; write {variant: its options} for toy or toysum",
        ),
        ({"variant": ["toy", "toysum"], "options": [{}]}, "or a list of 2 dicts or None, not a list of 1"),
        (
            {"variant": "toy*2+toysum"},
            "toy*2+toysum is a pattern of 3 layers: the depth must be a multiple of it, not 2",
        ),
        ({"variant": "toy*x+toysum"}, "write layers as NAME*COUNT+NAME"),
        ({"variant": ["toy", None]}, "a variant must be a name, not None"),
        ({"variant": "toy", "hidden_size": 15}, "must be even, not 15; nearest: 14 or 16"),
        ({"variant": "toy", "hidden_size": 0}, "hidden_size must be at least 1, not 0"),
        ({"variant": "toy", "num_hidden_layers": -1}, "num_hidden_layers must be at least 1, not -1"),
    ],
)
def test_what_cannot_be_built_is_one_clear_line(settings, message):
    with pytest.raises((ConfigError, PluginError)) as caught:
        LadderForCausalLM(LadderConfig(**{"hidden_size": 16, "num_hidden_layers": 2, **settings}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_with_an_attribute_named_as_an_option_still_loads(tmp_path):
    config = LadderConfig(variant="toy", hidden_size=16, num_hidden_layers=1)
    model = LadderForCausalLM(config)
    model.config.rho = 0.5  # as an older version kept it
    model.save_pretrained(tmp_path)
    assert LadderForCausalLM.from_pretrained(tmp_path).config.options == model.config.options


def test_sizes_are_integers(tmp_path):
    model = LadderLM(
        "toy", dim=np.int64(8), depth=np.int32(1), vocab_size=np.uint16(256), options={"width": np.int64(4)}
    )
    model.save_pretrained(tmp_path)
    assert LadderConfig.from_pretrained(tmp_path).hidden_size == 8
    for wrong in ({"dim": "8"}, {"dim": 8, "depth": 1.0}, {"dim": 8, "vocab_size": None}):
        with pytest.raises(ConfigError, match="must be an integer, not"):
            LadderLM("toy", **wrong)


def test_a_size_is_refused_before_anything_is_allocated(monkeypatch):
    def no_allocation(*args, **kwargs):
        raise AssertionError("a mixer was built")

    monkeypatch.setattr(toy_mixers.ToyElman, "__init__", no_allocation)
    monkeypatch.setattr(torch.nn.Embedding, "__init__", no_allocation)
    with pytest.raises(ConfigError, match="even"):
        LadderModel(LadderConfig(variant=["toysum", "toy"], hidden_size=15, num_hidden_layers=2))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("dim", "hidden_size"), ("depth", "num_hidden_layers"), ("varient", "variant"), ("option", "options")],
)
def test_misspelt_fields_are_refused(wrong, right):
    with pytest.raises(ConfigError, match=f"no '{wrong}'; write {right}="):
        LadderConfig(**{wrong: 3})


def test_other_unknown_keywords_are_kept_as_transformers_requires():
    assert LadderConfig(my_note="x").my_note == "x"


def test_ladder_lm_is_a_constructor_over_the_causal_model():
    model = LadderLM(variant="toy", dim=16, depth=2, options={"rho": 0.5}, norm_eps=1e-6, tie_word_embeddings=False)
    assert isinstance(model, LadderForCausalLM)
    assert (model.config.options["rho"], model.config.norm_eps) == (0.5, 1e-6)
    names = set(model.state_dict())
    assert {"model.embed_tokens.weight", "model.layers.1.norm.weight", "model.norm.weight", "lm_head.weight"} <= names
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert names == set(LadderForCausalLM(model.config).state_dict())


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_its_own_starts_no_wider_than_one_over_the_root_of_its_inputs(tied):
    model = LadderLM(variant="toy", dim=64, depth=1, initializer_range=1.0, tie_word_embeddings=tied)
    assert 0.9 < model.model.embed_tokens.weight.std() < 1.1
    assert 0.9 < model.lm_head.weight.std() * (1 if tied else 8) < 1.1


def test_ladder_lm_needs_exactly_one_of_variant_and_level():
    for given in ({}, {"variant": "toy", "level": 901}):
        with pytest.raises(ConfigError, match="needs a variant, or a published level"):
            LadderLM(dim=16, depth=1, **given)
    with pytest.raises(ConfigError, match=r"rho is an option of toy: write LadderConfig\(options="):
        LadderLM("toy", dim=16, depth=1, rho=0.5)


def test_ladder_lm_loads_what_it_saved(tmp_path):
    model = LadderLM("toy", dim=16, depth=1)
    model.save_pretrained(tmp_path)
    again = LadderLM.from_pretrained(tmp_path)
    assert type(again) is LadderLM
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
