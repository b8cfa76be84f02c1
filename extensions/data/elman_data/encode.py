"""From documents to tokens and a loss mask: bytes, or the ids of a tokenizer; prompts and the words of others do not count."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman_core.extension import ConfigError, DataError

from .inputs import SEPARATOR, Document, Long

Piece = tuple[bytes | str | Long, bool]
"""A part of a document, and whether its tokens count."""

BATCH = 1000


@dataclass(frozen=True)
class How:
    """How documents become tokens; the same in every process.

    Attributes:
        field: of a record, its text; None: `text`, or `prompt` and `completion`, or `messages`.
        tokenizer: the file tokenizer.json; None: bytes. separator: the id behind every document. vocab_size: ids are below it.
        template: a chat template (Jinja) for `messages`. names: of the special tokens, which it may write; None: of bytes.
    """

    field: str | None = None
    tokenizer: str | None = None
    separator: int = SEPARATOR[0]
    vocab_size: int = 256
    template: str | None = None
    names: dict[str, Any] | None = None

    @property
    def dtype(self) -> str:
        if self.tokenizer is None:
            return "uint8"
        return "uint16" if self.vocab_size <= 2**16 else "uint32"


@dataclass
class Encoded:
    """A document. `mask`: bool, where its tokens count; None: everywhere. `bytes`: of its text and one for its separator.
    A long text has no separator in its tokens."""

    tokens: bytes | memoryview | NDArray[Any] | Long
    bytes: int
    mask: NDArray[np.bool_] | None = None


def read_tokenizer(place: Path) -> tuple[Path, int, int, str | None, dict[str, Any]]:
    """The file, vocabulary, id of the end of a text, chat template and names of special tokens of a tokenizer: a folder, or its
    file tokenizer.json.

    Raises:
        ConfigError: there is none, it does not load, or it has no token that ends a text.
    """
    from transformers import AutoTokenizer

    from elman_core.extension import vocabulary_size  # imports torch, which a packing process does without

    folder = place if place.is_dir() else place.parent
    if place.name != "tokenizer.json" and not (place / "tokenizer.json").is_file():
        raise ConfigError(f"--tokenizer {place}: give a file tokenizer.json, or a folder that has one")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever transformers and tokenizers raise
        raise ConfigError(f"the tokenizer in {folder} does not load: {type(error).__name__}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer in {folder} has no eos_token, which ends documents: name one in tokenizer_config.json"
        )
    size = vocabulary_size(tokenizer)
    names = dict(tokenizer.special_tokens_map)
    return folder / "tokenizer.json", size, tokenizer.eos_token_id, tokenizer.chat_template, names


def train_bpe(texts: Iterable[str], vocab: int, template: str | None) -> Any:
    """A byte-level BPE as transformers has it, of at most `vocab` tokens; <|endoftext|> ends texts. template: for chats.

    Padding has its own token: collators leave its labels out of the loss, and a text would never learn to end.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    end, pad = "<|endoftext|>", "<|pad|>"
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[end, pad],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),  # elsewhere its bars are empty lines
    )
    made.train_from_iterator(texts, trainer)
    names = {"bos_token": end, "eos_token": end, "pad_token": pad}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template, padding_side="left", clean_up_tokenization_spaces=False, **names
    )


class Encoder:
    """Encodes documents as `how` says."""

    def __init__(self, how: How) -> None:
        self.how = how
        self.tokenizer: Any = None
        if how.tokenizer is not None:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(how.tokenizer)
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()

    def encode(self, documents: Iterable[Document], name: str) -> Iterable[Encoded | None]:
        """Each document; None for one without text. `name`: of the file, for errors."""
        if self.tokenizer is None:
            for document in documents:
                yield self._bytes(self.pieces(document, name))
            return
        for chat, some in groupby(documents, self._is_chat):
            # A text that says <|endoftext|> does not end there; the template of a chat writes such tokens.
            self.tokenizer.encode_special_tokens = not chat
            pieces = (self.pieces(document, name) for document in some)
            while batch := list(islice(pieces, BATCH)):
                yield from self._ids(batch, name)

    def _is_chat(self, document: Document) -> bool:
        return isinstance(document, dict) and self.how.field is None and not {"text", "completion"} & document.keys()

    def pieces(self, document: Document, name: str) -> Sequence[Piece]:
        """The parts of a document. Raises `DataError` for a record without a text."""
        if not isinstance(document, dict):
            return [(document, True)]
        try:
            return self._record(document, name)
        except DataError as error:  # of a file with millions of lines
            raise DataError(f"{error}; the record is {ascii(document)[:120]}") from error

    def _record(self, document: dict[str, Any], name: str) -> Sequence[Piece]:
        field = self.how.field or "text"
        if field in document:
            return [(_text(document[field], field, name), True)]
        if self.how.field is None and "completion" in document:
            prompt = _text(document.get("prompt", ""), "prompt", name)
            return [(prompt, False), (_text(document["completion"], "completion", name), True)]
        if self.how.field is None and "messages" in document:
            return self._messages(document["messages"], name)
        raise DataError(
            f"{name}: a record has no {field!r}"
            + ("" if self.how.field else ", no 'completion' and no 'messages'")
            + f": name what it has with --field, one of {', '.join(sorted(map(str, document)))[:200]}"
        )

    def _messages(self, messages: Any, name: str) -> Sequence[Piece]:
        """The conversation as the template writes it; what the assistant says counts, with what ends it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if self.how.template is None:
            raise DataError(
                f"{name}: 'messages' need a chat template: give --template FILE, or a tokenizer that has one"
            )

        names = self.how.names  # as `apply_chat_template` gives them
        if names is None:
            names = dict.fromkeys(("bos_token", "eos_token"), SEPARATOR.decode())
        given: dict[str, Any] = {"chat_template": self.how.template, **names}

        def render(some: Any, prompt: bool) -> str:
            return render_jinja_template([some], add_generation_prompt=prompt, **given)[0][0]

        def behind(done: str, text: str) -> str:
            if not text.startswith(done):
                raise ValueError("what it writes for a turn changes what it wrote before")
            return text[len(done) :]

        pieces: list[Piece] = []
        done = ""
        try:
            for i, message in enumerate(messages):
                if message["role"] == "assistant":
                    before, after = render(messages[:i], True), render(messages[: i + 1], False)
                    pieces += [(behind(done, before), False), (behind(before, after), True)]
                    done = after
            return [*pieces, (behind(done, render(messages, False)), False)]
        except Exception as error:  # whatever a template raises
            raise DataError(f"{name}: the chat template fails: {type(error).__name__}: {error}") from error

    def _bytes(self, pieces: Sequence[Piece]) -> Encoded | None:
        if len(pieces) == 1 and pieces[0][1]:  # most documents: without the lists below a tenth faster
            text = pieces[0][0]
            if isinstance(text, Long):
                return Encoded(text, len(text) + 1)
            whole = (text.encode() if isinstance(text, str) else text) + SEPARATOR
            return Encoded(whole, len(whole)) if len(whole) > 1 else None
        parts = [text.encode() if isinstance(text, str) else bytes(text) for text, _ in pieces]
        whole = b"".join([*parts, SEPARATOR])
        plain = all(counts for _, counts in pieces)
        mask = None if plain else _mask([len(p) for p in parts], pieces)
        return Encoded(whole, len(whole), mask) if len(whole) > 1 else None

    def _ids(self, documents: Sequence[Sequence[Piece]], name: str) -> Iterable[Encoded | None]:
        flat: list[str] = []
        for text, _ in (piece for pieces in documents for piece in pieces):
            try:
                flat.append(text if isinstance(text, str) else bytes(text).decode())
            except UnicodeDecodeError as error:
                raise DataError(f"{name}: invalid UTF-8 ({error.reason}), which a tokenizer cannot read") from error
        sizes = iter([len(text.encode()) for text in flat])  # first: half a surrogate pair is an error
        ids = iter([one.ids for one in self.tokenizer.encode_batch(flat, add_special_tokens=False)])
        for pieces in documents:
            parts = [next(ids) for _ in pieces]
            size = sum(next(sizes) for _ in pieces)
            if not size:
                yield None
                continue
            tokens = np.array([*(i for part in parts for i in part), self.how.separator], dtype=self.how.dtype)
            plain = all(counts for _, counts in pieces)
            yield Encoded(tokens, size + 1, None if plain else _mask([len(p) for p in parts], pieces))


def _mask(lengths: Sequence[int], pieces: Sequence[Piece]) -> NDArray[np.bool_]:
    """Where tokens count. The separator counts if the last part with text does: it ends an answer."""
    counts = [counts for _, counts in pieces]
    last = next((c for c, n in zip(reversed(counts), reversed(lengths), strict=True) if n), True)
    return np.repeat([*counts, last], [*lengths, 1])


def _text(value: Any, field: str, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name}: {field!r} is {type(value).__name__} in a record, not a text")
    return value
