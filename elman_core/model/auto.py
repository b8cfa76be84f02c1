"""Saved models through the public API of transformers, without its progress bars: commands draw their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Inside, transformers draws no progress bars; afterwards its setting is what it was."""
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


def load_public(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) from `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`."""
    with no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
