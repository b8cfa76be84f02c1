"""Rows of whole documents: every training token is a target once an epoch, behind what stands before it in its document."""

import numpy as np
import pytest
from packed_files import documents, write_packed, write_tokenizer

from elman_core.data import PackedRows, open_file, split
from elman_core.data.rows import BLOCK, fill
from elman_core.registry import DataError

LENGTH, ROWS = 64, 6


def raw(tmp_path, sizes):
    draw, path = np.random.default_rng(0), tmp_path / "text"
    path.write_bytes(b"".join(bytes(draw.integers(97, 123, n, dtype=np.uint8)) + b"\x1e" for n in sizes))
    return path


def tokens(tmp_path, masked):
    texts = documents(900)
    return write_packed(
        tmp_path / "file", texts, tmp_path / "tokenizer", write_tokenizer(tmp_path / "tokenizer", texts), masked
    )


FILES = {
    "short documents": lambda tmp: raw(tmp, np.random.default_rng(1).integers(1, 30, 3000)),
    "documents of which none shares a row": lambda tmp: raw(tmp, np.random.default_rng(1).integers(35, 60, 900)),
    "documents longer than rows": lambda tmp: raw(tmp, np.random.default_rng(1).integers(10, 300, 400)),
    "one document": lambda tmp: raw(tmp, [40_000]),
    "a few, fewer than rows": lambda tmp: raw(tmp, [30, 50, 7, 64, 63, 65]),
    "tokens": lambda tmp: tokens(tmp, masked=False),
    "answers": lambda tmp: tokens(tmp, masked=True),
}


@pytest.mark.parametrize("name", FILES)
def test_an_epoch_has_every_training_target_once_behind_its_own_document(name, tmp_path):
    file = open_file(FILES[name](tmp_path))
    parts = split(file.size, 0.0 if file.size < 1000 else 0.05)
    source = PackedRows(file, parts, LENGTH, ROWS, seed=3)
    text, ends = file.windows(np.zeros(1, np.int64), file.size)[0], file.ends()
    counted = file.counts(np.zeros(1, np.int64), file.size)
    first_of = np.append(0, ends)[
        np.searchsorted(ends, np.arange(file.size), side="right")
    ]  # of the document of each token
    training = np.zeros(file.size, int)
    for first, last in parts.training_runs:
        known = np.arange(first, last) > np.maximum(
            first, 0
        )  # the first token of a stretch is predicted from what is held out
        training[first:last] = known | (first_of[first:last] == np.arange(first, last))
    seen, whole, cut = np.zeros(file.size, int), 0, 0
    used, blocks = 0, -(-2 * source.total // source.block)
    for block in range(blocks):
        for row, pieces in enumerate(source.filled(block)):
            assert pieces
            at = block * BLOCK + row
            batch = source.batch(at // ROWS, [at % ROWS])
            assert batch.filled[0] == sum(steps for *_, steps in pieces) <= LENGTH
            assert batch.starts.sum() == len(pieces)
            for (piece, done, steps), start in zip(pieces, batch.starts[0].nonzero()[0], strict=True):
                first, here = source.firsts[piece] + done, slice(start, start + steps)
                assert np.array_equal(batch.targets[0, here], text[first : first + steps])
                before = file.separator if first == first_of[first] else text[first - 1]
                assert np.array_equal(batch.tokens[0, here], [before, *text[first : first + steps - 1]])
                assert (first_of[first : first + steps] == first_of[first]).all()
                mask = np.ones(steps, bool) if counted is None else counted[0, first : first + steps]
                assert np.array_equal(batch.counts[0, here], mask)
                seen[first : first + steps] += 1
                whole, cut = whole + (steps == source.counts[piece]), cut + (steps < source.counts[piece])
            assert not batch.counts[0, batch.filled[0] :].any()
            used += batch.filled[0]
    epochs = blocks * source.block // source.total
    assert epochs >= 2
    assert seen[training == 0].sum() == 0, "held out"
    assert set(seen[training == 1]) <= {epochs, epochs + 1}
    if len(source.firsts) > BLOCK:
        assert cut <= (0.06 if "none shares" in name else 0.02) * whole or name == "one document"
    assert used / (blocks * BLOCK * LENGTH) >= (0.6 if "none shares" in name else 0.9 if "few" not in name else 0.7)


def test_rows_do_not_depend_on_who_asks_and_when(tmp_path):
    file = open_file(FILES["documents longer than rows"](tmp_path))
    source, again = (PackedRows(file, split(file.size), LENGTH, ROWS, seed=3) for _ in range(2))
    whole = [source.batch(step) for step in range(60)]
    for step in (59, 0, 30, 2, 1):
        shuffled = np.random.default_rng(step).permutation(ROWS)
        parts = [again.batch(step, rows) for rows in np.array_split(shuffled, 3)]
        for name in ("tokens", "targets", "counts", "starts", "filled", "offsets"):
            asked = np.concatenate([getattr(p, name) for p in parts])
            assert np.array_equal(asked, getattr(whole[step], name)[shuffled]), name
    other = PackedRows(file, split(file.size), LENGTH, ROWS, seed=4).batch(0)
    assert not np.array_equal(other.tokens, whole[0].tokens)


def test_pieces_stay_whole_where_they_fit_and_fill_what_is_left_where_they_do_not():
    assert fill(enumerate([7, 3, 2, 5, 3]), 10, rows=2) == [[(3, 0, 5), (1, 0, 3), (2, 0, 2)], [(0, 0, 7), (4, 0, 3)]]
    assert fill([(0, 6), (1, 6), (2, 5)], 10, rows=2) == [[(0, 0, 6), (2, 4, 1)], [(1, 0, 6), (2, 0, 4)]]
    assert fill([(0, 9)], 10, rows=3) == [[(0, 4, 2)], [(0, 6, 3)], [(0, 0, 4)]]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_no_row_stays_empty_however_short_rows_are(length, tmp_path):
    file = open_file(raw(tmp_path, [30, 1, 50, 2, 900]))
    source = PackedRows(file, split(file.size, 0), length, ROWS, seed=3)
    assert all(batch.filled.min() >= 1 for batch in map(source.batch, range(100)))


@pytest.mark.parametrize("size", [0, 40])
def test_a_text_that_fills_no_row_is_refused(size, tmp_path):
    file = open_file(raw(tmp_path, [size]))
    with pytest.raises(DataError, match=f"{size + 1} bytes to train on fill no row of 64"):
        PackedRows(file, split(file.size, 0), LENGTH, ROWS, seed=3)
