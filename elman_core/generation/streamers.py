"""Streamers for transformers' `generate(streamer=…)` over bytes, in linear time.

Transformers' own TextStreamer decodes its whole buffer again for every token until a newline comes, which is quadratic where
tokens are bytes. These decode UTF-8 incrementally: a character appears when its last byte arrives, and bytes that are not
UTF-8 show as U+FFFD, as in Python.
"""

from __future__ import annotations

import codecs
import queue
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from elman_core.registry import ConfigError


class ByteTextStreamer:
    """Writes text as it is generated. Tokens that are not bytes, of an enlarged vocabulary, are left out.

    Args:
        stream: where to; None for standard output.
        skip_prompt: write only what is new.
    """

    def __init__(self, stream: TextIO | None = None, skip_prompt: bool = False) -> None:
        self.stream = stream
        self.skip_prompt = skip_prompt
        self._start()

    def _start(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_prompt = True

    def put(self, value: Any) -> None:
        """Called by `generate()` with the prompt, (1, T), and then with each new token, (1,)."""
        if value.ndim > 1 and value.shape[0] > 1:
            raise ConfigError("a streamer shows one sample: generate with a batch of 1")
        if self._at_prompt and self.skip_prompt:
            self._at_prompt = False
            return
        self._at_prompt = False
        if text := self._decoder.decode(bytes(token for token in value.flatten().tolist() if token < 256)):
            self.on_text(text)

    def end(self) -> None:
        """Called by `generate()` after the last token. An unfinished character shows as U+FFFD."""
        rest = self._decoder.decode(b"", final=True)
        self._start()
        if rest:
            self.on_text(rest)
        self.on_end()

    def on_text(self, text: str) -> None:
        """Handle the next characters; override it to do something else."""
        stream = self.stream or sys.stdout
        stream.write(text)
        stream.flush()

    def on_end(self) -> None:
        """Handle the end of the text."""
        stream = self.stream or sys.stdout
        stream.write("\n")
        stream.flush()


class ByteIteratorStreamer(ByteTextStreamer):
    """An iterator over the text as it is generated, for `generate()` in another thread.

    Args:
        skip_prompt: yield only what is new.
        timeout: seconds to wait for the next characters before `queue.Empty` is raised; None waits forever.
    """

    def __init__(self, skip_prompt: bool = False, timeout: float | None = None) -> None:
        super().__init__(None, skip_prompt)
        self.timeout = timeout
        self._queue: queue.Queue[str | None] = queue.Queue()

    def on_text(self, text: str) -> None:
        self._queue.put(text)

    def on_end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        text = self._queue.get(timeout=self.timeout)
        if text is None:
            raise StopIteration
        return text
