"""Reading a prompt as a wave, on streams that run nothing apart but know who may rely on whom."""

from collections import Counter
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elman_core.generation import prefill as module
from elman_core.generation.prefill import prefill
from elman_core.kernels import launch
from elman_core.model import LadderLM
from elman_core.nn import SpectralNorm
from elman_core.registry import parse_size

PROCESSORS = 12


class Streams(TorchDispatchMode):
    """Streams as clocks: of every stream, how much of the others' work is over before its next. "host" is the host's.

    An operation that reads what another stream may still be making, or memory freed while another stream than its own may still
    read it, is a fault.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.clocks = {"host": Counter(), "caller": Counter()}
        self.current = "caller"
        self.made, self.uses, self.alive, self.recorded = {}, {}, {}, {}
        self.faults = set()
        monkeypatch.setattr(torch.cuda, "Stream", lambda _device: Stream(self, f"lane {len(self.clocks) - 2}"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: Stream(self, self.current))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.record(tensor, stream))
        found = SimpleNamespace(multi_processor_count=PROCESSORS)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: found)

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def record(self, tensor, stream):
        self.recorded.setdefault(tensor.untyped_storage().data_ptr(), set()).add(stream.name)

    def wait(self, clock):
        self.look_at_freed()
        self.clocks["host"] |= clock

    def tick(self):
        clock = self.clocks[self.current]
        clock |= self.clocks["host"]
        clock[self.current] += 1
        return clock

    def look_at_freed(self):
        for key in [key for key, reference in self.alive.items() if reference.expired()]:
            owner, _ = self.made.pop(key)
            allowed, known = self.recorded.pop(key, set()), self.clocks[owner] | self.clocks["host"]
            for user, when in self.uses.pop(key).items():
                if user != owner and user not in allowed and known[user] < when:
                    self.faults.add(f"freed on {owner}, still used on {user}")
            del self.alive[key]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.look_at_freed()
        clock = self.tick()
        result = function(*args, **kwargs or {})
        read = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for key in read & self.made.keys():
            maker, when = self.made[key]
            if clock[maker] < when:
                self.faults.add(f"read on {self.current} before {maker} made it")
            self.uses[key][self.current] = clock[self.current]
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and (key := x.untyped_storage().data_ptr()) not in self.alive and key:
                self.alive[key] = StorageWeakRef(x.untyped_storage())
                self.made[key], self.uses[key] = (self.current, clock[self.current]), Counter()
        return result


class Stream:
    """A name in `Streams`; an event is a copy of its clock."""

    def __init__(self, streams, name):
        self.streams, self.name = streams, name
        self.clock = streams.clocks.setdefault(name, Counter())

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return self.name == other.name

    def wait_event(self, event):
        self.streams.clocks[self.name] |= event.clock

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def record_event(self):
        clock = +self.streams.clocks[self.name]
        return SimpleNamespace(clock=clock, synchronize=lambda: self.streams.wait(clock))

    def synchronize(self):
        self.streams.wait(self.streams.clocks[self.name])


@pytest.mark.parametrize(
    ("variant", "dim", "depth", "more"),
    [
        ("e42", 32, 5, {}), ("e1", 32, 3, {"mlp_ratio": 2.0}), ("e88:conv_h5n128v256", 64, 2, {}), ("gdn", 128, 2, {}),
        ("lstm", 32, 3, {}), ("e88*2+transformer", 64, 3, {}), ("e68", 32, 18, {}),
    ],
)  # fmt: skip
def test_a_wave_reads_as_at_once_and_no_stream_runs_into_another(monkeypatch, variant, dim, depth, more):
    model = LadderLM(variant, dim=dim, depth=depth, **more).double().eval()
    text = bytes(range(90, 90 + 61))
    whole, expected = prefill(model, text, chunk=len(text))
    monkeypatch.setattr(module, "_has_lanes", lambda *_: True)
    streams = Streams(monkeypatch)
    with streams:  # under which float64 takes other paths
        plain, _ = prefill(model, text, chunk=8, wave=False)
        cache, logits = prefill(model, text, chunk=8)
        for state in cache.states:
            for tensor in state.values():
                tensor.sum()
    assert len(streams.clocks) == 2 + min(module.LANES, len(model.model.layers))
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    for state, same, near in zip(cache.states, plain.states, whole.states, strict=True):
        for name, tensor in state.items():
            assert torch.equal(tensor, same[name])
            torch.testing.assert_close(tensor, near[name], rtol=1e-10, atol=1e-12)
    cache.layers.clear()
    streams.look_at_freed()
    assert not streams.faults


def test_a_prompt_scales_a_weight_once(monkeypatch):
    model = LadderLM("e42", dim=32, depth=2).eval()
    scaled = []
    compute = SpectralNorm.compute
    monkeypatch.setattr(SpectralNorm, "compute", lambda self, *a, **k: scaled.append(self) or compute(self, *a, **k))
    prefill(model, bytes(range(48)), chunk=8)
    assert Counter(scaled) == {layer.mixer.spectral: 1 for layer in model.model.layers}


@pytest.mark.parametrize(
    ("variant", "dim", "length", "chunk"),
    [
        ("e42", 640, 1 << 20, 16384), ("e42", 1152, 1 << 20, 8192), ("e42", 8192, 1 << 20, 2048), ("e42", 640, 1 << 16, 4096),
        ("e42", 640, 9000, 2048), ("e42", 640, 1, 2048), ("e42+transformer", 640, 1 << 20, 2048),
    ],
)  # fmt: skip
def test_a_long_prompt_on_a_device_is_read_in_long_pieces(variant, dim, length, chunk):
    with torch.device("meta"):
        assert module.whole_chunk(LadderLM(variant, dim=dim, depth=2), length) == chunk


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size", ["e42@1152x6", "e1@896x4", "e88:conv_h5n128v256@640x4", "lstm@640x5", "gdn*3+transformer@640x4"]
)
def test_on_a_gpu_a_wave_has_the_bits_of_the_pieces_in_order(size):
    variant, dim, depth = parse_size(size)
    model = LadderLM(variant, dim=dim, depth=depth).to("cuda", torch.bfloat16).eval()
    text = bytes(torch.randint(256, (9000,), dtype=torch.uint8).tolist())
    plain, expected = prefill(model, text, chunk=512, wave=False)
    for _ in range(5):
        cache, logits = prefill(model, text, chunk=512)
        assert torch.equal(logits, expected)
        for state, same in zip(cache.states, plain.states, strict=True):
            assert all(torch.equal(tensor, same[name]) for name, tensor in state.items())


def test_launches_whose_blocks_wait_for_each_other_fit_on_the_gpu_together(monkeypatch):
    streams = Streams(monkeypatch)
    draw, done, met = Random(0), [], 0
    lanes = [Stream(streams, f"lane {i}") for i in range(4)]
    with launch.several_streams("cuda"):
        for _ in range(400):
            blocks = draw.choice([1, 3, 4, 5, 8, PROCESSORS, None])
            with streams.on(draw.choice(lanes)):
                if draw.random() < 0.2:
                    streams.clocks[streams.current] |= streams.clocks[draw.choice(lanes).name]
                with launch.together(blocks):
                    clock = streams.tick()
                    beside: Counter = Counter()
                    for name, when, size in done:
                        if clock[name] < when:
                            beside |= Counter({name: size})  # of one stream, only one runs at a time
                    size = PROCESSORS if blocks is None else blocks
                    assert size + beside.total() <= PROCESSORS
                    met = max(met, len(beside))
                    done.append((streams.current, clock[streams.current], size))
    assert met > 1, "some run beside others"
