"""The byte tokenizer as a plain `tokenizer.json`: 256 entries, id = byte, no code to trust.

0x1e separates documents (bos and eos), 0x00 pads. The two entries are named by the characters themselves, so no other
text can be confused with them: `encode(s) == list(s.encode())` for every string, and `bytes(ids)` are the raw bytes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SEPARATOR, PAD = 0x1E, 0x00


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A transformers tokenizer over bytes: 256 ids, left padding, lossless for every Python string.

    For bulk data use `text.encode()`, which is a hundred times faster and gives the same ids.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = _printable_names()
    names[SEPARATOR], names[PAD] = chr(SEPARATOR), chr(PAD)
    vocab = {name: byte for byte, name in enumerate(names)}
    # unk is never reached by text; it keeps `split_special_tokens=True` from dropping the two special bytes
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=chr(SEPARATOR)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(chr(b), special=True, normalized=False) for b in (SEPARATOR, PAD)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=chr(SEPARATOR),
        eos_token=chr(SEPARATOR),
        pad_token=chr(PAD),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


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
