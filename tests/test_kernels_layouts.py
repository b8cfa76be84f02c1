"""Inputs of any layout reach a kernel as it reads them: in place where its strides can say where they lie, else as a copy."""

import itertools
import mmap
from dataclasses import replace

import pytest
import torch
from elman_authors.testing.kernel import need_host_compiler
from torch import Tensor

from elman_core.kernels import Case, KernelSpec, Maps, launch, verify
from elman_core.kernels.causal_conv.op import Kernel as Convolution

LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "zero strides": lambda x: x[:1].expand(x.shape),
    "all zero strides": lambda x: x.flatten()[:1].expand(x.shape),
    "one row for all": lambda x: x[:, :1].expand(x.shape),
    "overlapping": lambda x: x.flatten().as_strided(x.shape, (1, *x.stride()[1:])),
    "rows overlap": lambda x: x.flatten().as_strided(x.shape, (*x.shape[1:2], 1, *x.stride()[2:])),
    "unaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "a slice of channels": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "a slice of steps": lambda x: torch.cat([x, x])[len(x) :],
    "every second step": lambda x: x.repeat_interleave(2, 0)[::2],
    "every second channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "flipped": lambda x: x.flip(0),
}
SIZES = [(t, b, d) for t, b in itertools.product((1, 2, 3, 8), (1, 2, 5)) for d in (1, 3, 8, 24)]
SIZES += [(t, b, h, n) for t, b in ((1, 1), (1, 3), (4, 1), (5, 2)) for h, n in ((1, 1), (1, 759), (3, 8))]


class OnGpu(Tensor):
    """A tensor that says it is on a GPU, since the host reads contiguous tensors alone."""

    is_cuda = True  # type: ignore[assignment]


def seen(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """What a kernel sees that is told the address, the leading strides, and that the sizes behind them are adjacent."""
    adjacent = torch.empty(x.shape, device="meta").stride()
    return x.as_subclass(Tensor).as_strided(x.shape, (*strides, *adjacent[len(strides) :]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.bool])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kernel_sees_the_values_of_every_layout(layout: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        values = torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)
        x = LAYOUTS[layout](values)
        given = x.as_subclass(OnGpu)
        for align in (0, 8, 16):
            made = launch.aligned(given, align)
            evenly = (made.shape[1] * made.stride(1), made.stride(1))
            assert torch.equal(seen(made, evenly), x), (size, align, made.stride())
            if align and values[0, 0].nbytes % align == 0:
                assert made.data_ptr() % align == 0
                assert made.shape[:2] == (1, 1) or made.stride(1) * x.element_size() % align == 0
        if len(size) == 3:
            made = launch.readable(given)
            assert torch.equal(seen(made, made.stride()[:2]), x), (size, made.stride())
        made = launch.whole(given)
        assert torch.equal(seen(made, ()), x)


FAR, NORESERVE = (
    1 << 31,
    0x4000,
)  # elements: beyond the offsets that 32 bits hold; of Linux, in mmap from Python 3.12 on
FUSED = {"maps": Maps(("v",), ("q", "k"), ("sigmoid",)), "n_state": 16, "heads": 1}
FAMILIES = {  # a kernel of each family, and a case
    "dense": ("elman_e42.op", "e42", "TBd", (2, 2, 192), {}),
    "elementwise": ("elman_e65.op", "e65", "TBd", (2, 2, 64), {}),
    "gates": ("elman_baselines.rnn.op", "lstm_gates", "TBd", (2, 2, 64), {}),
    "matrix": ("elman_e88.op", "e88", "BTHNV", (2, 2, 1, 16, 16), FUSED),
    "rows": ("elman_m2rnn.op", "m2rnn", "BTHKV", (2, 2, 1, 16, 16), {}),
    "convolution": (__name__, "convolution", "TBCK", (2, 2, 64, 4), {}),
}
convolution = Convolution()


def problem_of(family: str) -> tuple[KernelSpec, Case]:
    need_host_compiler()
    module, name, *problem, options = FAMILIES[family]
    return getattr(pytest.importorskip(module), name).spec(), Case.of(*problem, torch.bfloat16, **options)


def far(x: Tensor) -> Tensor:
    """The same values, each row 2^31 elements behind the one before. Of that memory only the pages of rows exist."""
    if x.dim() < 3:
        return x
    step = FAR + 8
    size = ((x.shape[0] * x.shape[1] - 1) * step + x[0, 0].numel()) * x.element_size()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    strides = (x.shape[1] * step, step, *x[0, 0].contiguous().stride())
    made = torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)
    assert made.data_ptr() in (launch.aligned(made).data_ptr(), launch.readable(made).data_ptr()), "it would be copied"
    return made


@pytest.mark.parametrize("backend", ["emulated", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_beyond_two_to_the_31_elements_are_read_where_they_lie(family, backend, monkeypatch) -> None:
    spec, case = problem_of(family)
    monkeypatch.setattr(verify, "_with_gaps", far)
    report = verify.verify(spec, backend, cases=[replace(case, strided=True)], opcheck=False)
    assert report.passed, "\n".join(verify.failures(report))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("dense", (9, 4096, 192)), ("elementwise", (9, 4096, 63)), ("gates", (9, 4096, 64)), ("convolution", (9, 4096, 64, 4)),
        ("e23", (9, 4096, 96)), ("matrix", (4096, 9, 1, 16, 7)), ("matrix", (1, 35, 759, 32, 17)),
        ("matrix", (1, 35, 759, 64, 65)), ("rows", (4096, 9, 1, 16, 16)), ("rows", (1, 35, 759, 16, 16)),
    ],
    ids=str,
)  # fmt: skip
def test_many_rows_many_heads_and_odd_columns_are_right(family: str, sizes: tuple[int, ...]) -> None:
    module, name, letters, *_ = FAMILIES.get(family, ("elman_e23.op", "KERNEL", "TBd"))
    spec, case = getattr(pytest.importorskip(module), name).spec(), Case.of(letters, sizes, torch.bfloat16, masked=True)
    report = verify.verify(spec, "cuda", cases=[case], opcheck=False)
    assert report.passed, "\n".join(verify.failures(report))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_without_gradients_keeps_nothing_for_a_backward(family) -> None:
    """At its peak it holds its outputs and, of dense and gated cells, the states that blocks exchange: a step more than y."""
    spec, case = problem_of(family)
    case = replace(case, sizes={**case.sizes, "T": 40})
    inputs = spec.make_inputs(case, torch.Generator().manual_seed(0))
    call = torch.no_grad()(lambda: spec.call("emulated", inputs, case.options))
    outputs = sum(x.nbytes for x in call().values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        made = call()
    events = (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    live = list(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    assert outputs <= live[-1] <= max(live) <= (2 + 1 / 40) * outputs, (
        f"{max(live)} bytes for {len(made)} outputs of {outputs}"
    )
