"""The caches: pieces equal the whole, rows can be moved about, tokens can be taken back."""

import copy
import pickle

import pytest
import torch
import toy_mixers
from transformers import DynamicCache, StaticCache

from elman_core.model import LadderCache, LadderLM, LadderStaticCache, RecurrentLayer, adopt
from elman_core.model.rollback import LIMIT, WINDOW
from elman_core.registry import ConfigError

STACKS = ("toy", "toysum", "toypair", ["toy", "toypair", "toysum"])
TOKENS = torch.arange(39).view(3, 13) * 29 % 256
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def toys():
    toy_mixers.install()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    toy_mixers.uninstall()


@pytest.fixture(params=STACKS, ids=["toy", "toysum", "toypair", "mixed"])
def model(request):
    return LadderLM(request.param, dim=16, depth=3).double().eval()


def same(cache, other):
    assert cache.get_seq_length() == other.get_seq_length()
    for a, b in zip(cache.states, other.states, strict=True):
        assert (a or {}).keys() == (b or {}).keys()
        for name in a or {}:
            torch.testing.assert_close(a[name], b[name], **EXACT)


def after(model, tokens, **kwargs):
    return model(tokens, use_cache=True, **kwargs).past_key_values


@pytest.mark.parametrize("make", [LadderCache, LadderStaticCache])
def test_pieces_equal_the_whole(model, make):
    cache = make(model.config)
    pieces = [model(p, past_key_values=cache).logits for p in TOKENS.split([5, 1, 5, 2], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(TOKENS).logits, **EXACT)
    assert int(cache.get_seq_length()) == 13
    assert isinstance(cache, DynamicCache if make is LadderCache else StaticCache)


def test_rows_are_reordered_repeated_and_selected(model):
    rest = TOKENS[:, 9:]
    for act, rows in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
    ):
        cache = after(model, TOKENS[:, :9])
        act(cache)
        assert cache.batch_size == len(rows)
        out = model(rest[rows], past_key_values=cache).logits
        torch.testing.assert_close(out, model(TOKENS[rows]).logits[:, 9:], **EXACT)


def test_a_static_cache_keeps_its_addresses(model):
    cache = LadderStaticCache(model.config, max_cache_len=100)
    model(TOKENS[:, :4], past_key_values=cache)
    where = [t.data_ptr() for s in cache.states for t in s.values()]
    model(TOKENS[:, 4:5], past_key_values=cache)
    cache.reorder_cache(torch.tensor([1, 0, 2]))
    swapped = TOKENS[[1, 0, 2]]
    out = model(swapped[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(out, model(swapped).logits[:, 5:], **EXACT)
    assert where == [t.data_ptr() for s in cache.states for t in s.values()]


def test_a_static_cache_refuses_a_state_that_grows():
    layer = RecurrentLayer(static=True)
    layer.set({"keys": torch.zeros(2, 3)}, 3)
    with pytest.raises(ConfigError, match="constant size, and one batch size"):
        layer.set({"keys": torch.zeros(2, 4)}, 1)


@pytest.mark.parametrize("make", [LadderCache, LadderStaticCache])
def test_a_reset_cache_starts_again(model, make):
    cache = make(model.config)
    model(TOKENS, past_key_values=cache)
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    torch.testing.assert_close(model(TOKENS, past_key_values=cache).logits, model(TOKENS).logits, **EXACT)


@pytest.mark.parametrize("through", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copied_cache_continues_the_same(model, through):
    cache = after(model, TOKENS[:, :6])
    other = through(cache)
    a, b = (model(TOKENS[:, 6:], past_key_values=c).logits for c in (cache, other))
    assert torch.equal(a, b)


# foreign caches -------------------------------------------------------------------------------------------------------


def test_an_empty_foreign_cache_is_refitted_in_place(model):
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        first = model(TOKENS[:, :6], past_key_values=cache)
        assert first.past_key_values is cache
        assert all(isinstance(layer, RecurrentLayer) for layer in cache.layers)
        out = model(TOKENS[:, 6:], past_key_values=cache).logits
        torch.testing.assert_close(out, model(TOKENS).logits[:, 6:], **EXACT)


def test_a_cache_of_another_model_is_refused(model):
    used = DynamicCache()
    used.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    for cache in (used, LadderCache(num_blocks=9)):
        with pytest.raises(ConfigError, match="another model's state"):
            model(TOKENS, past_key_values=cache)
    with pytest.raises(ConfigError, match="must be a Cache"):
        adopt((1, 2), 3)


# taking tokens back ---------------------------------------------------------------------------------------------------


def test_cropped_tokens_were_never_there(model):
    cache = LadderCache(model.config)
    cache.activate_past_recording()
    model(TOKENS[:, :5], past_key_values=cache)
    for wrong, good in ((4, 1), (3, 0), (1, 2), (0, 1)):  # taken back, and then really read
        seen = cache.get_seq_length()
        model(TOKENS[:, :wrong] + 1, past_key_values=cache) if wrong else None
        cache.crop(-wrong)
        assert cache.get_seq_length() == seen
        if good:
            out = model(TOKENS[:, seen : seen + good], past_key_values=cache).logits
            torch.testing.assert_close(out, model(TOKENS).logits[:, seen : seen + good], **EXACT)
    same(cache, after(model, TOKENS[:, : cache.get_seq_length()]))


def test_a_part_of_a_forward_is_taken_back_and_masks_are_remembered(model):
    mask = torch.ones(3, 13, dtype=torch.long)
    mask[0, [0, 1, 6]] = mask[2, 4] = 0
    cache = LadderCache(model.config)
    cache.activate_past_recording()
    model(TOKENS[:, :4], attention_mask=mask[:, :4], past_key_values=cache)
    model(TOKENS[:, 4:12], attention_mask=mask[:, :12], past_key_values=cache)
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([2, 1, 0]))
    swapped, swapped_mask = TOKENS.flip(0), mask.flip(0)
    out = model(swapped[:, 9:], attention_mask=swapped_mask, past_key_values=cache).logits
    expected = model(swapped, attention_mask=swapped_mask).logits[:, 9:]
    torch.testing.assert_close(out, expected, **EXACT)
    same(cache, after(model, swapped, attention_mask=swapped_mask))


def test_a_long_prompt_leaves_only_its_end_recorded(model):
    long = torch.arange(WINDOW + 40)[None] * 7 % 256
    cache = LadderCache(model.config)
    cache.activate_past_recording()
    torch.testing.assert_close(model(long, past_key_values=cache).logits, model(long).logits, **EXACT)
    with pytest.raises(ConfigError, match=f"cannot undo {WINDOW + 1} tokens: only {WINDOW} are recorded"):
        cache.crop(-WINDOW - 1)
    cache.crop(-WINDOW)
    out = model(long[:, 40:], past_key_values=cache).logits
    torch.testing.assert_close(out, model(long).logits[:, 40:], **EXACT)


def test_what_is_recorded_is_bounded():
    model = LadderLM(["toy", "toysum"], dim=4, depth=2).double().eval()
    cache = LadderCache(model.config)
    cache.activate_past_recording()
    tokens = torch.arange(LIMIT + 60)[None] * 7 % 256
    for piece in tokens.split(WINDOW, dim=1):
        model(piece, past_key_values=cache)
    assert all(layer.tape.inputs[0].shape[1] <= LIMIT for layer in cache.layers)
    cache.crop(-WINDOW)
    out = model(tokens[:, -WINDOW:], past_key_values=cache).logits
    torch.testing.assert_close(out, model(tokens).logits[:, -WINDOW:], **EXACT)


def test_what_cannot_be_taken_back_says_so(model):
    cache = after(model, TOKENS)
    with pytest.raises(ConfigError, match="call activate_past_recording"):
        cache.crop(-1)
    with pytest.raises(ConfigError, match="negative number, not 3"):
        cache.crop(3)
    with pytest.raises(ConfigError, match="static cache cannot undo tokens"):
        LadderStaticCache(model.config).activate_past_recording()


def test_recording_can_be_turned_off(model):
    cache = LadderCache(model.config)
    cache.activate_past_recording()
    model(TOKENS[:, :6], past_key_values=cache)
    cache.crop(-2)
    for layer in cache.layers:
        layer.record_past = False
    model(TOKENS[:, 4:8], past_key_values=cache)
    model(TOKENS[:, 8:], past_key_values=cache)
    assert all(layer.tape is None for layer in cache.layers)
    same(cache, after(model, TOKENS))
