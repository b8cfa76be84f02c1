"""The data of a training, opened once. Needs no torch, so that a wrong path fails at once."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elman_core.data import (
    ByteFile,
    Heldout,
    Mixture,
    PackedFile,
    PackedRows,
    Source,
    Split,
    TrainingWindows,
    all_held_out,
    combined,
    dealt,
    heldout_windows,
    open_file,
    split,
    tokenizer_digest,
)
from elman_core.registry.errors import ConfigError, DataError, PluginError
from elman_core.registry.extensions import extensions, known, load_extension
from elman_core.storage import require_text

from .settings import DataSettings, Settings, evaluation_bytes


class Part:
    """One of the values of `data.path`: `FILE`, or `NAME:OPTIONS` for the source NAME of an extension; then `:WEIGHT`, if any.

    Attributes:
        value: without the weight; a file by its full path. weight: 1 if none is given.
        file: None for the source of an extension.

    Raises:
        ConfigError: a weight that is not above 0, a name that a recipe cannot store, a source that is not installed.
        DataError: as `open_file`.
    """

    def __init__(self, value: str) -> None:
        self.value, self.weight = value, 1.0
        rest, _, weight = value.rpartition(":")
        if not _exists(value) and _is_number(weight) and rest:
            self.value, self.weight = rest, float(weight)
            if not 0 < self.weight < math.inf:
                raise ConfigError(f"the weight of {rest} is {weight}: a weight is above 0")
        require_text(self.value)
        self.file: ByteFile | PackedFile | None = None
        name = self.value.partition(":")[0]
        is_source = name in extensions("sources") or name in known("sources")
        if _exists(self.value) or not is_source:
            self.file = open_file(self.value)
            self.value = str(self.file.path.resolve())

    def split(self, fraction: float | None) -> Split:
        """The split of its file. `fraction`: None holds out all of it."""
        assert self.file is not None
        return all_held_out(self.file.size) if fraction is None else split(self.file.size, fraction)

    def source(self, length: int, rows: int, seed: int, sampling: str = "random", heldout: float = 0.0) -> Source:
        """Its batches; "pack": of a file, rows of whole documents. Raises as `TrainingWindows`, or `PluginError` for what an
        extension makes wrong."""
        if self.file is not None:
            parts = self.split(heldout)
            if sampling == "pack":
                return PackedRows(self.file, parts, length, rows, seed)
            return TrainingWindows(self.file, parts, length, rows, seed, sampling)
        name, _, options = self.value.partition(":")
        made = load_extension("sources", name)(options, length, rows, seed)
        if not isinstance(made, Source):
            raise PluginError(f"source {name!r} makes {type(made).__name__}, not an elman_core.data.Source")
        return made

    def vocab_size(self, length: int) -> int:
        return self.source(length, 1, 0).vocab_size if self.file is None else self.file.vocab_size

    def fingerprint(self, length: int) -> dict[str, Any]:
        """That of its file, or of the source with rows of this length."""
        return self.source(length, 1, 0).fingerprint() if self.file is None else self.file.fingerprint()

    def heldout(self, fraction: float | None, length: int, most: int | None) -> Heldout | None:
        """Its evaluation windows, of at most `most` targets together; None if nothing is held out."""
        if self.file is None:
            return self.source(length, 1, 0).heldout(most or 2**20)
        return None if fraction == 0 else heldout_windows(self.file, self.split(fraction), length, most)


@dataclass(frozen=True)
class Text:
    """The data that a training reads.

    Attributes:
        parts: what `data.path` names. windows: of the training steps.
        heldout: what an evaluation scores, each with its weight; empty if nothing is held out.
        heldout_file: of `data.heldout_file`, or None.
    """

    parts: list[Part]
    windows: Source
    heldout: list[tuple[float, Heldout]]
    heldout_file: Part | None

    @property
    def path(self) -> str | list[str]:
        """`data.path` with full paths."""
        values = [f"{p.value}:{p.weight!r}" for p in self.parts]
        return values if len(values) > 1 else self.parts[0].value

    def fingerprint(self) -> dict[str, Any]:
        """`size` in bytes and `blake2b`, of several sources also theirs, and that of `heldout_file`."""
        length = self.windows.length
        other = {"heldout_file": self.heldout_file.fingerprint(length)} if self.heldout_file else {}
        return combined([p.fingerprint(length) for p in self.parts], [p.weight for p in self.parts]) | other

    def digests(self) -> list[str | None]:
        """Of each file, that of `heldout_file` last; None for large files and for sources of extensions."""
        parts = [*self.parts, self.heldout_file] if self.heldout_file else self.parts
        return [part.file.digest() if part.file is not None else None for part in parts]


def open_text(
    settings: Settings, expected: Mapping[str, Any] | None = None, digests: list[str | None] | None = None
) -> Text:
    """Open the data of these settings.

    Raises `ConfigError` or `DataError` if there is none, it cannot be named in a recipe or be read, it is too short for these
    settings, or it has not the `expected` fingerprint, with which the run began, and the `digests` of its files.
    """
    data, train = settings.data, settings.train
    parts, held = open_parts(data)
    fraction = 0.0 if held else data.heldout
    streams = data.sampling != "random"
    weights = [part.weight for part in parts]
    rows = dealt(weights, train.batch_size) if streams else [train.batch_size] * len(parts)
    sources = [
        part.source(train.chunk_size, own, train.seed, "pack" if data.documents == "pack" else data.sampling, fraction)
        for part, own in zip(parts, rows, strict=True)
    ]
    windows = sources[0] if len(sources) == 1 else Mixture(sources, weights, train.batch_size, train.seed, streams)
    if data.documents == "reset" and windows.separator is None:
        raise ConfigError("data.documents='reset' needs a token that ends documents, which these data do not have")
    if data.documents == "pack" and expected is None and not any(part.file for part in parts):
        raise ConfigError(f"data.documents='pack' packs a file, and {parts[0].value} makes its own rows: leave it out")
    if held and held.file and tokenizer_digest(held.file) != tokenizer_digest(windows):
        raise DataError(f"{held.value} has no tokens of the training text's tokenizer: pack both with the same one")
    if held and held.file and expected is None and held.value in [part.value for part in parts]:
        raise ConfigError(f"{held.value} is a training text, too: give --heldout another text, or leave it out")
    scored = open_heldout(parts, held, fraction, train.chunk_size, evaluation_bytes(settings))
    text = Text(parts, windows, scored, held)
    if expected is not None:
        name = ", ".join(p.value for p in parts)
        _require_same(name, text.fingerprint(), expected)
        if digests is not None and text.digests() != digests:
            raise DataError(f"{name} was changed since the run began: restore it, or give the old one with --data FILE")
    return text


def open_parts(data: DataSettings) -> tuple[list[Part], Part | None]:
    """The values of `data.path`, and that of `data.heldout_file`. Raises as `Part`."""
    values = [data.path] if isinstance(data.path, str) else data.path
    if not values or not all(isinstance(value, str) and value for value in values):
        raise DataError("no training text: give one with --data FILE")
    return [Part(value) for value in values], Part(data.heldout_file) if data.heldout_file else None


def open_heldout(
    parts: list[Part], file: Part | None, fraction: float, length: int, most: int | None
) -> list[tuple[float, Heldout]]:
    """What an evaluation scores, with weights: `file`, or else the `fraction` held out of the parts, most of the heaviest; in
    windows of `length` targets, `most` in all."""
    if file is not None:
        held = file.heldout(None, length, most)
        return [(1.0, held)] if held else []
    whole = sum(part.weight for part in parts)
    scored: list[tuple[float, Heldout]] = []
    for part in parts:
        own_most = None if most is None else max(1, round(most * part.weight / whole))
        held = part.heldout(fraction, length, own_most)
        if held:
            scored.append((part.weight / whole, held))
    return scored


def _require_same(name: str, actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    if {**expected, "heldout_file": None} != {**actual, "heldout_file": None}:
        right = "each --data FILE:WEIGHT in its order" if "sources" in expected else "the right one with --data FILE"
        raise DataError(
            f"{name} is not the text of this run: {actual['size']} bytes, fingerprint {actual['blake2b']}, instead "
            f"of {expected['size']}, {expected['blake2b']}; give {right}"
        )
    if actual.get("heldout_file") != expected.get("heldout_file"):
        raise DataError("data.heldout_file is not the text that this run was evaluated on: restore it")


def _exists(name: str) -> bool:
    return os.path.exists(os.path.expanduser(name))  # of pathlib, both raise for some names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
