"""The ops of gated cells, by the baselines' LSTM and GRU, and of elementwise cells: compilation, plans, refusals."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from elman_authors import grids
from elman_authors.testing.kernel import need_host_compiler
from torch.func import jvp
from torch.utils.checkpoint import checkpoint

from elman_core.kernels import ElementwiseKernel
from elman_core.kernels.gates import native
from elman_core.kernels.gates.native import rows_of
from elman_core.kernels.verify import failures
from elman_core.nn import ElementwiseForm, GatesMixer, WrapperConfig, gate
from elman_core.registry import ConfigError, KernelError

rnn = pytest.importorskip("elman_baselines.rnn.op")
T, B, D = 4, 2, 3


def diagonal_lstm(h, c, *given):
    i, f, o, z = (x + p * h for x, p in zip(given[:4], given[4:], strict=True))
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, c, h


lstm = ElementwiseKernel(
    "made_up_lstm",
    header=Path(__file__).parents[1] / "csrc_common" / "tests" / "elementwise_cells.h",
    cell="elman::made_up::DiagonalLstm",
    step=diagonal_lstm,
    streams=("i", "f", "o", "z"),
    vectors=("p_i", "p_f", "p_o", "p_z"),
    states=("h", "c"),
)


ALL = pytest.mark.parametrize("kernel", [rnn.gru_gates, rnn.lstm_gates, lstm], ids=["gru", "lstm", "elementwise"])


def inputs(kernel, dtype=torch.float32):
    """u, w, b and the states; or streams, vectors and states."""
    generator = torch.Generator().manual_seed(0)
    if kernel is lstm:
        shapes = [(T, B, D)] * 4 + [(D,)] * 4 + [(B, D)] * 2
    else:
        gates = kernel.cell.gates * D
        shapes = [(T, B, gates), (gates, D), (gates,), *[(B, D)] * len(kernel.cell.states)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize(
    ("kernel", "backend"),
    [(rnn.gru_before_gates, "host"), *itertools.product((rnn.gru_gates, rnn.lstm_gates), ("torch", "host"))],
)
def test_without_a_bias_it_is_the_reference(kernel, backend):
    need_host_compiler()
    u, w, _, *states = inputs(kernel, torch.float64)
    found = []
    for way in (backend, "reference"):
        outputs = kernel(u, w, None, *states, backend=way)
        found.append([*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), [u, w, *states])])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


@ALL
def test_compiled_and_recomputed_it_gives_the_same_gradients(kernel):
    def loss(*given):
        y, *states = kernel(*given)
        return (y * y).sum() + sum(s.sum() for s in states)

    given = inputs(kernel)
    wanted = torch.autograd.grad(loss(*given), given)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for made in (compiled(*given), checkpoint(loss, *given, use_reentrant=False)):
        for x, y in zip(torch.autograd.grad(made, given), wanted, strict=True):
            torch.testing.assert_close(x, y)


@ALL
def test_gradients_of_gradients_are_refused_and_forward_mode_takes_the_reference(kernel):
    given = inputs(kernel)
    y, *_ = kernel(*given)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), given[0], create_graph=True)
    y, _ = jvp(lambda u: kernel(u, *given[1:])[0], (given[0],), (given[0],))
    torch.testing.assert_close(y, kernel(*given)[0])


@pytest.mark.parametrize(
    ("batch", "groups", "rows"), [(32, 2, 16), (32, 4, 8), (3, 4, 1), (70, 4, 9), (33, 2, 9), (1, 2, 1)]
)
def test_rows_are_spread_over_as_few_launches_as_there_must_be(batch, groups, rows):
    found = rows_of(batch, groups)
    assert found == rows
    launches = -(-batch // (groups * 16))
    assert found <= 16
    assert found * groups * launches >= batch


def test_sizes_without_a_kernel_are_named(monkeypatch):
    cell, device = rnn.lstm_gates, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert cell.supports(device, torch.bfloat16, 1024)
    assert not cell.supports(torch.device("cpu"), torch.float16, 1024)
    for dtype, width, said in (
        (torch.float32, 512, "store bfloat16 and float16, not torch.float32"),
        (torch.bfloat16, 200, "multiples of 64 up to 1024, not 200"),
        (torch.float16, 1088, "multiples of 64 up to 1024, not 1088"),
    ):
        with pytest.raises(KernelError, match=said):
            cell.spec().builds("cuda", "sm_90", (width,), (dtype,))
        assert not cell.supports(device, dtype, width)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not cell.supports(device, torch.bfloat16, 1024)


@pytest.mark.parametrize("held", [-1, 0])
def test_a_gpu_that_holds_no_group_or_cannot_say_is_refused(held, monkeypatch):
    monkeypatch.setattr(native.launch, "opened", lambda *_: SimpleNamespace(ask=lambda *_: held))
    with pytest.raises(KernelError, match=r"does not hold 32 blocks \(width 512\)"):
        native.settled(rnn.lstm_gates.cell, torch.bfloat16, 40, 512, None, False)


def test_heads_of_a_mixer_see_their_own_h():
    class TwoHeads(GatesMixer):
        kernel, start, heads = rnn.lstm_gates, {1: 1.0}, 2

    mixer = TwoHeads(8, WrapperConfig())
    blocks = mixer.w_h.view(8, 4, 4)
    torch.testing.assert_close(blocks @ blocks.mT, torch.eye(4).expand(8, 4, 4))
    assert mixer.w_x.bias.view(2, 4, 4)[:, 1].eq(1).all()
    x, zeros = torch.randn(1, 2, 8), {name: torch.zeros(1, 8) for name in "hc"}
    (y, _), (other, _) = (
        mixer.cell(x.transpose(0, 1), None, zeros | {"h": h}, None, None)
        for h in (zeros["h"], torch.arange(8.0).gt(3)[None].float())
    )
    assert torch.equal(y[..., :4], other[..., :4])
    assert (y[..., 4:] != other[..., 4:]).all()
    with pytest.raises(ConfigError, match="heads=2 does not divide 7"):
        TwoHeads(7, WrapperConfig())


@pytest.mark.parametrize("index", [4, -1])
def test_a_bias_of_a_gate_that_is_not_there_is_refused(index):
    class Beyond(GatesMixer):
        kernel, start = rnn.lstm_gates, {1: 1.0, index: 2.0}

    with pytest.raises(ConfigError, match=f"^Beyond.start has gate {index}: lstm has 0 to 3$"):
        Beyond(8, WrapperConfig())


def test_a_form_with_another_number_of_vectors_than_its_kernel_is_refused():
    maps, vectors = dict.fromkeys("ifoz", 0.0), dict.fromkeys(lstm.cell.vectors, 0.0)
    ElementwiseForm(lstm, maps, vectors)
    takes = "^made_up_lstm takes the vectors p_i, p_f, p_o, p_z: its form has"
    with pytest.raises(ConfigError, match=f"{takes} p_i, p_o, p_z$"):
        ElementwiseForm(lstm, maps, {name: start for name, start in vectors.items() if name != "p_f"})
    with pytest.raises(ConfigError, match=f"{takes} none$"):
        ElementwiseForm(lstm, maps)
    with pytest.raises(ConfigError, match=f"{takes} p_i, p_f, p_o, p_z, p$"):
        ElementwiseForm(lstm, maps, vectors | {"p": 0.0})


def test_what_cannot_be_is_refused():
    kernel, given = rnn.lstm_gates, inputs(rnn.lstm_gates)
    with pytest.raises(ConfigError, match=r"lstm: c must be a tensor \(2, 3\), not None"):
        kernel(*given[:-1])
    with pytest.raises(ConfigError, match="u must be"):
        kernel(given[0][..., 1:], *given[1:])
    with pytest.raises(ConfigError, match=r"w must be \(12, 3\)"):
        kernel(given[0], given[1].T, *given[2:])
    with pytest.raises(ConfigError, match="gru_before: backend must be auto, cuda, host or reference, not 'torch'"):
        rnn.gru_before_gates(*inputs(rnn.gru_before_gates), backend="torch")


@pytest.mark.parametrize("backend", ["torch", "host"])
def test_a_cell_of_two_states_passes_the_quick_grid(backend):
    need_host_compiler()
    report = grids.verify(lstm.specs()[0], backend, opcheck=False)
    assert report.passed, list(failures(report))
    assert {"y", "h_T", "c_T", "d h", "d c", "d i", "d p_z"} <= {row.tensor for row in report.rows}


def test_states_before_steps_are_kept_only_for_a_backward():
    given = inputs(lstm)
    marks = None, None
    with torch.no_grad():
        h0 = torch.stack(given[-2:])
        y, _, kept = lstm.op(*given[:-2], h0, *marks, False, "torch")
        assert kept.numel() == 0
    assert torch.equal(y, lstm(*given)[0])


def test_another_number_of_tensors_and_a_named_back_end_under_torch_func_are_refused():
    given = inputs(lstm)
    with pytest.raises(ConfigError, match=r"made_up_lstm takes \(i, f, o, z, p_i, .* mask=None, starts=None\), not 9"):
        lstm(*given[:-1])
    with pytest.raises(NotImplementedError, match=r"backend='auto' or 'reference'"):
        jvp(lambda x: lstm(x, *given[1:], backend="torch")[0], (given[0],), (given[0],))


def test_a_gate_nearly_shut_keeps_the_digits_of_its_slope():
    logit = torch.tensor([-30.0, -5.0, 0.0, 5.0, 12.0, 30.0], requires_grad=True)
    exact = torch.sigmoid(logit.double()), torch.sigmoid(-logit.double())
    for half, wide in zip(gate(logit), exact, strict=True):
        torch.testing.assert_close(half.double(), wide, rtol=1e-6, atol=0)
        (slope,) = torch.autograd.grad(half.sum(), logit, retain_graph=True)
        torch.testing.assert_close(slope.double().abs(), exact[0] * exact[1], rtol=1e-6, atol=0)
