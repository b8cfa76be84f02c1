"""From files to batches: raw bytes with nothing prepared, packed files, or what an extension generates."""

from .bytes import SEPARATOR, ByteFile
from .counter import hash_u64, uniform
from .packed import PackedFile, open_file
from .rows import PackedRows
from .sampling import SAMPLINGS, TrainingWindows, heldout_offsets, heldout_windows, windows_at
from .source import Batch, Heldout, Mixture, Source, combined, dealt, tokenizer_digest
from .split import Split, all_held_out, split

__all__ = [
    "SAMPLINGS", "SEPARATOR", "Batch", "ByteFile", "Heldout", "Mixture", "PackedFile", "PackedRows", "Source", "Split",
    "TrainingWindows", "all_held_out", "combined", "dealt", "hash_u64", "heldout_offsets", "heldout_windows", "open_file",
    "split", "tokenizer_digest", "uniform", "windows_at",
]  # fmt: skip
