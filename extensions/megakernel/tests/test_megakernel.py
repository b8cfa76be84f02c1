"""The program of a model, several bytes a launch, on emulated threads: against the model in float64, and within the loop."""

import logging
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from decoding_helpers import ladder
from elman_authors.testing.kernel import need_host_compiler
from elman_megakernel import native, programs
from elman_megakernel.native import Run

from elman_core.generation import Sampling, decoder, generate_bytes, loop
from elman_core.kernels import build, launch
from elman_core.model import LadderLM
from elman_core.registry import KernelError, list_variants
from elman_core.registry.errors import KernelTimeoutError

PROMPT = b"a prompt, "
SMALL = {"blocks": 3, "large": 1000}  # states of this size are shared by the blocks


@pytest.fixture(autouse=True)
def compiler():
    need_host_compiler()


def model_of(variant, dtype=torch.float32, dim=64, depth=2):
    torch.manual_seed(0)
    model = LadderLM(variant, dim=dim, depth=depth).to(dtype).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(20)  # far from uniform, so that a wrong state shows in what is drawn
    return model


def exact_of(model):
    made = LadderLM(model.config).double().eval()
    made.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    return made


def follows(model, steps=7):
    """({state: relative error}, bytes by the program, bytes by the model in float64) after a prompt."""
    made, exact = programs.made(model, **SMALL), exact_of(model)
    assert made is not None
    with torch.inference_mode():
        cache = exact(torch.tensor([list(PROMPT)]), use_cache=True).past_key_values
        states = programs.by_name([{n: x.float() for n, x in state.items()} for state in cache.states])
        run, shown = Run(made, states, torch.tensor([3])), torch.zeros(steps, dtype=torch.long)
        for part in shown.split((3, steps - 3)):
            run.draw(part, None, torch.zeros(256, dtype=torch.bool), temperature=0.0, top_k=0, top_p=1.0, penalty=1.0)
        wanted = [3]
        for _ in range(steps):
            out = exact(torch.tensor([[wanted[-1]]]), past_key_values=cache, use_cache=True)
            wanted.append(int(out.logits[0, -1].argmax()))
        run.save(states)
    errors = {
        key: float((states[key].double() - x).norm() / x.norm()) for key, x in programs.by_name(cache.states).items()
    }
    return errors, shown.tolist(), wanted[1:]


def assert_follows(model):
    errors, drawn, wanted = follows(model)
    assert max(errors.values()) < 3e-6, errors
    assert drawn == wanted


WIDE = {"gdn", "gdn2", "kda", "mamba2", "mlstm"}
FOURS = [  # variants as the layers of one model, whose program takes little longer to compile than that of one variant
    "+".join(names[at : at + 4])
    for names in (sorted({*list_variants()} - {"transformer"} - WIDE), sorted(WIDE))
    for at in range(0, len(names), 4)
]


def layers_of(variants):
    """A model with a layer of each of these, as in `FOURS`."""
    names = variants.split("+")
    return model_of(variants, dim=128 if WIDE & {*names} else 64, depth=len(names))


@pytest.mark.parametrize("variants", ["e70+e71+e72+e73", "e74+e75+e88+e97", "m2rnn+rwkv7"])
def test_every_block_may_have_the_whole_matrix_of_a_small_state(variants, monkeypatch):
    monkeypatch.delitem(SMALL, "large")
    assert_follows(layers_of(variants))


@pytest.mark.parametrize("variants", [*FOURS, "e88:conv_h5n128v256+e88:conv_h5n128v256"])
def test_the_program_of_every_variant_is_its_model(variants):
    assert_follows(layers_of(variants))


@pytest.mark.parametrize("order", ["EMULATED_BACKWARDS", "EMULATED_STALLED"])
@pytest.mark.parametrize("variant", ["e42", "e88"])
def test_nothing_depends_on_which_block_or_warp_is_first(variant, order, monkeypatch):
    monkeypatch.setenv(order, "7")
    assert_follows(model_of(variant))


def test_the_decoder_finds_what_makes_programs():
    assert decoder._programs(False) is programs.program_for


def test_vectors_are_repeated():
    assert_follows(ladder("e2", dim=64, options={"share_wx": True}))


def test_weights_of_16_bits_are_computed_with_in_float32():
    assert_follows(model_of("e88", torch.bfloat16))


def test_the_loop_writes_the_same_bytes_with_a_program(monkeypatch):
    model, given = ladder("e42"), {"max_new_bytes": 75, "seed": 3}
    ways = (
        Sampling(temperature=0),
        Sampling(temperature=0.8, top_k=40, top_p=0.9),
        Sampling(temperature=1.3, repetition_penalty=1.4),
        Sampling(),
    )
    plain = [[row[0] for row in generate_bytes(model, PROMPT, how=how, **given)] for how in ways]
    monkeypatch.setattr(decoder, "recorder_for", lambda *_: SimpleNamespace(burst=1))
    monkeypatch.setattr(decoder, "program_for", lambda model, _: programs.made(model, blocks=2))
    monkeypatch.setattr(loop, "least_rows", lambda _: 1)
    for how, text in zip(ways, plain, strict=True):
        assert [row[0] for row in generate_bytes(model, PROMPT, how=how, **given)] == text, how
    stopped = [row[0] for row in generate_bytes(model, PROMPT, stop={text[40]}, **given)]
    assert stopped == text[: text.index(text[40])]
    made = programs._known[model][1]
    assert made is not None
    assert programs.made(model, blocks=2) is made
    model.model.norm.weight.data.mul_(1.5)
    other = programs.made(model, blocks=2)
    assert other is not made, "of other weights"
    model.model.norm.adapted = False  # as adapters say that they are off
    assert programs.made(model, blocks=2) is not other


def test_a_program_is_made_whatever_the_default_device_is():
    model = model_of("e42")
    with torch.device("meta"):
        assert programs.made(model, blocks=2) is not None


def test_the_sum_of_weights_on_a_gpu_sees_a_changed_bit_and_swapped_rows():
    x, swapped, changed = (torch.arange(600.0).view(30, 20).bfloat16() for _ in range(3))
    swapped[[0, 7]] = swapped[[7, 0]]
    changed[3, 4] += 1
    one, *others = programs.weighed([x, swapped, changed, x.clone()])
    assert [each == one for each in others] == [False, False, True]


def test_a_model_with_something_unknown_says_what(caplog, monkeypatch):
    grows, odd = LadderLM("transformer", dim=64, depth=1).eval(), ladder("e42")
    forward = type(odd.model.layers[0].mixer).extras
    monkeypatch.setattr(
        type(odd.model.layers[0].mixer), "extras", lambda *given: (given[1].cumsum(-1), forward(*given))[1]
    )
    with caplog.at_level(logging.WARNING):
        for model in (grows, odd):
            assert programs.made(model, **SMALL) is programs.made(model, **SMALL) is None
    said = "elman: this model is decoded step by step, not by one launch: it has "
    assert [r.message for r in caplog.records] == [said + "a state that grows", said + "aten::cumsum"]


def test_a_fault_of_the_writer_ends_no_text(caplog, monkeypatch):
    monkeypatch.setattr(programs, "write", Mock(side_effect=ValueError("a fault")))
    assert programs.made(ladder("e42"), **SMALL) is None
    assert "its program cannot be written (ValueError: a fault): report it" in caplog.text
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    with pytest.raises(KernelError, match="a fault"):
        programs.made(ladder("e42"), **SMALL)


@pytest.mark.parametrize("variant", ["e88", "gdn", "mamba2", "mamba3", "rwkv7", "slstm"])
def test_what_is_as_large_as_a_state_takes_no_memory(variant, monkeypatch):
    fits = []
    monkeypatch.setattr(programs, "Program", lambda source, *_: fits.append(source.floats))
    monkeypatch.setattr(programs, "_check", lambda *_: None)
    programs.made(model_of(variant, dim=512))
    assert len(fits) == 1


def test_a_program_is_compiled_beside_the_first_text(tmp_path, monkeypatch):
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path))
    build.build(launch.extension(), build.local_arch(launch.extension()))  # as whatever else runs on a GPU needs it
    model, go, real = ladder("e42"), threading.Event(), native.build_kernel
    write = Mock(side_effect=programs.write)
    monkeypatch.setattr(programs, "write", write)
    monkeypatch.setattr(native, "build_kernel", lambda *given: go.wait(60) and real(*given))
    assert programs.made(model, wait=False) is programs.made(model, wait=False) is None
    assert write.call_count == 1, "recorded again while it is compiled"
    go.set()
    for thread in native._compiling.values():
        thread.join()
    made = programs.made(model, wait=False, blocks=2)
    assert made is not None
    assert made is programs.made(model, wait=False)


def test_what_cannot_be_compiled_beside_a_text_is_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path))
    for module, name in ((native, "build_kernel"), (build, "build")):
        monkeypatch.setattr(module, name, Mock(side_effect=KernelError("no compiler here")))
    model = ladder("e42")
    for _ in range(3):
        assert programs.made(model, wait=False, blocks=2) is None
        for thread in native._compiling.values():
            thread.join()
    assert caplog.messages == ["elman: this model is decoded step by step, not by one launch: no compiler here"]


def test_long_texts_of_models_that_gain_have_a_program(monkeypatch):
    monkeypatch.setattr(programs, "made", lambda _, wait: wait)

    def asked(variant, budget, depth=1):
        model = LadderLM(variant, dim=64, depth=depth)
        on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
        body = SimpleNamespace(embed_tokens=SimpleNamespace(weight=on_gpu), layers=model.model.layers)
        return programs.program_for(
            SimpleNamespace(model=body, config=model.config, modules=model.modules, parameters=model.parameters), budget
        )

    assert [asked("e88", programs.PAYS - n) for n in (0, 1)] == [False, None]
    for variant, share in (("e42", 2), ("e88", 1), ("e75", 1), ("rwkv7", 1)):  # layers; half of that for a matrix state
        weights = sum(p.nbytes for p in LadderLM(variant, dim=64, depth=2).parameters())
        for most, wanted in ((weights // share + 2, False), (weights // share, None)):
            with monkeypatch.context() as patched:
                patched.setattr(programs, "HEAVY", most)
                assert asked(variant, programs.PAYS, 2) is wanted
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    assert asked("e88", programs.PAYS) is True
    monkeypatch.setenv("ELMAN_WHOLE", "off")
    assert asked("e88", programs.PAYS) is None
    monkeypatch.setenv("ELMAN_WHOLE", "on")
    monkeypatch.setattr(programs, "HEAVY", 0)
    assert asked("e88", 64) is True


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["e1", "e42", "e65", "e75", "e88", "e88:conv_h5n128v256", "gdn", "lstm", "mamba2"])
@pytest.mark.parametrize(
    "how", [Sampling(), Sampling(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1)], ids=str
)
def test_a_gpu_writes_the_text_of_the_recorded_steps(variant, how, monkeypatch):
    monkeypatch.setenv("ELMAN_WHOLE", "on")
    model = model_of(variant, dim=256).cuda()
    given = {"max_new_bytes": 1100, "how": how, "seed": 3}
    text = list(generate_bytes(model, PROMPT, **given))
    assert programs._known[model][1] is not None
    monkeypatch.setattr(decoder, "program_for", lambda *_: None)
    assert text == list(generate_bytes(model, PROMPT, **given))


def test_a_program_that_computes_something_else_is_refused(monkeypatch):
    real = programs.write

    def wrong(*given, **how):
        source = real(*given, **how)
        source.constants[0] = source.constants[0] * 1.0001
        return source

    monkeypatch.setattr(programs, "write", wrong)
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    with pytest.raises(KernelError, match="the program of this model"):
        programs.made(model_of("e42"), **SMALL)


def test_a_wait_in_vain_ends_and_is_told(monkeypatch):
    model = ladder("e42")
    made = programs.made(model, blocks=3)
    monkeypatch.setitem(made.fixed, "timeout_ns", 1)
    monkeypatch.setattr(decoder, "recorder_for", lambda *_: SimpleNamespace(burst=1))
    monkeypatch.setattr(decoder, "program_for", lambda *_: made)
    monkeypatch.setattr(loop, "least_rows", lambda _: 1)
    monkeypatch.setenv("EMULATED_STALLED", "3000")
    with pytest.raises(KernelTimeoutError):
        list(generate_bytes(model, PROMPT, max_new_bytes=6))
