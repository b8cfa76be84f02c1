"""A saved model as anybody loads it: the public API of transformers, and nothing of this package but its import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from .quiet import no_progress_bars


def load_public(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) from `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`."""
    with no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
