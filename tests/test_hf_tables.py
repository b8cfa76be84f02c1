"""What the installed transformers decides by a class's name, or by names of arguments, and what ours get from it."""

import inspect
import re
from dataclasses import fields

import pytest
import torch
from hf_helpers import PROMPT, every_kind, tiny
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, StaticCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.auto import modeling_auto

from elman_core.model import (
    LadderCache,
    LadderConfig,
    LadderForCausalLM,
    LadderForSequenceClassification,
    LadderForTokenClassification,
    LadderModel,
    LadderStaticCache,
    RecurrentLayer,
)

MODELS = {
    "MODEL": LadderModel,
    "MODEL_FOR_CAUSAL_LM": LadderForCausalLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": LadderForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION": LadderForTokenClassification,
}
NOT_OURS = {"MODEL_FOR_QUESTION_ANSWERING", "CONFIG"}  # a head that no ladder has, and the table of modules to import


def test_ours_are_in_every_table_of_names_that_a_causal_model_is_in():
    tables = {
        n.removesuffix("_MAPPING_NAMES"): t for n, t in vars(modeling_auto).items() if n.endswith("_MAPPING_NAMES")
    }
    of_a_causal_model = {name for name, table in tables.items() if "llama" in table} - NOT_OURS
    assert of_a_causal_model == set(MODELS)
    for name, model in MODELS.items():
        assert tables[name]["elman_ladder"] == model.__name__
        assert getattr(modeling_auto, f"{name}_MAPPING")[LadderConfig] is model


@pytest.mark.parametrize("head", MODELS.values())
def test_the_loss_and_the_name_of_a_class_are_those_of_its_subclasses(head):
    config = tiny("e42").config
    mine = type("Judge", (head,), {})(config)
    wanted = head(config).loss_type
    assert mine.loss_type == wanted
    if head is not LadderModel:
        assert LOSS_MAPPING[wanted] is LOSS_MAPPING[head.__name__.removeprefix("Ladder")]
    assert head is not LadderForCausalLM or mine._get_name() == "LadderForCausalLM"  # Trainer looks it up


@pytest.mark.parametrize("head", [h for h in MODELS.values() if h is not LadderModel])
def test_trainer_keeps_the_columns_that_a_model_reads_and_leaves_the_loss_to_it(head):
    taken = inspect.signature(head.forward).parameters
    assert {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels"} <= set(taken)
    assert any(p.kind is p.VAR_KEYWORD for p in taken.values())  # so Trainer passes num_items_in_batch


def test_generate_finds_the_arguments_that_it_looks_for_by_name():
    asked = set(re.findall(r'"(\w+)" (?:not )?in set\(\s*inspect\.signature', inspect.getsource(GenerationMixin)))
    ours = (LadderForCausalLM.forward, LadderForCausalLM.prepare_inputs_for_generation)
    found = {name for method in ours for name in inspect.signature(method).parameters}
    assert {"attention_mask", "inputs_embeds", "position_ids", "logits_to_keep"} <= asked & found
    assert asked - found <= {
        "cache_position",
        "mm_encoder_outputs",
        "encoder_outputs",
    }  # of code and inputs that are not ours


def test_no_keyword_of_from_pretrained_is_a_field_of_the_config_but_variant():
    asked = set(re.findall(r'kwargs\.pop\("(\w+)"', inspect.getsource(PreTrainedModel.from_pretrained)))
    asked |= set(inspect.signature(PreTrainedModel.from_pretrained).parameters)
    own = {f.name for f in fields(LadderConfig)} - {f.name for f in fields(PreTrainedConfig)}
    assert "variant" in asked, "the keywords are found otherwise now"
    assert asked & own == {"variant"}  # which `LadderConfig.from_dict` leaves alone


def test_caches_take_the_arguments_and_have_the_methods_of_transformers():
    for ours, theirs in ((LadderCache, DynamicCache), (LadderStaticCache, StaticCache)):
        mine = inspect.signature(ours).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in mine.values()):
            wanted = {
                n for n, p in inspect.signature(theirs).parameters.items() if p.default is inspect.Parameter.empty
            }
            assert wanted <= set(mine)
    for ours, theirs in ((RecurrentLayer, CacheLayerMixin), (LadderCache, Cache)):
        for name, method in inspect.getmembers(theirs, inspect.isfunction):
            if name.startswith("_") or (name in vars(theirs) and getattr(ours, name) is method):
                continue
            mine = inspect.signature(getattr(ours, name)).parameters
            free = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in mine.values())
            needed = len([p for p in mine.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD])
            assert free or needed <= len(inspect.signature(method).parameters), name


@every_kind
@torch.no_grad()
def test_a_variant_of_the_weights_loads_through_every_class(variant, tmp_path):
    model = tiny(variant, dtype=torch.float32)
    model.save_pretrained(tmp_path, variant="fp16")
    for both in (False, True):
        if both:
            tiny(variant, dtype=torch.float32, seed=1).save_pretrained(tmp_path)
        for cls in (LadderForCausalLM, AutoModelForCausalLM):
            loaded = cls.from_pretrained(tmp_path, variant="fp16").eval()
            assert torch.equal(loaded(PROMPT).logits, model(PROMPT).logits), (cls, both)
            assert loaded.config.variant == model.config.variant
    head = AutoModelForSequenceClassification.from_pretrained(tmp_path, variant="fp16", num_labels=2)
    assert torch.equal(head.model.embed_tokens.weight, model.model.embed_tokens.weight)
