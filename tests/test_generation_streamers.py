"""Streamers: text appears character by character, and whole."""

import io

import pytest
import torch

from elman_core.generation import ByteTextStreamer
from elman_core.registry import ConfigError

TEXT = "naïve 日本語 👩‍👩‍👧 ÿĞ\x1e\x00\nend"


class Recorder(ByteTextStreamer):
    def __init__(self, **kwargs):
        super().__init__(io.StringIO(), **kwargs)
        self.pieces = []

    def on_text(self, text):
        self.pieces.append(text)


def feed(streamer, raw, prompt=b"p"):
    streamer.put(torch.tensor([list(prompt)]))
    for byte in raw:
        streamer.put(torch.tensor([byte]))
    streamer.end()


def test_each_character_appears_with_its_last_byte():
    recorder = Recorder(skip_prompt=True)
    feed(recorder, TEXT.encode())
    assert recorder.pieces == list(TEXT)


def test_the_prompt_is_shown_unless_it_is_skipped():
    for skip, expected in ((False, "promptx"), (True, "x")):
        recorder = Recorder(skip_prompt=skip)
        feed(recorder, b"x", b"prompt")
        assert "".join(recorder.pieces) == expected


def test_a_character_may_begin_in_the_prompt():
    recorder = Recorder()
    feed(recorder, b"\xa9!", b"caf\xc3")
    assert "".join(recorder.pieces) == "café!"


def test_bytes_that_are_not_utf8_show_as_in_python():
    raw = b"a\xff\xc3(\xe6\x97z\xf0\x9f"
    recorder = Recorder(skip_prompt=True)
    feed(recorder, raw)
    assert "".join(recorder.pieces) == raw.decode("utf-8", "replace")


def test_a_streamer_serves_again_after_its_end():
    recorder = Recorder(skip_prompt=True)
    feed(recorder, b"one\xc3")
    feed(recorder, b"two")
    assert "".join(recorder.pieces) == "one\ufffdtwo"


def test_batches_are_refused():
    with pytest.raises(ConfigError, match="batch of 1"):
        ByteTextStreamer().put(torch.zeros(2, 3, dtype=torch.long))
