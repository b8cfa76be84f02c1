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


ODD = b"a\xff\xc3(\xe6\x97z\xf0\x9f"


@pytest.mark.parametrize(
    ("skip", "prompt", "raw", "shown"),
    [
        (False, b"prompt", b"x", "promptx"),
        (True, b"prompt", b"x", "x"),
        (False, b"caf\xc3", b"\xa9!", "caf\xe9!"),  # a character that begins in the prompt
        (True, b"p", ODD, ODD.decode("utf-8", "replace")),
    ],
)
def test_prompt_and_text_show_as_in_python(skip, prompt, raw, shown):
    recorder = Recorder(skip_prompt=skip)
    feed(recorder, raw, prompt)
    assert "".join(recorder.pieces) == shown


def test_a_streamer_serves_again_after_its_end():
    recorder = Recorder(skip_prompt=True)
    feed(recorder, b"one\xc3")
    feed(recorder, b"two")
    assert "".join(recorder.pieces) == "one\ufffdtwo"


def test_a_token_that_is_no_byte_is_left_out():
    recorder = Recorder()
    recorder.put(torch.tensor([[97, 256, 98]]))
    assert recorder.pieces == ["ab"]


def test_batches_are_refused():
    with pytest.raises(ConfigError, match="batch of 1"):
        ByteTextStreamer().put(torch.zeros(2, 3, dtype=torch.long))
