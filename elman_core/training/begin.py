"""What a training begins with: the model of `model.init` instead of new weights, and the tokenizer of its data."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elman_core.data import Source
from elman_core.model.checkpoint import locate, no_progress_bars
from elman_core.model.shipped import is_shipped
from elman_core.model.tokenizer import byte_tokenizer, load_tokenizer, read_tokenizer, require_extends, token_bytes
from elman_core.registry import CheckpointError, ConfigError

from .settings import ModelSettings
from .text import Part


def source_of(model: ModelSettings, new: bool) -> Path | str | None:
    """The checkpoint folder or hub id of `model.init`; None if the training begins with new weights.

    Raises `CheckpointError` if there is no such model, or no state of an optimizer to keep, and `ConfigError` if the settings
    of a `new` run choose what the model decides.
    """
    if not model.init:
        return None
    own = dataclasses.asdict(ModelSettings(init=model.init, init_optimizer=model.init_optimizer))
    chosen = [name for name, value in dataclasses.asdict(model).items() if value != own[name]]
    if new and chosen:
        raise ConfigError(f"{model.init} decides model.{chosen[0]}: leave it out, or begin without a model")
    source = locate(model.init)
    if model.init_optimizer == "keep" and not (isinstance(source, Path) and (source / "state/trainer.json").exists()):
        raise CheckpointError(f"{model.init} holds no state of an optimizer: leave out model.init_optimizer=keep")
    return source.absolute() if new and isinstance(source, Path) else source


def facts(model: Any, source: Path | str, settings: ModelSettings) -> dict[str, str]:
    """What the manifest says of the model that a run began with: its place, a digest of its tensors, and its optimizer."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    kept = {"drop": "dropped", "keep": "kept"}[settings.init_optimizer]
    place = settings.init if is_shipped(settings.init) else str(source)
    return {"model": place, "blake2b": digest.hexdigest(), "optimizer": kept}


def tokens_of(model: Any, parts: Sequence[Part], length: int) -> tuple[Any, NDArray[np.int64] | None, bool]:
    """What the evaluation of a model needs: its tokenizer and the bytes of each token (None: bytes, or generated tokens), and
    whether `parts` are bytes, which the tokenizer has yet to read. `length`: of a row of them.
    Raises `ConfigError` for other tokens than the model's, `CheckpointError` if the model's tokenizer does not load."""
    size = model.config.vocab_size
    described, *others = [part.file.tokenizer if part.file else None for part in parts]
    if not any((described, *others)) and all(part.vocab_size(length) == size for part in parts):
        return None, None, False
    for part in parts:
        if part.file is None:
            raise ConfigError(f"this model has {size} tokens, {part.value} {part.vocab_size(length)}")
    if any(other != described for other in others):
        raise ConfigError("the data are tokens of several tokenizers: score one file with --data FILE")
    tokenizer = load_tokenizer(model)
    if described is None:
        return tokenizer, token_bytes(tokenizer), True
    data = read_tokenizer(described["path"], described["sha256"])
    require_extends(data, tokenizer, model.name_or_path)
    return data, token_bytes(data), False


def take_tokens(model: Any, data: Source, name: str) -> None:
    """Give `model` the tokenizer and the chat template of the data, which it is saved with, and their new tokens.

    Raises as `read_tokenizer`, and `ConfigError` for other tokens than those of the model `name` that the training begins with.
    """
    if data.tokenizer is not None:
        model.tokenizer = read_tokenizer(data.tokenizer["path"], data.tokenizer["sha256"])
    if name and (data.tokenizer is not None or data.vocab_size == 256):  # others are generated
        theirs = load_tokenizer(model)
        require_extends(model.tokenizer, theirs, name)
        model.tokenizer = model.tokenizer or theirs
    if data.chat_template is not None:
        model.tokenizer = model.tokenizer or byte_tokenizer()
        model.tokenizer.chat_template = data.chat_template
        if data.tokenizer is not None:  # the template's tokens are tokens, as where the text was packed
            model.tokenizer.split_special_tokens = False
    if model.config.vocab_size < data.vocab_size:
        if not name:
            raise ConfigError(f"the data have {data.vocab_size} tokens, this model {model.config.vocab_size}")
        with no_progress_bars(quiet=True):
            model.resize_token_embeddings(data.vocab_size)
    if data.tokenizer is not None:
        ids = {f"{end}_token_id": getattr(model.tokenizer, f"{end}_token_id") for end in ("bos", "eos", "pad")}
        for key, value in ids.items():
            chosen = ids["eos_token_id"] if value is None else value
            setattr(model.config, key, chosen)
            setattr(model.generation_config, key, chosen)
