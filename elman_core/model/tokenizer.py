"""The byte tokenizer as a plain `tokenizer.json`: 256 entries, id = byte, no code to trust.

0x1e separates documents (bos and eos), and 0xff, which no UTF-8 text contains, pads. Special tokens are not looked for in text
(`split_special_tokens`), so none can be forged: `encode(s) == list(s.encode())` for every string, and `bytes(ids)` are the
raw bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from elman_core.registry import CheckpointError, ConfigError, DataError
from elman_core.registry.checks import one_line

SEPARATOR, PAD = 0x1E, 0xFF
PAD_NAME = "\ufdd0"
"""A noncharacter, which text that is interchanged does not contain: for readers of tokenizer.json that look for specials."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A transformers tokenizer over bytes: 256 ids, left padding, lossless for every Python string.

    For bulk data use `text.encode()`, which is a hundred times faster and gives the same ids.
    """
    names = _printable_names()
    of_pad = names[PAD]
    names[SEPARATOR], names[PAD] = chr(SEPARATOR), PAD_NAME
    vocab = {name: byte for byte, name in enumerate(names)}
    # the one byte of a text whose name is not that of the pre-tokenizer is the separator, so unk means it
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=chr(SEPARATOR)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(PAD_NAME, of_pad), decoders.ByteLevel()])
    specials = (chr(SEPARATOR), PAD_NAME)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=chr(SEPARATOR),
        eos_token=chr(SEPARATOR),
        pad_token=PAD_NAME,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def load_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer beside the weights of a model that was loaded; a `CheckpointError` if none loads."""
    place = Path(str(model.name_or_path))
    if place.is_dir() and not any(place.glob("*token*")):
        raise CheckpointError(
            f"this model has {model.config.vocab_size} tokens, and {place} has no tokenizer: copy its tokenizer.json and "
            "tokenizer_config.json there"
        )
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except Exception as error:  # whatever transformers and tokenizers raise
        raise CheckpointError(f"{place} has no tokenizer that loads: {one_line(error)}") from error


def read_tokenizer(path: str | os.PathLike, sha256: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder of the file tokenizer.json that `path` names. Raises `DataError` if it is missing, does not
    load, or is another than the one of this digest."""
    place = Path(path)
    if not place.is_file():
        raise DataError(f"there is no tokenizer {place}: put the one that made these tokens there, or pack again")
    if sha256 is not None and hashlib.sha256(place.read_bytes()).hexdigest() != sha256:
        raise DataError(f"{place} is not the tokenizer that made these tokens: restore it, or pack the text again")
    try:
        return AutoTokenizer.from_pretrained(place.parent)
    except Exception as error:  # whatever transformers and tokenizers raise
        raise DataError(f"the tokenizer {place} does not load: {one_line(error)}") from error


def require_extends(data: PreTrainedTokenizerBase | None, model: PreTrainedTokenizerBase, name: str) -> None:
    """Raise `ConfigError` unless every token of a model, called `name`, is the same token of the data (None: bytes)."""
    text = "Aé\n"
    of_bytes = model(text, add_special_tokens=False).input_ids == list(text.encode())
    theirs = {} if data is None else data.get_vocab()
    if not (of_bytes if data is None else all(theirs.get(token) == i for token, i in model.get_vocab().items())):
        found = "bytes" if data is None else "tokens of another tokenizer"
        how = "without --tokenizer" if of_bytes else "with its tokenizer, elman data pack --tokenizer"
        raise ConfigError(
            f"the data are {found}, not the {'bytes' if of_bytes else 'tokens'} of {name}: pack the text {how}"
        )


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the largest id; `len` of a tokenizer leaves out ids that no token has."""
    return int(max(tokenizer.get_vocab().values())) + 1


def token_texts(tokenizer: Any) -> list[bytes]:
    """The text of each token, in UTF-8: of many tokens part of a character; of a special one its name."""
    names = tokenizer.convert_ids_to_tokens(range(vocabulary_size(tokenizer)))
    letters = {name: bytes([byte]) for byte, name in enumerate(_printable_names())}
    is_byte_level = "ByteLevel" in tokenizer.backend_tokenizer.to_str()  # a character of a name is a byte there
    added, special = set(tokenizer.added_tokens_decoder), set(tokenizer.all_special_ids)
    first = tokenizer("a", add_special_tokens=False).input_ids
    before = len(tokenizer.decode(first))

    def text(i: int, name: str | None) -> bytes:
        if name is None or i in special:
            return (name or "").encode()
        if is_byte_level and i not in added:
            return b"".join(letters.get(letter, letter.encode()) for letter in name)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
            return bytes([int(name[3:5], 16)])
        return str(tokenizer.decode([*first, i])[before:]).encode()  # some decoders drop a space at the start

    return [text(i, name) for i, name in enumerate(names)]


def vocabulary_texts(tokenizer: Any, vocab: int) -> list[bytes]:
    """`token_texts` of each number that a model of this vocabulary, maybe padded, can give; of a model of bytes, the bytes."""
    if vocab == 256:
        return [bytes([byte]) for byte in range(256)]
    texts = token_texts(tokenizer)
    return texts + [b""] * (vocab - len(texts))


def token_bytes(tokenizer: Any) -> NDArray[np.int64]:
    """The bytes of text for which each token stands, (V,): 1 for a special token, as for the separator in a file of bytes. The
    end of a document makes up for a space that the tokenizer puts before the next one."""
    sizes = np.array([len(text) for text in token_texts(tokenizer)], dtype=np.int64)
    sizes[tokenizer.all_special_ids] = 1
    if (eos := tokenizer.eos_token_id) is not None:
        sizes[eos] += 1 - sizes[tokenizer("a", add_special_tokens=False).input_ids].sum()
    return sizes


def _printable_names() -> list[str]:
    """The name of each byte in a byte-level vocabulary: itself if printable, else the next free code point from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = itertools.count(0x100)
    return [chr(byte if byte in printable else next(free)) for byte in range(256)]
