"""Batches are pure functions of (seed, step, row), and training never touches a held-out byte."""

import numpy as np
import pytest

from elman_core.data import ByteFile, TrainingWindows, hash_u64, heldout_offsets, split
from elman_core.registry.errors import ConfigError, DataError

LENGTH, ROWS = 100, 16


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text"
    np.random.default_rng(0).integers(0, 256, 3_000_000, dtype=np.uint8).tofile(path)
    return ByteFile(path)


def windows(file, sampling="random", seed=5, heldout=0.01, rows=ROWS, length=LENGTH):
    return TrainingWindows(file, split(file.size, heldout), length, rows, seed, sampling)


def heldout_mask(parts):
    mask = np.zeros(parts.size, dtype=bool)
    for first, end in parts.heldout_runs:
        mask[first:end] = True
    return mask


def test_the_generator_is_splitmix64():
    # The first outputs for seed 1234567, from the reference implementation in Java's SplittableRandom and the C of Vigna.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert hash_u64(1234567, range(3)).tolist() == expected


@pytest.mark.parametrize("sampling", ["random", "stream", "tbptt"])
def test_a_batch_does_not_depend_on_the_order_or_the_rank(file, sampling):
    whole = windows(file, sampling).batch(11)
    later = windows(file, sampling)
    later.batch(3)
    assert np.array_equal(later.batch(11).tokens, whole.tokens)
    for ranks in (2, 4, 8):
        parts = [later.batch(11, range(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)) for rank in range(ranks)]
        assert np.array_equal(np.concatenate([p.tokens for p in parts]), whole.tokens)
        assert np.array_equal(np.concatenate([p.fresh for p in parts]), whole.fresh)


@pytest.mark.parametrize("sampling", ["random", "stream", "tbptt"])
@pytest.mark.parametrize("length", [1, 100, 70_000])
def test_training_never_touches_a_heldout_byte(file, sampling, length):
    rows = 4
    made = windows(file, sampling, rows=rows, length=length)
    held = np.concatenate([[0], np.cumsum(heldout_mask(split(file.size)))])
    for step in range(400):
        at = made.sampler.place(step, np.arange(rows))[0]
        assert at.min() >= 0
        assert at.max() + length + 1 <= file.size
        assert np.array_equal(held[at + length + 1], held[at])


def test_random_windows_start_at_every_allowed_byte_and_nowhere_else(file):
    runs = np.array([[0, 12], [20, 25], [30, 34]])
    from elman_core.data.sampling import RandomSampler

    sampler = RandomSampler(runs, 4, seed=0)
    starts, _ = sampler.place(0, np.arange(20_000))
    counts = np.bincount(starts)
    assert np.flatnonzero(counts).tolist() == [*range(8), 20]
    assert abs(counts[counts > 0] - 20_000 / 9).max() < 250


def test_tbptt_rows_continue_with_one_byte_of_overlap_until_a_gap(file):
    made = windows(file, "tbptt")
    parts = split(file.size)
    starts_of_runs = set(parts.training_runs[:, 0].tolist())
    before = made.batch(0)
    assert before.fresh.all()
    gaps = 0
    for step in range(1, made.sampler.windows_per_row):
        now = made.batch(step)
        continues = now.offsets == before.offsets + LENGTH
        assert np.array_equal(now.fresh, ~continues)
        assert np.array_equal(now.tokens[continues, 0], before.tokens[continues, -1])
        assert all(int(o) in starts_of_runs for o in now.offsets[now.fresh])
        gaps += int(now.fresh.sum())
        before = now
    assert gaps > 0
    again = made.batch(made.sampler.windows_per_row)
    assert again.fresh.all()
    assert np.array_equal(again.tokens, made.batch(0).tokens)


def test_streams_of_different_rows_do_not_overlap(file):
    made = windows(file, "stream")
    seen = np.concatenate([made.batch(s).offsets for s in range(made.sampler.windows_per_row)])
    assert len(np.unique(seen)) == len(seen)
    assert np.diff(np.sort(seen)).min() >= LENGTH


@pytest.mark.parametrize("size", [2_000, 20_000, 300_000, 1_048_576, 30_000_000, 400_000_000])
def test_the_heldout_part_is_at_least_what_was_promised_and_not_much_more(size):
    parts = split(size)
    promised = max(0.01 * size, min(2**20, 0.1 * size))
    assert promised <= parts.heldout_bytes < promised + parts.block
    assert parts.heldout_bytes + parts.training_bytes == size
    both = np.concatenate([parts.heldout_runs, parts.training_runs])
    ordered = both[np.argsort(both[:, 0])]
    assert ordered[0, 0] == 0
    assert ordered[-1, 1] == size
    assert np.array_equal(ordered[1:, 0], ordered[:-1, 1])


def test_blocks_are_64_kib_from_a_mebibyte_on():
    assert split(2**20).block == 2**16
    assert split(2**20 - 1).block < 2**16


def test_the_share_that_is_held_out_is_said_as_it_is():
    assert split(8_000_000).in_words == "851,968 (10.6 %) held out, the least for a text of this size"
    assert split(2**30).in_words == "10,747,904 (1.0 %) held out"
    assert split(2**20, 0.2).in_words == "262,144 (25.0 %) held out"
    assert split(2**20, 0.0).in_words == "nothing held out"


def test_a_split_without_heldout_gives_everything_to_training(file):
    parts = split(file.size, 0.0)
    assert parts.training_bytes == file.size
    with pytest.raises(DataError, match=r"data\.heldout is 0"):
        heldout_offsets(parts, 100)
    with pytest.raises(DataError, match=r"between 0 and 0\.5"):
        split(file.size, 0.7)


def test_evaluation_windows_lie_in_the_heldout_part_and_score_each_byte_once(file):
    parts = split(file.size)
    offsets, length = heldout_offsets(parts, LENGTH)
    mask = heldout_mask(parts)
    scored = np.concatenate([np.arange(o + 1, o + length + 1) for o in offsets])
    assert mask[offsets].all()
    assert mask[scored].all()
    assert len(np.unique(scored)) == len(scored)
    assert len(scored) > 0.99 * mask.sum()


def test_a_cap_keeps_evenly_spaced_evaluation_windows(file):
    parts = split(file.size)
    everything, _ = heldout_offsets(parts, LENGTH)
    some, _ = heldout_offsets(parts, LENGTH, most_bytes=5_000)
    assert len(some) == 50
    assert set(some.tolist()) <= set(everything.tolist())
    positions = np.searchsorted(everything, some)
    assert np.ptp(np.diff(positions)) <= 1


def test_unknown_sampling_names_the_known_ones(file):
    with pytest.raises(ConfigError, match="random, stream, tbptt"):
        windows(file, "shuffled")
