"""generate() with a static cache records its step once and replays it; on a CPU by the recorder of cpu_graph.py."""

import pytest
import torch
from cpu_graph import CpuRecorder
from decoding_helpers import ladder

from elman_core.model import LadderForCausalLM, LadderStaticCache, step_graph
from elman_core.model.cache import CACHE
from elman_core.nn import scaled_once

PROMPT = torch.arange(2 * 9).view(2, 9) * 31 % 256


@pytest.fixture
def recorded(monkeypatch):
    """Generations record their steps as they do on a GPU; the list of the recorders that were made."""
    made = []

    def recorder(_model):
        made.append(CpuRecorder())
        return made[-1]

    monkeypatch.setattr(step_graph, "recorder_for", recorder)
    monkeypatch.setattr(
        LadderForCausalLM,
        "_valid_auto_compile_criteria",
        lambda _self, kwargs, _config: isinstance(kwargs.get(CACHE), LadderStaticCache),
    )
    return made


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("e1", {"do_sample": False}),
        ("e88", {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9}),
        ("e42", {"do_sample": False, "repetition_penalty": 1.3}),
    ],
)
def test_the_recorded_step_changes_no_token(variant, settings, recorded):
    model = ladder(variant)
    outputs = []
    for cache in (None, "static"):
        torch.manual_seed(3)
        outputs.append(
            model.generate(PROMPT, max_new_tokens=20, cache_implementation=cache, pad_token_id=0, **settings)
        )
    assert torch.equal(*outputs)
    [recorder] = recorded
    assert (recorder.records, recorder.replays) == (1, 19 - step_graph.WARM)


def test_a_left_padded_batch_and_hidden_states_are_served(recorded):
    model = ladder()
    mask = torch.ones_like(PROMPT)
    mask[1, :4] = 0
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain, static = (
        model.generate(PROMPT, attention_mask=mask, cache_implementation=cache, **settings)
        for cache in (None, "static")
    )
    assert torch.equal(plain, static)
    out = model.generate(
        PROMPT, cache_implementation="static", output_hidden_states=True, return_dict_in_generate=True, **settings
    )
    assert len(out.hidden_states) == 12
    assert recorded[-1].records == 0, "what more is asked for is not in the recording"


def test_a_model_on_several_devices_or_with_a_state_that_grows_is_not_recorded(monkeypatch):
    model = ladder()
    monkeypatch.setattr(step_graph, "CudaRecorder", lambda _device: "recorder")
    assert step_graph.recorder_for(model) is None, "not on a GPU"
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert step_graph.recorder_for(model) == "recorder"
    with monkeypatch.context() as patch:
        patch.setattr(type(model.model.layers[0].mixer), "state_growth", "per_token")
        assert step_graph.recorder_for(model) is None
    model.lm_head.to("meta")
    assert step_graph.recorder_for(model) is None


def test_who_wants_transformers_to_compile_gets_that(monkeypatch):
    model = ladder()
    monkeypatch.setattr(step_graph, "recorder_for", lambda _model: pytest.fail("it was asked for a compiler"))
    config = model._default_compile_config()
    assert model.get_compiled_call(config) is model._compiled_call


def compiled_greedily(model, cache, logits, steps=5):
    """(graphs that torch.compile made of the step, greedy tokens (B, steps + 1)), after a prompt with its cache and logits."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, _example_inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=count)
    tokens = [logits[:, -1:].argmax(-1)]
    for _ in range(steps):
        logits = step(input_ids=tokens[-1], past_key_values=cache, use_cache=True).logits
        tokens.append(logits[:, -1:].argmax(-1))
    return graphs, torch.cat(tokens, 1)


def test_a_compiled_step_is_one_graph_that_reads_the_scaled_weight_and_is_never_compiled_again():
    model = ladder("e42")
    with torch.no_grad(), scaled_once(model):
        cache = LadderStaticCache(model.config)
        logits = model(PROMPT, past_key_values=cache, use_cache=True).logits
        assert all(t._dynamo_static_input_type for layer in cache.layers for t in layer.state.values()), "no copies"
        graphs, tokens = compiled_greedily(model, cache, logits)
    assert len(graphs) == 1
    products = [n for n in graphs[0].graph.nodes if "power" in str(n.target) or str(n.target).endswith("norm")]
    assert not products, "no power iteration in the step"
    assert torch.equal(tokens, model.generate(PROMPT, max_new_tokens=6, do_sample=False)[:, 9:])
