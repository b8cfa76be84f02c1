"""Decoding as a recorded step gives the bytes of the plain loop, on a recorder that does on a CPU what a CUDA graph does."""

import gc
import weakref
from contextlib import nullcontext
from math import ceil

import pytest
import torch
from cpu_graph import CpuRecorder
from decoding_helpers import ladder

from elman_core.generation import Sampling, decoder, generate_bytes
from elman_core.generation import loop as loop_module
from elman_core.model import LadderLM
from elman_core.nn import SpectralNorm
from elman_core.registry import DivergedError

PROMPT = bytes(range(100, 117))


@pytest.fixture
def recorded(monkeypatch):
    """Generation with its step recorded; the list of the recorders that were made."""
    made = []

    def recorder(*_):
        made.append(CpuRecorder())
        return made[-1]

    def use(on):
        monkeypatch.setattr(decoder, "recorder_for", recorder if on else lambda *_: None)
        return made

    return use


SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.8, "repetition_penalty": 1.4},
    {"temperature": 1.0, "top_p": 0.6},
]


@pytest.mark.parametrize(
    ("variant", "num", "how"), [("e42", 3, SAMPLINGS[1]), ("e1", 1, SAMPLINGS[0]), ("e88", 2, SAMPLINGS[2])]
)
def test_the_recorded_step_gives_the_bytes_of_the_plain_loop(variant, num, how, recorded):
    model = ladder(variant)
    settings = {"max_new_bytes": 45, "num": num, "how": Sampling(**how), "seed": 3}
    recorded(False)
    plain = list(generate_bytes(model, PROMPT, **settings))
    made = recorded(True)
    assert list(generate_bytes(model, PROMPT, **settings)) == plain
    assert len(plain) == 45
    assert (made[0].records, made[0].replays) == (1, ceil((44 - decoder.WARM) / CpuRecorder.burst))


@pytest.mark.parametrize("budget", [0, 1, 3, 4, 20])
def test_no_more_bytes_come_than_asked_for(budget, recorded):
    model = ladder("e42")
    recorded(False)
    plain = list(generate_bytes(model, PROMPT, max_new_bytes=budget, seed=1))
    recorded(True)
    assert list(generate_bytes(model, PROMPT, max_new_bytes=budget, seed=1)) == plain
    assert len(plain) == budget


def test_a_stop_found_late_writes_nothing_more(recorded):
    model = ladder("e42")
    recorded(False)
    free = list(generate_bytes(model, PROMPT, max_new_bytes=60, num=2, seed=3))
    for at in (0, 5, 12, 40):
        stop = {free[at][0], free[at][1]}
        recorded(False)
        plain = list(generate_bytes(model, PROMPT, max_new_bytes=60, num=2, seed=3, stop=stop))
        made = recorded(True)
        assert list(generate_bytes(model, PROMPT, max_new_bytes=60, num=2, seed=3, stop=stop)) == plain
        assert len(plain) <= at
        replays = made[-1].replays if made else 0
        assert replays <= len(plain) + 2 * CpuRecorder.burst, "it does not run on for long"


def test_logits_that_are_not_finite_are_said_after_the_bytes_before_them(recorded):
    def run(on):
        model, count = ladder("e42"), torch.zeros(())

        def fail(_module, _inputs, out):
            count.add_(1)
            return (out[0] + torch.where(count >= 21, torch.nan, 0.0), out[1])

        model.model.norm.register_forward_hook(fail)
        recorded(on)
        got = []
        with pytest.raises(DivergedError, match="not finite"):
            got.extend(map(tuple, generate_bytes(model, PROMPT, max_new_bytes=60, seed=3)))
        return got

    assert run(True) == run(False)
    assert len(run(False)) == 20


def test_what_cannot_be_recorded_runs_on_as_it_is(recorded, caplog):
    model = ladder("e42")
    recorded(False)
    plain = list(generate_bytes(model, PROMPT, max_new_bytes=30, seed=3))
    model.model.norm.register_forward_hook(lambda _m, _i, out: float(out[0].sum()) and None)
    recorded(True)
    assert list(generate_bytes(model, PROMPT, max_new_bytes=30, seed=3)) == plain
    assert "a step of decoding cannot be recorded, runs eager" in caplog.text


def test_a_normalised_weight_is_scaled_once_in_a_generation_and_anew_in_the_next(monkeypatch):
    model = ladder("e42")
    real, scaled = SpectralNorm.compute, []
    monkeypatch.setattr(SpectralNorm, "compute", lambda self, w, **how: scaled.append(self) or real(self, w, **how))
    first = list(generate_bytes(model, PROMPT, max_new_bytes=20, seed=3))
    assert len(scaled) == 2, "one for each layer"
    assert list(generate_bytes(model, PROMPT, max_new_bytes=20, seed=3)) == first
    assert len(scaled) == 4
    running = generate_bytes(model, PROMPT, max_new_bytes=20, how=Sampling(temperature=0))
    next(running)
    with torch.no_grad():
        model.model.layers[0].mixer.w.mul_(-1)
    next(running)
    next(running)
    assert len(scaled) == 7, "and a weight that was changed is seen"
    running.close()  # type: ignore[attr-defined]
    assert all(m._held is None for m in model.modules() if isinstance(m, SpectralNorm))


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_scales_once_too(cache, monkeypatch):
    model = ladder("e42")
    tokens = torch.tensor([list(PROMPT)])
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    with monkeypatch.context() as patch:
        patch.setattr("elman_core.model.modeling.scaled_once", nullcontext)
        plain = model.generate(tokens, **settings)
    real, scaled = SpectralNorm.compute, []
    monkeypatch.setattr(SpectralNorm, "compute", lambda self, w, **how: scaled.append(self) or real(self, w, **how))
    assert torch.equal(model.generate(tokens, **settings), plain)
    assert len(scaled) == 2
    model(tokens)
    assert len(scaled) == 4, "and outside of it as ever"


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["e1", "e42", "e88"])
@pytest.mark.parametrize("how", SAMPLINGS)
def test_a_cuda_graph_gives_the_bytes_of_the_plain_loop(variant, how, monkeypatch):
    model = ladder(variant).cuda()
    settings = {"max_new_bytes": 200, "num": 2, "how": Sampling(**how), "seed": 3}
    graph = list(generate_bytes(model, PROMPT, **settings))
    monkeypatch.setattr(decoder, "recorder_for", lambda *_: None)
    assert graph == list(generate_bytes(model, PROMPT, **settings))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["e1", "e42", "e88"])
@pytest.mark.parametrize("num", [1, 20])
def test_a_step_in_16_bits_is_that_of_float64(variant, num):
    """The kernels of decoding against the same weights in float64, logits of one step after a prompt."""
    torch.manual_seed(0)
    model = LadderLM(variant, dim=64, depth=3).bfloat16().eval()
    exact = LadderLM(variant, dim=64, depth=3).double().eval()
    exact.load_state_dict({name: t.double() for name, t in model.state_dict().items()})
    tokens = torch.randint(0, 256, (num, 24))
    logits = []
    with torch.inference_mode():
        for each, device in ((model.cuda(), "cuda"), (exact, "cpu")):
            cache = each(tokens[:, :-1].to(device), use_cache=True).past_key_values
            out = each(tokens[:, -1:].to(device), past_key_values=cache, use_cache=True)
            logits.append(out.logits.double().cpu())
    error = (logits[0] - logits[1]).norm() / logits[1].norm()
    assert error < 0.02, float(error)  # a few roundings to 8 bits, three layers deep


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["e1", "e42", "e88"])
def test_generate_with_a_static_cache_gives_the_bytes_of_the_plain_loop_in_16_bits(variant, caplog):
    torch.manual_seed(0)
    model = LadderLM(variant, dim=64, depth=2).cuda().bfloat16().eval()
    model.generation_config.eos_token_id = None
    greedy = Sampling(temperature=0)
    graph = [row[0] for row in generate_bytes(model, PROMPT, max_new_bytes=100, how=greedy)]
    tokens = torch.tensor([list(PROMPT)], device="cuda")
    settings = {"max_new_tokens": 100, "do_sample": False, "pad_token_id": 0}
    for cache in ("static", None):
        assert model.generate(tokens, cache_implementation=cache, **settings)[0, len(PROMPT) :].tolist() == graph
    assert "runs eager" not in caplog.text


def test_the_memory_that_a_graph_reads_stays_as_long_as_the_graph_and_no_longer(monkeypatch):
    """A CUDA graph keeps addresses, not tensors."""
    model, clones = ladder("e42"), []
    right = decoder.map_state

    class Forgetful(CpuRecorder):
        """Holds no tensor of what it records, as a CUDA graph does not."""

        def record(self, run):
            result = run()
            return lambda: result

    def remembered(function, state):
        made = right(function, state)
        clones.extend(weakref.ref(tensor) for tensor in (made or {}).values())
        return made

    monkeypatch.setattr(decoder, "map_state", remembered)
    cache, logits = loop_module.prefill(model, PROMPT)
    seen = torch.zeros(1, 256, dtype=torch.bool)
    made = decoder.Decoder(model, cache, logits, seen, Sampling(), 0, Forgetful())
    taken = made.bytes(decoder.WARM + 3)
    for _ in range(decoder.WARM + 2):
        next(taken)
    gc.collect()
    assert clones
    assert all(clone() is not None for clone in clones)
    gc.disable()
    try:
        taken.close()  # type: ignore[attr-defined]
        del taken, made
        assert all(clone() is None for clone in clones), "without a cycle: memory of the device is free at once"
    finally:
        gc.enable()
