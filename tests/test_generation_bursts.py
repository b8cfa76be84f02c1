"""`generate(custom_generate=in_bursts)`, its steps recorded and drawn in bursts: greedy tokens are those of `generate()`, drawn
ones those of the command line's loop."""

import pytest
import torch
from cpu_graph import CpuRecorder
from decoding_helpers import ladder

from elman_core.generation import Sampling, decoder, generate_tokens, in_bursts
from elman_core.registry import ConfigError

PROMPT = torch.arange(2 * 9).view(2, 9) * 31 % 256
SETTINGS = [
    {"do_sample": False},
    {"do_sample": False, "repetition_penalty": 1.3},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2},
    {"do_sample": True, "num_return_sequences": 3},
]
gpu = pytest.mark.gpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def device(request, monkeypatch):
    """On a CPU steps are recorded as on a GPU."""
    if request.param == "cpu":
        monkeypatch.setattr(decoder, "recorder_for", lambda *_: CpuRecorder())
    return request.param


def both(model, prompt, **settings):
    """Tokens by transformers' own loop, and in bursts."""
    found = []
    for custom in (None, in_bursts):
        torch.manual_seed(3)
        found.append(model.generate(prompt, pad_token_id=0, custom_generate=custom, **settings))
    return found


@pytest.mark.parametrize("settings", SETTINGS[:2], ids=str)
def test_greedy_tokens_are_those_of_generate(settings, device):
    plain, burst = both(ladder().to(device), PROMPT.to(device), max_new_tokens=30, **settings)
    assert plain.shape[1] == 39
    assert torch.equal(plain, burst)


@pytest.mark.parametrize(
    ("variant", "settings"), [*(("e42", s) for s in SETTINGS[2:]), ("e1", SETTINGS[3]), ("e88", SETTINGS[3])], ids=str
)
def test_drawn_tokens_are_those_of_the_command_line_for_a_seed_of_torch(variant, settings, device):
    model, copies = ladder(variant).to(device), settings.get("num_return_sequences", 1)
    torch.manual_seed(3)
    seed = int(torch.randint(2**63 - 1, ()))
    torch.manual_seed(3)
    burst = model.generate(
        PROMPT.to(device), max_new_tokens=30, pad_token_id=0, custom_generate=in_bursts, **{"top_k": 0, **settings}
    )
    how = Sampling(
        **{name: x for name, x in settings.items() if name in {"temperature", "top_k", "top_p", "repetition_penalty"}}
    )
    prompts = PROMPT.repeat_interleave(copies, 0).tolist()
    for number, (prompt, row) in enumerate(zip(prompts, burst.tolist(), strict=True)):
        told = generate_tokens(model, prompt, max_new_tokens=30, num=len(prompts), how=how, seed=seed)
        assert row == prompt + [each[number] for each in told]


def test_a_row_ends_at_its_token_and_is_padded(device):
    model = ladder().to(device)
    prompt = PROMPT.to(device)
    free = model.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)[:, 9:]
    for ends in ([int(free[0, 7])], [int(free[0, 12]), int(free[1, 20])]):
        plain, burst = both(model, prompt, max_new_tokens=40, do_sample=False, eos_token_id=ends)
        assert torch.equal(plain, burst)
        assert burst.shape[1] <= 9 + 40


def test_padded_prompts_and_long_ones_in_a_static_cache(device):
    model = ladder().to(device)
    mask = torch.ones_like(PROMPT)
    mask[1, :4] = 0
    for cache, chunk in ((None, None), ("static", None), (None, 2)):
        plain, burst = both(
            model,
            PROMPT.to(device),
            max_new_tokens=20,
            do_sample=False,
            attention_mask=mask.to(device),
            cache_implementation=cache,
            prefill_chunk_size=chunk,
        )
        assert torch.equal(plain, burst)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_beams": 3}, "one beam"),
        ({"return_dict_in_generate": True}, "one beam"),
        ({"do_sample": True, "min_p": 0.1}, "not MinPLogitsWarper"),
        ({"max_time": 5.0}, "not by MaxTimeCriteria"),
        ({"past_key_values": "used"}, "starts from a prompt"),
        ({"inputs_embeds": torch.zeros(2, 9, 16)}, "a prompt of tokens"),
    ],
)
def test_what_it_does_not_know_is_refused(settings, why):
    model = ladder()
    if "past_key_values" in settings:
        settings["past_key_values"] = model(PROMPT[:, :4], use_cache=True).past_key_values
    with pytest.raises(ConfigError, match=why):
        model.generate(PROMPT, max_new_tokens=5, pad_token_id=0, custom_generate=in_bursts, **settings)
