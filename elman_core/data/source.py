"""Sources of batches. Global batch s is a pure function of the seed, s and the row, so there is no state to lose: resumed runs
and any number of ranks see the same batches, of one source or of a weighted mixture.

Shapes: R rows, T = `length` tokens of a row that are read.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman_core.registry.errors import ConfigError, DataError, PluginError

from .counter import hash_u64

Rows = NDArray[np.int64]
Tokens = NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class Batch:
    """Windows of one step.

    Attributes:
        tokens: (R, T + 1), any unsigned dtype: the first T are inputs, the last T are targets. (R, T) beside `targets`.
        offsets: (R,), int64: where each window starts in its file.
        fresh: (R,), bool: rows that do not continue where the same row of the previous step ended.
        targets: (R, T), any unsigned dtype; None: the next tokens.
        counts: (R, T), bool: the loss mask, True for the targets that count; None: all. A source gives a mask always or never,
            and likewise all that follows or none of it.
        starts: (R, T), bool: where documents begin, each read from the initial state; None: where `fresh` says.
        filled: (R,), integers: the inputs at the front of each row that are no filling; None: all.
        size: bytes of text for which the targets of an evaluation stand; None: as their tokens say.
    """

    tokens: Tokens
    offsets: NDArray[np.int64]
    fresh: NDArray[np.bool_]
    targets: Tokens | None = None
    counts: NDArray[np.bool_] | None = None
    starts: NDArray[np.bool_] | None = None
    filled: NDArray[np.integer] | None = None
    size: int | None = None


@dataclass(frozen=True)
class Heldout:
    """Evaluation windows, equal for all runs on this data, each read from the initial state.

    Attributes:
        windows: their number. length: targets in each.
        read: the batch of these window numbers, (R,), from 0.
    """

    windows: int
    length: int
    read: Callable[[Rows], Batch]


class Source(ABC):
    """Batches of rows of `length` tokens.

    An extension adds sources through entry points in the group `elman.sources`; `--data NAME:OPTIONS` then calls the function
    behind NAME as `make(options, length, rows, seed)`, with OPTIONS as one string ("" if there are none), and it returns one of
    these or raises `ConfigError`. This one draws its rows when they are asked for::

        class Coins(Source):
            vocab_size = 2  # faces; the target is the parity of the heads so far, and counts from the eighth place on

            def read(self, step, rows):
                tokens = hash_u64(self.seed, step, rows[:, None], np.arange(self.length)) % 2
                heads = tokens.cumsum(1) % 2
                counts = np.arange(self.length) >= 8
                return Batch(tokens.astype(np.uint8), rows, np.ones(len(rows), bool), heads.astype(np.uint8),
                             np.broadcast_to(counts, tokens.shape))

            def fingerprint(self):
                return {"size": 0, "blake2b": "coins 1"}

        def make(options, length, rows, seed):
            return Coins(length, rows, seed)

    Args:
        length: inputs in a row (train.chunk_size). rows: of the global batch (train.batch_size). seed: of the run.

    Attributes:
        name: for errors. vocab_size: token ids are below it; a new model gets as many.
        separator: the id that ends a document; None if there is none.
        tokenizer: of the ids, as `PackedFile` describes it; None for bytes and for generated tokens.
        bytes_per_token: bytes of text for which a token stands, on average. chat_template: of its conversations, or None.
    """

    name: str = "the data"
    vocab_size: int = 256
    separator: int | None = None
    tokenizer: Mapping[str, Any] | None = None
    bytes_per_token: float = 1.0
    chat_template: str | None = None

    def __init__(self, length: int, rows: int, seed: int) -> None:
        self.length, self.rows, self.seed = length, rows, seed

    def batch(self, step: int, rows: Sequence[int] | Rows | None = None) -> Batch:
        """Global batch `step` (from 0), or only these `rows` of it. Raises `DataError` if a token is not in the vocabulary."""
        batch = self.read(step, np.arange(self.rows) if rows is None else np.asarray(rows))
        for tokens in (batch.tokens, batch.targets):
            if tokens is None or np.iinfo(tokens.dtype).max < self.vocab_size:
                continue  # no value of such a dtype is beyond the vocabulary
            most = tokens.max(initial=0)
            if most >= self.vocab_size:
                raise DataError(f"{self.name} has the token {most}, beyond its vocabulary of {self.vocab_size}")
        return batch

    @abstractmethod
    def read(self, step: int, rows: Rows) -> Batch:
        """These rows of global batch `step`, the same whenever, wherever and in whatever order they are asked for."""

    def fingerprint(self) -> dict[str, Any]:
        """`size` in bytes (0 if nothing is stored) and `blake2b`, a string that differs where the batches would."""
        raise PluginError(f"{type(self).__name__} has no fingerprint()")

    def heldout(self, most: int) -> Heldout | None:
        """Evaluation windows of at most `most` targets in all, which training should never see; None: nothing is held out.

        They are asked of a source with one row and seed 0, so that they are equal for all runs.
        """
        return None

    def origin(self, step: int) -> dict[str, list[int]]:
        """Where the rows of a batch come from, for a report."""
        return {}

    @property
    def in_words(self) -> str:
        """What it is, for the run's first lines."""
        return "generated"


def tokenizer_digest(data: Any) -> str | None:
    """SHA-256 of the tokenizer of a source or a file; None for bytes and generated tokens."""
    return (data.tokenizer or {}).get("sha256")


class Mixture(Source):
    """Several sources of the same tokens. Each row of each batch comes from one of them, drawn with probability `weights`;
    where rows are streams, each source has the same rows in every batch.

    Args:
        sources: of the rows that `dealt` says, or of all rows. weights: positive, one for each.
        streams: whether a row continues where it ended in the batch before.
    """

    def __init__(
        self, sources: Sequence[Source], weights: Sequence[float], rows: int, seed: int, streams: bool
    ) -> None:
        super().__init__(sources[0].length, rows, seed)
        self.sources = sources
        self.shares = np.asarray(weights) / sum(weights)
        first, *others = dict.fromkeys(json.dumps(tokenizer_digest(s)) for s in sources)
        if others:
            raise DataError(
                f"the data are tokens of different tokenizers, {first} and {others[0]} (SHA-256; null: bytes): pack them "
                "with the same one"
            )
        self.vocab_size = max(s.vocab_size for s in sources)
        self.separator, self.tokenizer = sources[0].separator, sources[0].tokenizer
        self.chat_template = next((s.chat_template for s in sources if s.chat_template), None)
        self.bytes_per_token = float(self.shares @ [s.bytes_per_token for s in sources])
        self.bounds = np.cumsum(dealt(weights, rows)) if streams else None
        # A recorded step needs arrays of the same kinds in every batch, whichever sources its rows come from.
        batches = [s.read(0, np.arange(1)) for s in sources]
        self.dtype = np.result_type(*(a.dtype for b in batches for a in (b.tokens, b.targets) if a is not None))
        names = ("targets", "counts", "starts", "filled", "fresh", "offsets")
        self.given = {name for name in names if any(getattr(b, name) is not None for b in batches)}

    def read(self, step: int, rows: Rows) -> Batch:
        which, own = self._drawn(step, rows)
        whole: dict[str, Any] = {}
        for i in np.unique(which):
            here = which == i
            batch = self.sources[i].batch(step, own[here])
            for name, array in self._alike(batch).items():
                if name not in whole:
                    whole[name] = np.empty((len(rows), *array.shape[1:]), array.dtype)
                whole[name][here] = array
        return Batch(**whole)

    def _alike(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """The arrays of a batch of one source, with what only others give."""
        rows = len(batch.tokens)
        absent = {
            "targets": batch.tokens[:, 1:],
            "counts": np.ones((rows, self.length), bool),
            "starts": (np.arange(self.length) == 0) & batch.fresh[:, None],
            "filled": np.full(rows, self.length),
        }
        arrays = {"tokens": batch.tokens[:, : self.length] if "targets" in self.given else batch.tokens}
        for name in self.given:
            own = getattr(batch, name)
            arrays[name] = absent[name] if own is None else own
        for name in {"tokens", "targets"} & arrays.keys():
            arrays[name] = arrays[name].astype(self.dtype)
        return arrays

    def _drawn(self, step: int, rows: Rows) -> tuple[Rows, Rows]:
        """The source of each row, and its number there."""
        if self.bounds is not None:
            which = np.searchsorted(self.bounds, rows, side="right")
            return which, rows - np.append(0, self.bounds)[which]
        drawn = hash_u64(self.seed, step, rows, 1) * 2.0**-64  # one counter more than offsets: not the same numbers
        return np.minimum(np.searchsorted(self.shares.cumsum(), drawn, side="right"), len(self.sources) - 1), rows

    def origin(self, step: int) -> dict[str, list[int]]:
        rows = np.arange(self.rows)
        return {"sources": self._drawn(step, rows)[0].tolist(), "offsets": self.read(step, rows).offsets.tolist()}

    @property
    def in_words(self) -> str:
        return "; ".join(f"{w:.3g} {s.name}, {s.in_words}" for s, w in zip(self.sources, self.shares, strict=True))


def combined(fingerprints: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """The fingerprint of a mixture, which holds those of its sources; one source has its own."""
    if len(fingerprints) == 1:
        return dict(fingerprints[0])
    every = [{**one, "share": round(float(w / sum(weights)), 9)} for one, w in zip(fingerprints, weights, strict=True)]
    digest = hashlib.blake2b(json.dumps(every, sort_keys=True).encode(), digest_size=16).hexdigest()
    return {"size": sum(one["size"] for one in every), "blake2b": digest, "sources": every}


def dealt(weights: Sequence[float], rows: int) -> list[int]:
    """The rows of a batch that each source has where rows are streams: in proportion to the weights, by largest remainders.

    Raises:
        ConfigError: a source would have none.
    """
    ideal = np.asarray(weights) / sum(weights) * rows
    counts = np.floor(ideal).astype(int)
    counts[np.argsort(counts - ideal, kind="stable")[: rows - counts.sum()]] += 1
    if not counts.all():
        least = sum(weights) / min(weights)
        raise ConfigError(
            f"a batch of {rows} rows has no stream for a source with {1 / least:.2g} of the weight: train.batch_size must be "
            f"about {least:,.0f}"
        )
    return counts.tolist()
