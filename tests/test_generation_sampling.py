"""One kernel from logits to the byte drawn, on a GPU and by emulated threads, against the plain functions."""

from __future__ import annotations

import emulated_decode
import pytest
import torch

from elman_core.generation import Sampling, sampling
from elman_core.kernels.decode import op as decode

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(temperature=0, repetition_penalty=1.7),
    Sampling(temperature=0.8, top_k=40, top_p=0.9),
    Sampling(temperature=1.3, top_k=3),
    Sampling(temperature=0.7, top_p=0.5, repetition_penalty=0.8),
    Sampling(top_p=0.001),
]

compiled, device = emulated_decode.compiled, emulated_decode.device


@pytest.fixture
def drawn(device, monkeypatch):
    """`drawn(logits, how, seen, seed, fused)`: (bytes, bytes as shown, seen after it) by the kernel or by plain PyTorch."""

    def run(logits, how, seen, seed, fused):
        monkeypatch.setattr(decode, "takes_draw", lambda _: fused)
        generator = torch.Generator(device).manual_seed(seed)
        next_B, row_B = (torch.full((len(logits),), -7, device=device) for _ in range(2))
        seen = seen.clone()
        sampling.choose(logits, how, seen, generator, next_B, row_B)
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
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.inference_mode():
        assert decode.takes_draw(logits[None])
        sampling.choose(logits.expand(count, -1).contiguous(), how, seen, generator, next_B, row_B)
    scores, order = (logits.double() / 0.8).sort(descending=True)
    shares = scores[:12].softmax(0)
    kept = int((shares.cumsum(0) - shares < 0.9).sum())
    expected = torch.zeros(256, dtype=torch.double, device="cuda")
    expected[order[:kept]] = scores[:kept].softmax(0)
    found = torch.bincount(next_B, minlength=256) / count
    deviation = (expected * (1 - expected) / count).sqrt()
    assert bool(((found - expected).abs() <= 5 * deviation).all())
