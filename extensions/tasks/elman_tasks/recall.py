"""Tasks of recall: pairs of a key and a value, copies, facts. Shapes: R rows, P pairs, T places, V values, N tokens."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman_core.extension import ConfigError

from .draws import Draws
from .task import Drawn, Sequences, task


def _room(fits: bool, what: str, length: int) -> None:
    if not fits:
        raise ConfigError(f"{what} do not fit into {length} inputs")


@task("mqar", train=(64, 64), tests=(64, 128, 256))
def mqar(length: int, pairs: int = 4, vocabulary: int = 256) -> Sequences:
    """Multi-query associative recall (Zoology): pairs of a key and a value, all different, then each key once more between
    random tokens, soon after its pair more often than late; its value."""
    space, keys = (length - 2 * pairs) // 2, vocabulary // 2
    _room(space >= pairs and pairs < keys, f"{pairs} pairs", length)
    odds = np.arange(1, space + 1) ** -0.99  # a power law, as there

    def draw(draws: Draws) -> Drawn:
        key_RP = draws.distinct(keys - 1, pairs) + 1
        value_RP = draws.distinct(vocabulary - keys, pairs) + keys
        query_RP = 2 * pairs + 2 * draws.distinct(space, pairs, odds)
        tokens = draws.below(vocabulary, length)
        targets, reach = np.zeros((2, draws.rows, length), dtype=np.int64)
        tokens[:, 0 : 2 * pairs : 2] = key_RP
        tokens[:, 1 : 2 * pairs : 2] = value_RP
        np.put_along_axis(tokens, query_RP, key_RP, 1)
        np.put_along_axis(targets, query_RP, value_RP, 1)
        np.put_along_axis(reach, query_RP, query_RP - 2 * np.arange(pairs) + 1, 1)
        return Drawn(tokens, targets, reach > 0, None, reach)

    return Sequences(vocabulary, draw)


@task("in_context_recall", train=(128, 128), tests=(128, 256), examples=12800)
def in_context_recall(length: int, vocabulary: int = 16, noise: int = 0, noise_vocabulary: int = 0) -> Sequences:
    """MAD: keys and values in turn, each key with one value in a sequence; the value of a key that was there before. The loss
    takes every next token, as there. noise: of 100 pairs, how many are two noise tokens."""
    keys = (vocabulary - noise_vocabulary) // 2

    def draw(draws: Draws) -> Drawn:
        pairs = length // 2 + 1
        value_of_RK = draws.below(keys, keys) + keys
        key_RP, noisy_RP = draws.below(keys, pairs), draws.below(100, pairs) < noise
        text = np.stack([key_RP, np.take_along_axis(value_of_RK, key_RP, 1)], 2)
        if noise:
            text = np.where(noisy_RP[:, :, None], 2 * keys + draws.below(noise_vocabulary, pairs, 2), text)
        ago_RP = _since(np.where(noisy_RP, -1, key_RP))
        text_RT = text.reshape(draws.rows, -1)
        reach = np.zeros_like(text_RT[:, :length])
        reach[:, ::2] = np.where(ago_RP > 0, 2 * ago_RP + 1, 0)[:, : (length + 1) // 2]
        return _next_token(text_RT[:, : length + 1], reach)

    return Sequences(vocabulary, draw)


@task("noisy_recall", train=(128, 128), tests=(128, 256), examples=12800)
def noisy_recall(length: int, vocabulary: int = 32, noise: int = 20, noise_vocabulary: int = 16) -> Sequences:
    """MAD: in_context_recall, where a fifth of the pairs are noise from 16 further tokens."""
    return in_context_recall(length, vocabulary, noise, noise_vocabulary)


@task("fuzzy_recall", train=(128, 128), tests=(128, 256), examples=12800)
def fuzzy_recall(length: int, vocabulary: int = 16, motif: int = 3) -> Sequences:
    """MAD: in_context_recall, where keys and values are motifs of one to three tokens; all tokens of the value. Tests use
    motifs of every length for keys, not only of three."""
    keys = (vocabulary - 1) // 2
    motifs = [m for size in range(1, motif + 1) for m in itertools.permutations(range(keys), size)]
    padded_MN = np.array([(*m, *[-1] * (motif - len(m))) for m in motifs])
    sizes_M = np.array([len(m) for m in motifs])
    starts = np.searchsorted(sizes_M, np.arange(1, motif + 2))

    def some(draws: Draws, count: int) -> NDArray[np.int64]:
        """Numbers of motifs, each size as often."""
        size, unit = draws.below(motif, count), draws.unit(count)
        return starts[size] + (unit * (starts[size + 1] - starts[size])).astype(np.int64)

    def draw(draws: Draws) -> Drawn:
        pairs = length // 2 + 1
        key_RP, value_of_RM = some(draws, pairs), some(draws, len(motifs))
        value_RP = np.take_along_axis(value_of_RM, key_RP, 1)
        size_RP = sizes_M[key_RP] + sizes_M[value_RP]
        start_RP = size_RP.cumsum(1) - size_RP
        text, reach = np.zeros((2, draws.rows, length + 1 + 2 * motif), dtype=np.int64)
        ago_RP = _since(key_RP)
        before_RP = np.take_along_axis(start_RP, np.maximum(np.arange(pairs) - ago_RP, 0), 1)
        inside = start_RP <= length
        row_RP = np.broadcast_to(np.arange(draws.rows)[:, None], key_RP.shape)
        for part, offset_RP, number_RP in ((0, start_RP, key_RP), (1, start_RP + sizes_M[key_RP], value_RP)):
            for i in range(motif):
                there = inside & (i < sizes_M[number_RP])
                at = row_RP[there], (offset_RP + i)[there]
                text[at] = padded_MN[number_RP, i][there] + keys * part
                if part:  # the answer is due one place earlier, and the evidence begins with the pair before
                    reach[at] = np.where(ago_RP > 0, offset_RP + i - before_RP, 0)[there]
        return _next_token(text[:, : length + 1], reach[:, 1 : length + 1])

    return Sequences(vocabulary, draw)


@task("memorization", train=(32, 32), tests=(32,), examples=256)
def memorization(length: int, vocabulary: int = 256) -> Sequences:
    """MAD: keys, each followed by a mark; there, the value that belongs to the key in every sequence. 256 sequences."""
    facts = (vocabulary - 1) // 2
    value_of = Draws(12345, 0).distinct(facts, facts)[0] + facts

    def draw(draws: Draws) -> Drawn:
        key_RP = draws.below(facts, (length + 1) // 2)
        tokens = np.full((draws.rows, length), vocabulary - 1)
        tokens[:, ::2] = key_RP
        targets = np.zeros_like(tokens)
        targets[:, 1::2] = value_of[key_RP][:, : length // 2]
        return Drawn(tokens, targets, targets > 0, None, np.where(targets > 0, 2, 0))

    return Sequences(vocabulary, draw)


def _copied(length: int, vocabulary: int, count: int, at: Any) -> Sequences:
    """`count` random tokens among blanks, at the places `at(draws)`, (R, count); then a mark and `count` blanks, where they
    are asked for in order."""
    blank, mark = vocabulary - 2, vocabulary - 1

    def draw(draws: Draws) -> Drawn:
        copied, place_RN = draws.below(blank, count), at(draws)
        tokens, targets, reach = np.full((3, draws.rows, length), blank)
        np.put_along_axis(tokens, place_RN, copied, 1)
        tokens[:, length - count - 1] = mark
        targets[:, -count:] = copied
        asked = np.arange(length) >= length - count
        reach[:, -count:] = np.arange(length - count, length) - place_RN + 1
        return Drawn(tokens, targets, np.broadcast_to(asked, tokens.shape), None, reach)

    return Sequences(vocabulary, draw)


@task("selective_copying", train=(256, 256), tests=(256, 512), examples=12800)
def selective_copying(length: int, vocabulary: int = 16, count: int = 16) -> Sequences:
    """MAD, Mamba: 16 tokens at random places among blanks; all of them in order, after a mark. Places are uniform."""
    room = length - count - 1
    _room(room >= count, f"{count} tokens and their copy", length)
    return _copied(length, vocabulary, count, lambda draws: np.sort(draws.distinct(room, count), 1))


@task("compression", train=(32, 32), tests=(32, 64), examples=12800)
def compression(length: int, vocabulary: int = 16) -> Sequences:
    """MAD, changed: random tokens and a mark; all of them in order, from blanks. MAD decodes them from the output at the mark
    alone, with a network of its own, so figures do not compare."""
    count = (length - 1) // 2
    _room(count > 0, "a token, a mark and a copy", length)
    return _copied(
        length, vocabulary, count, lambda draws: np.tile(np.arange(count) + (length - 1) % 2, (draws.rows, 1))
    )


@task("induction", train=(256, 256), tests=(64, 128, 256, 512, 1024, 2048, 4096))
def induction(length: int, vocabulary: int = 16) -> Sequences:
    """Induction heads (Mamba): a mark somewhere among random tokens, and the mark again at the end; the token after the first
    mark."""
    _room(length > 3, "a mark, a token and a mark", length)

    def draw(draws: Draws) -> Drawn:
        tokens, place_R1 = draws.below(vocabulary - 1, length), draws.below(length - 2, 1)
        np.put_along_axis(tokens, place_R1, vocabulary - 1, 1)
        tokens[:, -1] = vocabulary - 1
        targets, reach = np.zeros((2, draws.rows, length), dtype=np.int64)
        targets[:, -1] = np.take_along_axis(tokens, place_R1 + 1, 1)[:, 0]
        reach[:, -1] = length - place_R1[:, 0]
        return Drawn(tokens, targets, reach > 0, None, reach)

    return Sequences(vocabulary, draw)


def _since(key_RP: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many pairs ago each key stood last; 0 if it did not, and for a key of -1."""
    pairs = key_RP.shape[1]
    # By key, then place; less than `pairs` apart: the same key.
    coded_RP = np.sort(key_RP * 2 * pairs + np.arange(pairs), 1)
    apart_RP = np.diff(coded_RP, axis=1, prepend=coded_RP[:, :1] - pairs)
    ago_RP = np.zeros_like(key_RP)
    np.put_along_axis(ago_RP, coded_RP % (2 * pairs), np.where((apart_RP < pairs) & (coded_RP >= 0), apart_RP, 0), 1)
    return ago_RP


def _next_token(text_RT: NDArray[np.int64], reach_RT: NDArray[np.int64]) -> Drawn:
    """Every next token is trained; answers with a reach are scored."""
    return Drawn(text_RT[:, :-1], text_RT[:, 1:], reach_RT > 0, np.ones_like(reach_RT, dtype=bool), reach_RT)
