"""From a file of raw bytes to batches. Vocabulary 256, nothing preprocessed, every batch a pure function of its number."""

from .bytes import SEPARATOR, ByteFile
from .corpus import standard_library_corpus
from .counter import hash_u64, uniform
from .sampling import SAMPLINGS, Batch, TrainingWindows, heldout_offsets
from .split import Split, split

__all__ = [
    "SAMPLINGS", "SEPARATOR", "Batch", "ByteFile", "Split", "TrainingWindows", "hash_u64", "heldout_offsets",
    "split", "standard_library_corpus", "uniform",
]  # fmt: skip
