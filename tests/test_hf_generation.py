"""Every kind of state in every mode of transformers' generate() that users know."""

import contextlib
import itertools
import threading

import hf_helpers
import pytest
import torch
import torch._inductor.config
from hf_helpers import CONSTANT_MIXES, GREEDY, OF_EACH_KIND, PROMPT, TEXT, every_kind, tiny
from transformers import CompileConfig, DynamicCache, TextIteratorStreamer, pipeline

from elman_core.generation import ByteIteratorStreamer
from elman_core.model import LadderCache, byte_tokenizer
from elman_core.model.cache import CACHE
from elman_core.registry import CheckpointError, ConfigError

only_constant = pytest.mark.parametrize("variant", CONSTANT_MIXES)

no_gradients = hf_helpers.no_gradients  # for every test here


@every_kind
def test_greedy_sampling_and_beams_are_the_same_with_and_without_a_cache(variant):
    model = tiny(variant)
    for settings in (
        {"do_sample": False},
        {"do_sample": True, "num_return_sequences": 2, "top_k": 40},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
        {"do_sample": False, "guidance_scale": 1.5},
    ):
        texts = []
        for use_cache in (True, False):
            torch.manual_seed(1)
            texts.append(model.generate(PROMPT, max_new_tokens=6, use_cache=use_cache, **settings))
        assert torch.equal(*texts), settings


@every_kind
def test_padding_on_either_side_and_holes_in_a_mask_are_exact(variant):
    model = tiny(variant)
    rows = [PROMPT[0, :4], PROMPT[1, :9], PROMPT[1, :6], PROMPT[0, :5]]
    mask = torch.tensor([[0] * 5 + [1] * 4, [1] * 9, [1, 0, 1, 1, 0, 0, 1, 1, 1], [0] + [1] * 5 + [0] * 3])
    padded = torch.full((4, 9), 77)
    for row, text in enumerate(rows):
        padded[row, mask[row].bool()] = text
    embeds = model.get_input_embeddings()(padded)
    for how in ({}, {"num_beams": 2}):
        batch = model.generate(padded, attention_mask=mask, **GREEDY, **how)[:, 9:]
        of_embeds = model.generate(inputs_embeds=embeds, attention_mask=mask, **GREEDY, **how) if not how else batch
        for row, text in enumerate(rows):
            alone = model.generate(text[None], **GREEDY, **how)[0, len(text) :]
            assert torch.equal(batch[row], alone), (row, how)
            assert torch.equal(of_embeds[row], alone), (row, how)
    helped = model.generate(padded[3:], attention_mask=mask[3:], assistant_model=tiny(variant), **GREEDY)[:, 9:]
    assert torch.equal(helped, model.generate(PROMPT[:1, :5], **GREEDY)[:, 5:])
    with pytest.raises(ConfigError, match=r"^prefill_chunk_size needs padding on the left: set tokenizer.padding_side"):
        model.generate(padded, attention_mask=mask, prefill_chunk_size=4, **GREEDY)


@every_kind
def test_a_text_is_continued_from_its_cache_in_every_way(variant):
    model = tiny(variant)
    whole = model.generate(PROMPT, max_new_tokens=10, do_sample=False)
    text, masks = whole[:, :13], torch.ones(2, 13)
    masks[0, :3] = 0  # of what the state has read already
    ways = ((0, None), (8, None), (0, masks), (8, masks), (8, masks[:, 8:]))  # the first token given, and the mask
    for (begin, mask), chunk in itertools.product(ways, (None, 2)):
        given = {"past_key_values": model(text[:, :8], use_cache=True)[CACHE], "attention_mask": mask}
        given |= {"max_new_tokens": 6, "do_sample": False, "prefill_chunk_size": chunk}
        assert torch.equal(model.generate(text[:, begin:], **given)[:, -6:], whole[:, -6:]), (begin, mask, chunk)
    embedded = model.get_input_embeddings()(text)
    for seen, (begin, mask) in [*((8, way) for way in ways), (3, (3, torch.ones(2, 13)))]:
        given = {"past_key_values": model(text[:, :seen], use_cache=True)[CACHE], "attention_mask": mask}
        written = model.generate(inputs_embeds=embedded[:, begin:], max_new_tokens=6, do_sample=False, **given)
        assert torch.equal(written, whole[:, -6:]), (seen, begin, mask)


@every_kind
def test_rows_that_ended_early_are_continued_as_each_alone(variant):
    """And without a mask that says where their padding is, not at all."""
    model = tiny(variant)
    how = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 255}
    plain = model.generate(PROMPT, **how).sequences[:, 9:]
    ends = next(t for t in plain[0].tolist()[:6] if t not in plain[1].tolist()[:8])  # in the first row only, and early
    kinds = ["dynamic", "static"] if variant in CONSTANT_MIXES else ["dynamic"]
    for kind in kinds:
        how.update(cache_implementation=kind, eos_token_id=ends)
        batch = model.generate(PROMPT, **how)
        assert (batch.sequences[0, -2:] == 255).all(), "the first row has not ended early"
        more = torch.tensor([list(b" and "), list(b", or ")])
        longer = torch.cat([batch.sequences, more], 1)
        given = {**how, "cache_implementation": None, "eos_token_id": None, "max_new_tokens": 5}
        with pytest.raises(ConfigError, match=r"rows that ended are padded \(0\): give attention_mask"):
            model.generate(longer, past_key_values=batch[CACHE], **given)
        mask = (longer != 255).long()
        both = model.generate(longer, attention_mask=mask, past_key_values=batch[CACHE], **given).sequences[:, -5:]
        for row in range(2):
            text = longer[row : row + 1][:, mask[row].bool()]
            assert torch.equal(model.generate(text, **given).sequences[:, -5:], both[row : row + 1]), (kind, row)


@every_kind
def test_samples_and_beams_continue_a_state_of_one_row(variant):
    model = tiny(variant)
    for settings in ({"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3, "do_sample": False}):
        torch.manual_seed(1)
        expected = model.generate(PROMPT, max_new_tokens=6, **settings)
        cache = model(PROMPT[:, :5], use_cache=True)[CACHE]
        torch.manual_seed(1)
        assert torch.equal(model.generate(PROMPT, past_key_values=cache, max_new_tokens=6, **settings), expected)


def test_continuous_batching_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="pages keys and values"):
        tiny("e42").generate_batch([PROMPT[0].tolist()], max_new_tokens=4)


@every_kind
def test_prompts_in_chunks_as_embeddings_and_into_an_empty_foreign_cache_are_the_same_prompt(variant):
    model = tiny(variant)
    whole = model.generate(PROMPT, **GREEDY)
    assert torch.equal(model.generate(PROMPT, prefill_chunk_size=4, **GREEDY), whole)
    assert torch.equal(model.generate(PROMPT, past_key_values=DynamicCache(), **GREEDY), whole)
    embedded = model.get_input_embeddings()(PROMPT)
    assert torch.equal(model.generate(inputs_embeds=embedded, **GREEDY), whole[:, 9:])
    with pytest.raises(ConfigError, match="leave it out with inputs_embeds"):
        model.generate(inputs_embeds=embedded, prefill_chunk_size=4, **GREEDY)
    for given in ({}, {"input_ids": PROMPT[:1]}):
        with pytest.raises(ConfigError, match="leave them out with inputs_embeds"):
            model.generate(inputs_embeds=embedded[:1], prompt_lookup_num_tokens=3, **given, **GREEDY)


@every_kind
def test_prompt_lookup_and_assisted_decoding_change_no_token_and_leave_the_right_state(variant):
    model, assistant = tiny(variant), tiny(variant.partition("+")[0], depth=1, seed=1)
    prompt = torch.tensor([list(TEXT[:40])])
    plain = model.generate(prompt, max_new_tokens=12, do_sample=False)
    ways = (
        {"prompt_lookup_num_tokens": 3},
        {"prompt_lookup_num_tokens": 90},
        {"assistant_model": assistant},
        {"assistant_model": model},
    )
    for way in ways:
        out = model.generate(prompt, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **way)
        assert torch.equal(out.sequences, plain), way
        cache = out.past_key_values
        expected = model(plain[:, : int(cache.get_seq_length())], use_cache=True).past_key_values
        for have, want in zip(cache.states, expected.states, strict=True):
            for name in want:
                torch.testing.assert_close(have[name], want[name], rtol=1e-9, atol=1e-9)
        for begin, mask in ((40, None), (40, torch.ones(1, 4)), (40, torch.arange(44)[None] > 2), (0, None)):
            given = {"past_key_values": model(plain[:, :40], use_cache=True).past_key_values, "attention_mask": mask}
            refused = pytest.raises(ConfigError, match="leave out the 40") if begin == 0 else contextlib.nullcontext()
            with refused:
                more = model.generate(plain[:, begin:44], max_new_tokens=8, do_sample=False, **given, **way)
                assert torch.equal(more[:, -8:], plain[:, -8:]), (way, mask)


def test_drafts_change_no_token_in_training_mode():
    model = tiny("e42").train()
    assert torch.equal(
        model.generate(PROMPT[:1], prompt_lookup_num_tokens=3, **GREEDY), model.generate(PROMPT[:1], **GREEDY)
    )


@pytest.mark.parametrize(
    ("variant", "free"), [("transformer", (0, 1)), ("gdn", (0, 1)), ("lstm", (0,)), ("e42", (0,)), ("e88", (0,))]
)
def test_an_exported_model_takes_other_sizes(variant, free):
    model, text = tiny(variant, dtype=torch.float32), PROMPT.repeat(2, 1)
    sizes = {"input_ids": dict.fromkeys(free, torch.export.Dim.DYNAMIC), "use_cache": None}
    given = {"input_ids": PROMPT, "use_cache": False}
    exported = torch.export.export(model, (), given, dynamic_shapes=sizes, strict=False).module()
    other = text[:3, :7] if 1 in free else text[:3]
    torch.testing.assert_close(exported(input_ids=other, use_cache=False).logits, model(other).logits)


@pytest.mark.parametrize("variant", OF_EACH_KIND)
def test_a_traced_model_takes_masks_and_packed_rows(variant):
    model, mask = tiny(variant, depth=1, dtype=torch.float32), torch.ones_like(PROMPT)
    mask[0, :3] = 0
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    torch._dynamo.reset()
    traced = torch.compile(model, backend="eager")
    for given in ({"attention_mask": mask}, {"position_ids": positions}):
        torch.testing.assert_close(traced(PROMPT, **given).logits, model(PROMPT, **given).logits)


@only_constant
def test_a_static_cache_changes_no_token(variant):
    model = tiny(variant)
    for settings in (GREEDY, {**GREEDY, "num_beams": 3}):
        assert torch.equal(
            model.generate(PROMPT, cache_implementation="static", **settings), model.generate(PROMPT, **settings)
        )


@pytest.mark.parametrize("kind", ["quantized", "offloaded"])
def test_caches_that_mean_nothing_here_are_refused(kind):
    with pytest.raises(ConfigError, match="constant in size"):
        tiny("e42").generate(PROMPT, cache_implementation=kind, **GREEDY)


def compiled_steps(variant, backend):
    """Tokens written with and without compilation of the decoding step, which may not be compiled a second time."""
    model = tiny(variant, depth=len(variant.split("+")), dtype=torch.float32)
    expected = model.generate(PROMPT, cache_implementation="static", **GREEDY)
    how = CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode="default")
    how._compile_all_devices = True  # without it transformers compiles on GPUs alone
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = model.generate(PROMPT, cache_implementation="static", compile_config=how, **GREEDY)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "the step was not compiled"
    return got, expected


@only_constant
def test_a_decoding_step_is_one_graph_that_is_never_compiled_again(variant):
    assert torch.equal(*compiled_steps(variant, "aot_eager"))


@pytest.mark.slow
def test_a_decoding_step_goes_through_inductor():
    """Compiled in this process and without vector instructions, whose headers take most of the time of g++."""
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False}):
        got, expected = compiled_steps("e42", "inductor")
    assert torch.equal(got, expected)


@every_kind
def test_stop_strings_end_a_text_and_streamers_show_it_as_it_comes(variant):
    model, tokenizer = tiny(variant), byte_tokenizer()
    prompt = tokenizer("the quick", return_tensors="pt")
    text = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    new = bytes(text[0, 9:].tolist())
    ascii_bytes = [i for i, b in enumerate(new) if 32 < b < 127]
    stop = chr(new[ascii_bytes[0]]) if ascii_bytes else "\x1e"
    stopped = model.generate(**prompt, max_new_tokens=24, do_sample=False, stop_strings=[stop], tokenizer=tokenizer)
    expected = 9 + ascii_bytes[0] + 1 if ascii_bytes else 33
    assert stopped.shape[1] <= expected
    assert torch.equal(stopped[0], text[0, : stopped.shape[1]])
    for streamer in (ByteIteratorStreamer(skip_prompt=True), TextIteratorStreamer(tokenizer, skip_prompt=True)):
        settings = {**prompt, "max_new_tokens": 24, "do_sample": False, "streamer": streamer}
        thread = threading.Thread(target=model.generate, kwargs=settings)
        thread.start()
        shown = "".join(streamer)
        thread.join()
        assert shown == new.decode("utf-8", "replace")


@only_constant
def test_the_state_of_a_generation_goes_through_a_file(variant, tmp_path):
    model = tiny(variant)
    whole = model.generate(PROMPT, max_new_tokens=10, do_sample=False)
    first = model.generate(PROMPT, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    first.past_key_values.save(tmp_path / "short")
    cache = LadderCache.load(tmp_path / "short", model.config)
    second = model.generate(first.sequences[:, -1:], past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(second[:, 1:], whole[:, -6:])
    longer = model(PROMPT.repeat(1, 20), use_cache=True).past_key_values
    longer.save(tmp_path / "long")
    header = 64  # the count of tokens seen has more digits
    assert abs((tmp_path / "long").stat().st_size - (tmp_path / "short").stat().st_size) <= header
    with pytest.raises(CheckpointError, match="another model"):
        LadderCache.load(tmp_path / "short", tiny(variant, depth=2 * len(model.model.layers)).config)
    with pytest.raises(CheckpointError, match="missing"):
        LadderCache.load(tmp_path / "nothing")
    (tmp_path / "cut").write_bytes((tmp_path / "long").read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"):
        LadderCache.load(tmp_path / "cut")
    with pytest.raises(ConfigError, match="empty"):
        LadderCache(model.config).save(tmp_path / "empty")


@every_kind
def test_a_pipeline_writes_single_batched_and_streamed_text(variant, tmp_path):
    tiny(variant, dtype=torch.float32).save_pretrained(tmp_path)
    writer = pipeline("text-generation", model=str(tmp_path), device="cpu")
    writer.model.generation_config.eos_token_id = None
    single = [writer(text, **GREEDY)[0]["generated_text"] for text in ("abc", "a longer one")]
    batch = writer(["abc", "a longer one"], batch_size=2, **GREEDY)
    assert [row[0]["generated_text"] for row in batch] == single
    assert single[0].startswith("abc")
    streamer = ByteIteratorStreamer()
    writer("abc", streamer=streamer, **GREEDY)
    assert "".join(streamer).translate({0x1E: None, 0: None}) == single[0]  # a pipeline leaves these two out


@only_constant
def test_every_step_costs_the_same_work(variant):
    """Counted, not timed: the state neither grows nor is anything recomputed."""
    model, sizes, calls = tiny(variant), set(), []
    for block in model.model.layers:
        block.mixer.register_forward_hook(lambda _m, args, _o: calls.append(args[0].shape[1]))
    for length in (3, 60):
        del calls[:]
        out = model.generate(PROMPT[:, :3].repeat(1, length // 3), return_dict_in_generate=True, **GREEDY)
        assert calls[len(model.model.layers) :] == [1] * (7 * len(model.model.layers))
        sizes.add(sum(t.numel() for s in out.past_key_values.states for t in s.values()))
    assert len(sizes) == 1
