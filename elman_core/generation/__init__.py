"""Text from a model, byte by byte: sampling, the decoding loop of the command line, streamers for `generate()`."""

from .bursts import in_bursts
from .int8 import round_to_int8
from .loop import generate_bytes, generate_tokens
from .sampling import Sampling, sample
from .streamers import ByteIteratorStreamer, ByteTextStreamer

__all__ = [
    "ByteIteratorStreamer", "ByteTextStreamer", "Sampling", "generate_bytes", "generate_tokens", "in_bursts", "round_to_int8",
    "sample",
]  # fmt: skip
