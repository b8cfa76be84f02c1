"""Products of few rows: the GPU source on emulated threads and on a GPU, against float64."""

import emulated_decode
import pytest
import torch
import torch.nn.functional as F

from elman_core.generation import Sampling, sampling
from elman_core.kernels.decode import op as decode
from elman_core.nn import add_rms_norm
from elman_core.registry import KernelError

bf16, f16 = torch.bfloat16, torch.float16
ROUNDING = {
    bf16: 2**-8,
    f16: 2**-10,
    torch.float32: 2**-20,
}  # of an output; sums are float32, a few roundings of which are far below
TANH = 2**-10  # what the hardware's tanh may be off by


compiled, device = emulated_decode.compiled, emulated_decode.device


def draw(*shape, dtype, seed=0, scale=1.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def close(got, wanted, dtype, more=0.0):
    error = (got.double().cpu() - wanted).abs()
    limit = (ROUNDING[dtype] + more) * (wanted.abs() + 0.05)
    assert bool((error <= limit).all()), f"{error.max():.2e}, {(error / limit).max():.2f} of the limit"


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "dtype", "bias", "activated"),
    [
        (1, 64, 32, bf16, False, 0),
        (3, 72, 40, bf16, True, 24),  # no multiple of a chunk of columns, nor of a block of outputs
        (8, 2600, 16, f16, True, 16),  # more chunks than are loaded together
        (9, 64, 24, bf16, False, 24),
        (17, 136, 16, f16, True, 0),
        (64, 1096, 24, bf16, True, 8),
    ],
)
def test_linear(rows, inputs, outputs, dtype, bias, activated, device):
    x, w = draw(rows, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype, seed=1, scale=inputs**-0.5)
    b = draw(outputs, dtype=dtype, seed=2) if bias else None
    wanted = F.linear(x.double(), w.double(), None if b is None else b.double())
    wanted[:, :activated] = F.silu(wanted[:, :activated])
    got = decode.linear(x.to(device), w.to(device), None if b is None else b.to(device), activated)
    assert got.dtype == dtype
    close(got, wanted, dtype, ROUNDING[dtype])  # what passes SiLU is rounded before it
    wide = draw(rows, inputs + 8, dtype=dtype).to(device)
    wide[:, 8:] = x.to(device)
    assert torch.equal(decode.linear(wide[:, 8:], w.to(device), None if b is None else b.to(device), activated), got)


@pytest.mark.parametrize("rows", [1, 30])
def test_several_linear_maps_of_one_input(rows, device):
    x = draw(rows, 1, 72, dtype=bf16)
    weights = [draw(n, 72, dtype=bf16, seed=n, scale=0.1) for n in (40, 7, 16, 1, 33)]
    outputs = decode.linears(x.to(device), [w.to(device) for w in weights])
    for w, y in zip(weights, outputs, strict=True):
        assert y.shape == (rows, 1, len(w))
        close(y, F.linear(x.double(), w.double()), bf16)
    with pytest.raises(KernelError, match="linears takes up to 5 weights, not 6"):
        decode.linears(x, [weights[0]] * 6)


@pytest.mark.parametrize("name", ["e1", "e42"])
@pytest.mark.parametrize(("rows", "width", "dtype"), [(1, 40, bf16), (5, 96, f16), (20, 64, bf16), (64, 32, bf16)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_step_is_projection_product_and_cell(name, rows, width, dtype, tied, device):
    kernel = vars(pytest.importorskip(f"elman_{name}.op"))[name]
    cell, step = kernel.cell, kernel._step
    x, h = draw(1, rows, width, dtype=dtype), draw(rows, width, dtype=torch.float32, seed=1)
    w = draw(width, width, dtype=dtype, seed=2, scale=width**-0.5)
    v, b = w if tied else draw(width, width, dtype=dtype, seed=3, scale=width**-0.5), draw(width, dtype=dtype, seed=4)
    gates = draw(1, rows, 2 * width, dtype=dtype, seed=5).to(device)
    extras = [gates[..., width:] for _ in cell.extras]  # rows that lie apart, as halves of a projection do
    on = [t.to(device) for t in (x, v, b, w, h)]
    y, last = step(*on[:2], on[2], *extras, on[1] if tied else on[3], on[4])
    u = F.linear(x.double(), v.double(), b.double())
    rounded = h.to(dtype).double()  # as it is where it is multiplied
    a = u + rounded @ w.double().T
    others = [e.double().cpu() for e in extras]
    h_new = a if cell.update is None else cell.update(a, h.double(), *others)
    close(last, h_new[0], dtype, TANH)
    close(y, cell.readout(h_new, h.double(), *others), dtype, TANH)
    assert (y.dtype, last.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize(("rows", "width", "dtype"), [(1, 40, bf16), (3, 1537, torch.float32), (64, 264, f16)])
@pytest.mark.parametrize("adds", [True, False])
def test_norm_is_that_of_every_other_layer(rows, width, dtype, adds, device):
    x = draw(rows, 1, width + 8, dtype=dtype)[..., 8:]  # rows that lie apart
    weight = 1 + draw(width, dtype=dtype, seed=1, scale=0.1)
    residual = draw(rows, 1, width, dtype=torch.float32, seed=2) if adds else None
    n, stream = decode.norm(x.to(device), None if residual is None else residual.to(device), weight.to(device), 1e-5)
    wanted_n, wanted_stream = add_rms_norm(
        x.double(), None if residual is None else residual.double(), weight.double(), 1e-5
    )
    assert (n.dtype, stream.dtype, n.shape) == (dtype, torch.float32, x.shape)
    close(n, wanted_n, dtype)
    torch.testing.assert_close(stream.double().cpu(), wanted_stream, rtol=2**-23, atol=2**-23)


def test_who_asks_is_told_when_it_cannot_run(device):
    w = torch.zeros(16, 16, dtype=bf16)
    assert not decode.takes(w[:1], w), "not on this device"
    with pytest.raises(KernelError, match="it takes up to 64 rows"):
        decode.linear(torch.zeros(65, 16, dtype=bf16, device=device), w.to(device))
    with pytest.raises(KernelError, match="it has no elman_decode_linear for this dtype"):
        decode.linear(torch.zeros(1, 16, device=device), torch.zeros(16, 16, device=device))


@pytest.mark.gpu
def test_it_is_taken_for_few_rows_in_16_bits_without_gradients():
    w = torch.zeros(16, 16, dtype=bf16, device="cuda")
    with torch.inference_mode():
        assert decode.takes(w[:1], w)
        assert not decode.takes(w.new_zeros(65, 16), w)
        assert not decode.takes(w.float(), w.float())
        with torch.autocast("cuda", torch.float16):
            assert not decode.takes(w[:1], w)
    assert not decode.takes(w[:1], w)


# one kernel from logits to the byte drawn, against the plain functions -----------------------------------------------


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(temperature=0, repetition_penalty=1.7),
    Sampling(temperature=0.8, top_k=40, top_p=0.9),
    Sampling(temperature=1.3, top_k=3),
    Sampling(temperature=0.7, top_p=0.5, repetition_penalty=0.8),
    Sampling(top_p=0.001),
]


@pytest.fixture
def drawn(device, monkeypatch):
    """`drawn(logits, how, seen, seed, fused)`: (bytes, bytes as shown, seen after it) by the kernel or by plain PyTorch."""

    def run(logits, how, seen, seed, fused):
        monkeypatch.setattr(decode, "takes_draw", lambda _: fused)
        keys = sampling.keys_of(seed, len(logits), device)
        waits = sampling.noise(keys, torch.zeros_like(keys), logits.shape[1]) if how.temperature else None
        next_B, row_B = (torch.full((len(logits),), -7, device=device) for _ in range(2))
        seen = seen.clone()
        sampling.choose(logits, how, seen, waits, next_B, row_B)
        return next_B.tolist(), row_B.tolist(), seen.tolist()

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # in bfloat16 there are ties
@pytest.mark.parametrize("classes", [256, 200])
@pytest.mark.parametrize("how", SAMPLINGS, ids=str)
def test_the_kernel_draws_what_plain_pytorch_draws(how, classes, dtype, device, drawn):
    random = torch.Generator().manual_seed(0)
    logits = (torch.randn(9, classes + 8, generator=random) * 3).to(device, dtype)[:, :classes]
    seen = (torch.rand(9, classes, generator=random) < 0.2).to(device)
    plain, kernel = (drawn(logits, how, seen, 5, fused) for fused in (False, True))
    assert plain == kernel


@pytest.mark.parametrize("how", SAMPLINGS[:4], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_logits_that_are_not_finite_are_shown_and_a_byte_is_fed(how, fused, device, drawn):
    bad = torch.randn(6, 256, generator=torch.Generator().manual_seed(0)).to(device)
    bad[1, 5], bad[3, 255], bad[4, 0] = torch.nan, torch.inf, -torch.inf
    chosen, shown, _ = drawn(bad, how, torch.zeros(6, 256, dtype=torch.bool, device=device), 1, fused)
    assert [s < 0 for s in shown] == [False, True, False, True, True, False]
    assert all(0 <= c < 256 for c in chosen), "it is fed to the model before anyone looks"


def test_bytes_that_have_occurred_are_marked_where_a_penalty_reads_them(device, drawn):
    logits = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).to(device)
    seen = torch.zeros(4, 256, dtype=torch.bool, device=device)
    for penalty in (1.0, 1.2):
        bytes_, _, after = drawn(logits, Sampling(repetition_penalty=penalty), seen, 1, True)
        found = [[i for i, had in enumerate(row) if had] for row in after]
        assert found == ([[b] for b in bytes_] if penalty != 1 else [[]] * 4)


@pytest.mark.gpu
def test_the_kernel_draws_from_the_distribution():
    how, count = Sampling(temperature=0.8, top_k=12, top_p=0.9), 200_000
    logits = torch.randn(256, generator=torch.Generator().manual_seed(0)).cuda()
    next_B, row_B = (torch.zeros(count, dtype=torch.long, device="cuda") for _ in range(2))
    seen = torch.zeros(count, 256, dtype=torch.bool, device="cuda")
    keys = sampling.keys_of(0, count, torch.device("cuda"))
    with torch.inference_mode():
        assert decode.takes_draw(logits[None])
        sampling.choose(
            logits.expand(count, -1).contiguous(), how, seen, sampling.noise(keys, keys * 0, 256), next_B, row_B
        )
    scores, order = (logits.double() / 0.8).sort(descending=True)
    shares = scores[:12].softmax(0)
    kept = int((shares.cumsum(0) - shares < 0.9).sum())
    expected = torch.zeros(256, dtype=torch.double, device="cuda")
    expected[order[:kept]] = scores[:kept].softmax(0)
    found = torch.bincount(next_B, minlength=256) / count
    deviation = (expected * (1 - expected) / count).sqrt()
    assert bool(((found - expected).abs() <= 5 * deviation).all())
