"""The noise of draws is a function of the seed, the text, the token and the class, and is that of independent exponentials."""

import numpy as np
import pytest
import torch
from decoding_helpers import ladder

from elman_core.data import hash_u64
from elman_core.generation import Sampling, generate_bytes
from elman_core.generation.sampling import Noise, keys_of, noise

SEEDS = (0, 1, -1, 2**63, 2**64 - 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_a_word_of_splitmix64(seed):
    tokens, classes = torch.tensor([0, 1, 7, 2**40]), 300
    made_BTV = noise(keys_of(seed, 3)[:, None], tokens, classes)
    assert (made_BTV.shape, made_BTV.dtype) == ((3, 4, classes), torch.float32)
    numbers_TV = tokens.numpy()[:, None] * classes + np.arange(classes)
    for text, made_TV in enumerate(made_BTV):
        word_TV = hash_u64(seed, text, numbers_TV) ^ np.uint64(1 << 63)
        uniform_TV = ((word_TV >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        torch.testing.assert_close(made_TV, torch.from_numpy(-np.log(uniform_TV)).float(), rtol=1e-6, atol=0)


def test_the_ends_of_the_range_are_finite_and_not_zero(monkeypatch):
    words = torch.tensor([-(2**63), -1, 0, 2**63 - 1])
    monkeypatch.setattr("elman_core.generation.sampling._words", lambda *_: words)
    made = noise(torch.zeros(()), torch.zeros((), dtype=torch.long), 4)
    expected = [53 * np.log(2), np.log(2), np.log(2), 2.0**-53]
    torch.testing.assert_close(made, torch.tensor(expected).float(), rtol=1e-6, atol=0)


def chi_square(counts, expected):
    """How many of its deviations it is above its mean, about."""
    dof = counts.numel() - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - dof) / (2 * dof) ** 0.5


def test_it_is_exponential():
    waits = noise(keys_of(3, 16)[:, None], torch.arange(256), 256)
    share = -torch.expm1(-waits.double())
    counts = torch.histc(share, 1000, 0, 1)
    assert chi_square(counts, waits.numel() / 1000) < 4
    near = torch.histc(share[share < 0.001] * 1000, 50, 0, 1)
    assert chi_square(near, waits.numel() / 50_000) < 4, "also near 0, which wins"


@pytest.mark.parametrize("apart", [1, 2, 64, 256])
@pytest.mark.parametrize("what", range(4), ids=["seeds", "texts", "tokens", "classes"])
def test_neighbours_are_independent(what, apart):
    def bins(seeds, texts, tokens, classes):
        keys = torch.stack([keys_of(seed, apart + 8) for seed in range(apart + 8)])[seeds][:, texts]
        share = torch.exp(-noise(keys[..., None], torch.arange(apart + 8)[tokens], apart + 64)[..., classes])
        return (share * 16).long()

    one, two = [slice(8)] * 3 + [slice(64)], [slice(8)] * 3 + [slice(64)]
    two[what] = slice(apart, apart + one[what].stop)
    a, b = bins(*one), bins(*two)
    assert chi_square(torch.bincount((16 * a + b).flatten(), minlength=256).double(), a.numel() / 256) < 4


def test_classes_are_drawn_with_their_probabilities():
    """Of 100,000 tokens of a model whose next byte does not depend on the last ones."""
    logits, count = 2 * torch.randn(256, generator=torch.Generator().manual_seed(0)), 100_000
    drawn = torch.cat([
        (logits.softmax(-1) / noise(keys_of(8, 1), torch.arange(first, first + 1000), 256)).argmax(-1)
        for first in range(0, count, 1000)
    ])  # fmt: skip
    assert chi_square(torch.bincount(drawn, minlength=256), logits.double().softmax(-1) * count) < 4


def test_blocks_are_what_each_token_has_alone():
    keys, classes = keys_of(5, 3), 40
    made = Noise(keys, classes)
    for first, count in ((0, 1), (1, 1), (2, 4), (30, 4), (31, 32), (100, 40), (7, 2), (8, 1)):
        tokens = torch.arange(first, first + count)
        assert torch.equal(made.of(first, count), noise(keys, tokens[:, None], classes))


def test_a_text_is_the_same_beside_any_number_of_others():
    many, few, one = (
        list(
            zip(*generate_bytes(ladder("e42"), b"abc", max_new_bytes=80, num=num, seed=4, how=Sampling()), strict=True)
        )
        for num in (5, 2, 1)
    )
    assert many[:2] == few
    assert many[:1] == one
