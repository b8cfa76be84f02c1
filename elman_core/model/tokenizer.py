"""The byte tokenizer as a plain `tokenizer.json`: 256 entries, id = byte, no code to trust.

0x1e separates documents (bos and eos), and 0xff, which no UTF-8 text contains, pads. Special tokens are not looked for in text
(`split_special_tokens`), so none can be forged: `encode(s) == list(s.encode())` for every string, and `bytes(ids)` are the
raw bytes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elman_core.registry import CheckpointError
from elman_core.registry.checks import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SEPARATOR, PAD = 0x1E, 0xFF
PAD_NAME = "\ufdd0"
"""A noncharacter, which text that is interchanged does not contain: for readers of tokenizer.json that look for specials."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A transformers tokenizer over bytes: 256 ids, left padding, lossless for every Python string.

    For bulk data use `text.encode()`, which is a hundred times faster and gives the same ids.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

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
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except Exception as error:  # whatever transformers and tokenizers raise
        raise CheckpointError(f"{model.name_or_path} has no tokenizer that loads: {one_line(error)}") from error


def write_tokenizer(folder: str | os.PathLike) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    byte_tokenizer().save_pretrained(folder)


def _printable_names() -> list[str]:
    """The name of each byte in a byte-level vocabulary: itself if printable, else the next free code point from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    names, free = [], 0x100
    for byte in range(256):
        if byte in printable:
            names.append(chr(byte))
        else:
            names.append(chr(free))
            free += 1
    return names
