"""Modes of transformers' generate() beside those of `test_hf_generation.py`, on a stack of different mixers."""

import pytest
import torch
import toy_mixers

from elman_core.model import LadderLM
from elman_core.registry import ConfigError

PROMPT = torch.arange(2 * 9).view(2, 9) * 31 % 256
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def build(variant, seed=0, depth=3):
    torch.manual_seed(seed)
    model = LadderLM(variant, dim=16, depth=depth).double().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(20)  # far from uniform
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(autouse=True)
def toys():
    toy_mixers.install()
    with torch.no_grad():
        yield
    toy_mixers.uninstall()


@pytest.fixture
def model():
    return build(["toy", "toypair", "toysum"])


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3, "do_sample": True, "top_k": 20},
        {"do_sample": False, "guidance_scale": 1.5},
        {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
)
def test_a_cache_changes_no_token(model, settings):
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        outputs.append(model.generate(PROMPT, max_new_tokens=10, use_cache=use_cache, **settings))
    assert torch.equal(*outputs)


def test_left_padded_rows_under_beam_search_are_the_single_rows_and_zero_bytes_are_text(model):
    rows = [PROMPT[0] * (torch.arange(9) % 4 != 0), PROMPT[1, :4], PROMPT[1, :1]]
    padded = torch.stack([torch.nn.functional.pad(r, (9 - len(r), 0), value=77) for r in rows])
    mask = torch.stack([(torch.arange(9) >= 9 - len(r)).long() for r in rows])
    out = model.generate(padded, attention_mask=mask, num_beams=3, **GREEDY)
    for row, got in zip(rows, out, strict=True):
        assert torch.equal(model.generate(row[None], num_beams=3, **GREEDY)[0, len(row) :], got[9:])


# assisted decoding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assistant", ["itself", "another"])
@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
def test_assisted_decoding_changes_no_token(model, assistant, schedule):
    helper = model if assistant == "itself" else build(["toysum", "toy"], seed=5, depth=2)
    helper.generation_config.num_assistant_tokens_schedule = schedule
    helper.generation_config.num_assistant_tokens = 6
    expected = model.generate(PROMPT[:1], max_new_tokens=40, do_sample=False)
    out = model.generate(PROMPT[:1], assistant_model=helper, max_new_tokens=40, do_sample=False)
    assert torch.equal(out, expected)


def test_an_assistant_that_is_always_right_may_run_far_ahead():
    model = build("toysum", depth=1)
    model.generation_config.num_assistant_tokens_schedule = "heuristic"  # two more candidates each time
    model.generation_config.num_assistant_tokens = 60
    model.generation_config.assistant_confidence_threshold = 0.0
    expected = model.generate(PROMPT[:1], max_new_tokens=300, do_sample=False)
    assert torch.equal(model.generate(PROMPT[:1], assistant_model=model, max_new_tokens=300, do_sample=False), expected)


# static caches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["quantized", "offloaded"])
def test_caches_that_mean_nothing_here_are_refused(model, kind):
    with pytest.raises(ConfigError, match="constant in size"):
        model.generate(PROMPT, cache_implementation=kind, **GREEDY)
