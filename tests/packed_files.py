"""A tokenizer and packed files for the tests, written as `elman data pack` writes them."""

import hashlib
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from elman_core.data.bytes import ByteFile
from elman_core.data.packed import PACKED_FORMAT, PACKED_HEADER, packed_manifest, packed_sections
from elman_core.storage import write_json

WORDS = [
    "the",
    "model",
    "reads",
    "größe",
    "naïve",
    "Tee",
    "über",
    "jeden",
    "Schritt",
    "東京",
    "writes",
    "123",
    "follows\n",
]


def documents(count: int = 400, seed: int = 0) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, draw.integers(5, 40))) for _ in range(count)]


def write_tokenizer(
    folder: Path, texts: list[str], vocab: int = 300, template: str | None = None
) -> PreTrainedTokenizerFast:
    """A byte-level BPE in `folder`."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    how = {"special_tokens": ["<|end|>"], "initial_alphabet": letters, "show_progress": False}
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, **how))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>", padding_side="left", chat_template=template
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_packed(path: Path, texts: list[str], folder: Path, tokenizer, masked: bool = False) -> Path:
    """`texts`, of each the second half alone counting if `masked`. folder: of the tokenizer, below that of `path`."""
    ids = [[*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for text in texts]
    tokens = np.array([i for one in ids for i in one], dtype=np.uint16)
    ends = np.cumsum([len(one) for one in ids])
    counts = np.concatenate([np.arange(len(one)) >= len(one) // 2 for one in ids])
    at = packed_sections(len(tokens), tokens.dtype, len(ids), masked)
    parts = [
        PACKED_HEADER,
        tokens.tobytes().ljust(at[0] - len(PACKED_HEADER), b"\0"),
        ends.astype("<i8").tobytes(),
    ]
    path.write_bytes(b"".join([*parts, np.packbits(counts, bitorder="little").tobytes() if masked else b""]))
    place = folder / "tokenizer.json"
    facts = {
        "format": PACKED_FORMAT, "dtype": "uint16", "tokens": len(tokens), "documents": len(ids), "masked": masked,
        "bytes": sum(len(text.encode()) + 1 for text in texts), "vocab_size": len(tokenizer),
        "separator": tokenizer.eos_token_id, "size": at[2], "blake2b": ByteFile(path, packed=True).fingerprint()["blake2b"],
        "tokenizer": {
            "path": str(place.relative_to(path.parent)), "sha256": hashlib.sha256(place.read_bytes()).hexdigest(),
        },
    }  # fmt: skip
    write_json(packed_manifest(path), facts)
    return path
