"""The decoding loop and its sampling, against the full forward and against transformers' own generate()."""

import pytest
import torch
import toy_mixers
from transformers import GenerationConfig

from elman_core.generation import Sampling, generate_bytes, generate_tokens, sample
from elman_core.generation.prefill import least_rows, prefill
from elman_core.kernels.decode.portable import kept_scores
from elman_core.kernels.runtime import invariant_linear
from elman_core.model import LadderCache, LadderLM
from elman_core.registry import ConfigError, DivergedError, list_variants

PROMPT = bytes(range(100, 117))

toys = toy_mixers.toys  # for every test here


@pytest.fixture(params=["toy", "toysum", "toypair"])
def model(request):
    ladder = LadderLM(request.param, dim=16, depth=2).double().eval()
    with torch.no_grad():
        ladder.model.embed_tokens.weight.mul_(20)  # far from uniform
    return ladder


def text(model, prompt=PROMPT, **settings):
    return bytes(row[0] for row in generate_bytes(model, prompt, **settings))


def test_greedy_bytes_are_the_argmax_of_the_full_forward(model):
    out = text(model, max_new_bytes=20, how=Sampling(temperature=0))
    assert len(out) == 20
    tokens = torch.tensor([list(PROMPT + out)])
    expected = model(tokens).logits.argmax(-1)[0, len(PROMPT) - 1 : -1]
    assert list(out) == expected.tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 12},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 0.9, "top_k": 30, "top_p": 0.8, "repetition_penalty": 1.4},
    ],
)
def test_probabilities_are_those_of_transformers(settings):
    model = LadderLM("toy", dim=16, depth=2).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(20)
    model.generation_config.eos_token_id = None
    config = GenerationConfig(
        **{"top_k": 0, **settings}, do_sample=True, max_new_tokens=40, pad_token_id=0, return_dict_in_generate=True,
        output_scores=True, output_logits=True,
    )  # fmt: skip
    made = model.generate(torch.tensor([list(PROMPT)]), generation_config=config)
    for count, (scores, logits) in enumerate(zip(made.scores, made.logits, strict=True), len(PROMPT)):
        seen = torch.zeros(1, 256, dtype=torch.bool).scatter(1, made.sequences[:, :count], True)
        ours = kept_scores(logits, seen, **Sampling(**settings).settings)
        torch.testing.assert_close(ours.softmax(-1), scores.softmax(-1))
        assert torch.equal(ours.isfinite(), scores.isfinite())


def test_prefill_in_chunks_is_prefill_at_once(model):
    cache, logits = prefill(model, PROMPT, chunk=5)
    whole, expected = prefill(model, PROMPT)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(cache.states, whole.states, strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=1e-12)


def test_a_row_of_bfloat16_has_the_same_bits_beside_any_number_of_others():
    x_RK, w_NK = torch.randn(400, 1120, dtype=torch.bfloat16), torch.randn(560, 1120, dtype=torch.bfloat16)
    with torch.inference_mode():  # with AMX, oneDNN sums 33 to 512 of them in two parts
        many = invariant_linear(x_RK, w_NK)
        assert all(
            torch.equal(invariant_linear(x_RK[:rows], w_NK), many[:rows]) for rows in (1, 2, 31, 33, 48, 130, 399)
        )


READ_ALONE = ("gdn", "mamba2", "gru", "lstm", "transformer")
"""Under a mask they compute other sums: in chunks, by packed rows of a library, or as attention."""


@pytest.mark.parametrize(
    ("variant", "dim", "lengths"),
    [
        *((name, 128 if name in ("gdn", "kda", "gdn2", "mlstm") else 64, (15, 2, 5, 6, 9)) for name in list_variants()),
        ("e88:conv_h5v256", 320, (37, 32, 36)),  # which kernels read
    ],
)
def test_on_a_cpu_a_row_has_the_same_bits_whatever_is_computed_beside_it(variant, dim, lengths):
    model = LadderLM(variant, dim=dim, depth=2).eval()
    few = least_rows(model)
    text_BT = torch.randint(256, (64, 39))
    most = max(lengths)
    with torch.inference_mode():
        states = model(text_BT[:, :2], use_cache=True).past_key_values.states

        def read(rows, steps, mask_BT=None):
            cache = LadderCache.from_states([{k: t[rows].clone() for k, t in s.items()} for s in states], 2)
            given = {"past_key_values": cache, "use_cache": True, "attention_mask": mask_BT}
            return model(text_BT[rows, 2 : 2 + steps], **given).logits, cache.states

        def compare(rows, alone, beside):
            assert torch.equal(alone[0], beside[0][rows, : alone[0].shape[1]])
            for one, all_rows in zip(alone[1], beside[1], strict=True):
                assert all(torch.equal(one[name], all_rows[name][rows]) for name in one)

        step = read(slice(64), 1)
        for rows in (slice(few), slice(64 - 3 * few, 64)):
            compare(rows, read(rows, 1), step)
        if variant not in READ_ALONE:
            padded = read(slice(64), most, torch.arange(2 + most) < 2 + torch.tensor(lengths).repeat(22)[:64, None])
            for row, length in enumerate(lengths):
                compare(slice(row, row + 1), read(slice(row, row + 1), length), padded)


def test_samples_are_independent_and_repeat_with_their_seed(model):
    how = Sampling(temperature=1.0)
    runs = [list(generate_bytes(model, PROMPT, max_new_bytes=12, num=3, how=how, seed=s)) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert len(set(zip(*runs[0], strict=True))) == 3


def test_a_sample_ends_before_its_stop_byte_and_the_others_go_on():
    model = LadderLM("toy", dim=16, depth=1).eval()
    free = list(generate_bytes(model, PROMPT, max_new_bytes=30, num=2, seed=3))
    stop = free[4][0]
    first = next(i for i, row in enumerate(free) if row[0] == stop)
    second = next((i for i, row in enumerate(free) if row[1] == stop), 30)
    stopped = list(generate_bytes(model, PROMPT, max_new_bytes=30, num=2, seed=3, stop={stop}))
    assert [row[0] for row in stopped] == [row[0] for row in free[:first]] + [None] * (len(stopped) - first)
    assert [row[1] for row in stopped[:second]] == [row[1] for row in free[:second]]
    assert len(stopped) == max(first, second)


def test_an_empty_prompt_is_the_start_of_a_document(model):
    greedy = Sampling(temperature=0)
    assert text(model, b"", max_new_bytes=8, how=greedy) == text(model, b"\x1e", max_new_bytes=8, how=greedy)
    tokens = LadderLM("toy", dim=16, depth=1, vocab_size=300, bos_token_id=None, eos_token_id=7).eval()
    torch.nn.init.normal_(tokens.model.embed_tokens.weight)
    begun, told, other = (list(generate_tokens(tokens, p, max_new_tokens=8, how=greedy)) for p in ([], [7], [30]))
    assert begun == told != other


def test_every_byte_is_text():
    model = LadderLM("toy", dim=16, depth=1).double().eval()
    greedy = Sampling(temperature=0)
    out = text(model, b"\x00\x00a\x1e\x00", max_new_bytes=10, how=greedy)
    tokens = torch.tensor([[0, 0, 97, 30, 0]])
    model.generation_config.eos_token_id = None
    config = GenerationConfig(max_new_tokens=10, pad_token_id=0)
    assert list(out) == model.generate(tokens, generation_config=config)[0, 5:].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"repetition_penalty": 1e-40},
    ],
)
def test_sampling_out_of_range_is_refused(settings):
    with pytest.raises(ConfigError, match="must be"):
        Sampling(**settings)


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-7, 1e-6])
def test_a_temperature_near_zero_takes_the_most_likely_byte(temperature):
    logits_BV = 10 * torch.randn(64, 256)
    assert torch.equal(sample(logits_BV, Sampling(temperature)), logits_BV.argmax(-1))


def test_weights_that_have_diverged_are_said():
    model = LadderLM("toy", dim=16, depth=1).eval()
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    with pytest.raises(DivergedError, match="not finite"):
        list(generate_bytes(model, b"a"))


def test_what_is_no_byte_is_refused():
    with pytest.raises(ConfigError, match="300 tokens, not 256 bytes: generate_tokens"):
        generate_bytes(LadderLM("toy", dim=16, depth=1, vocab_size=300), b"a")
    bytes_only = LadderLM("toy", dim=16, depth=1)
    for prompt, stop in (([256], ()), ("a", ()), (b"a", {256}), (b"a", {-1}), (b"a", "\n")):
        with pytest.raises(ConfigError, match=r"256 tokens, and the (prompt|stop) has"):
            generate_bytes(bytes_only, prompt, stop=stop)  # type: ignore[arg-type]
