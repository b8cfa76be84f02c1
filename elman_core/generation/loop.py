"""The decoding loop of the command line: prefill the prompt, then one byte a step at constant cost.

Shapes: B samples, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from elman_core.model import LadderForCausalLM
from elman_core.nn import scaled_once
from elman_core.registry import ConfigError

from .decoder import decode
from .prefill import least_rows, prefill
from .sampling import Sampling


def generate_bytes(
    model: LadderForCausalLM,
    prompt: bytes,
    *,
    max_new_bytes: int = 500,
    num: int = 1,
    how: Sampling | None = None,
    stop: Collection[int] = (),
    seed: int | None = None,
) -> Iterator[list[int | None]]:
    """Continue `prompt` `num` times at once; yields the next byte of each sample at every step, None once it has ended.

    Args:
        model: in evaluation mode, on any device; its vocabulary is 256 bytes.
        prompt: raw bytes; an empty one stands for the start of a document (the model's bos byte, or else its eos).
        max_new_bytes: bytes to write at most in each sample.
        how: sampling; None for the model's own distribution.
        stop: a sample ends before it would write one of these bytes.
        seed: fixes the samples on one device and machine; None draws a new one.

    Raises:
        ConfigError: a vocabulary that is not bytes, counts below 0, or a seed that does not fit in 64 bits.
        DivergedError: logits that are not finite.
    """
    if model.config.vocab_size != 256:
        raise ConfigError(f"this model has {model.config.vocab_size} tokens, not 256 bytes: generate_tokens takes ids")
    return generate_tokens(model, prompt, max_new_tokens=max_new_bytes, num=num, how=how, stop=stop, seed=seed)


def generate_tokens(
    model: LadderForCausalLM,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 500,
    num: int = 1,
    how: Sampling | None = None,
    stop: Collection[int] = (),
    seed: int | None = None,
) -> Iterator[list[int | None]]:
    """As `generate_bytes`, for any vocabulary: `prompt`, `stop` and what it yields are token ids.

    Raises:
        ConfigError: also a token that the model does not have.
    """
    for what, given in (("prompt", prompt), ("stop", stop)):
        for token in (min(given, default=0), max(given, default=0)):
            if isinstance(token, str) or not 0 <= token < model.config.vocab_size:
                raise ConfigError(f"this model has {model.config.vocab_size} tokens, and the {what} has {token!r}")
    if max_new_tokens < 0 or num < 1:
        raise ConfigError(f"new tokens must be at least 0, and samples at least 1, not {max_new_tokens}, {num}")
    if seed is not None and not -(2**63) <= seed < 2**64:  # what torch takes
        raise ConfigError(f"the seed must fit in 64 bits, not {seed}")
    return _generate(model, prompt, max_new_tokens, num, how or Sampling(), frozenset(stop), seed)


def document_start(model: LadderForCausalLM) -> int:
    """The token that an empty prompt stands for: bos, or else eos, or else the separator of bytes."""
    ends = model.config.bos_token_id, model.config.eos_token_id
    return next((token for token in ends if isinstance(token, int)), 0x1E)


def _generate(
    model: LadderForCausalLM,
    prompt: Sequence[int],
    budget: int,
    num: int,
    how: Sampling,
    stop: frozenset[int],
    seed: int | None,
) -> Iterator[list[int | None]]:
    device = model.device
    seed = torch.Generator().seed() if seed is None else seed
    text = prompt or [document_start(model)]
    seen_BV = torch.zeros(num, model.config.vocab_size, dtype=torch.bool, device=device)
    seen_BV[:, sorted(set(text))] = True
    ended = [False] * num
    with scaled_once(model):
        cache, logits_BV = prefill(model, text)
        padding = -num % least_rows(model)
        if num + padding > 1:
            cache.batch_repeat_interleave(num + padding)
            logits_BV = logits_BV.expand(num, -1)
        for row in decode(model, cache, logits_BV, seen_BV, how, seed, budget, padding):
            ended = [was or byte in stop for was, byte in zip(ended, row, strict=True)]
            if all(ended):
                return
            yield [None if done else byte for done, byte in zip(ended, row, strict=True)]
