"""The decoding loop of the command line for transformers' `generate()`: `model.generate(…, custom_generate=in_bursts)`.

Transformers' own loop launches logits processors, a draw and a check for the end after every token, which takes many times as
long as the model's step on a GPU. This loop draws inside the recorded step and reads tokens in bursts.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elman_core.model import LadderForCausalLM
from elman_core.model.cache import CACHE
from elman_core.registry import ConfigError

from .decoder import decode
from .prefill import read
from .sampling import Sampling

_PROCESSORS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "RepetitionPenaltyLogitsProcessor": "penalty",
}
_INSTEAD = "leave custom_generate out for that"


def in_bursts(
    model: LadderForCausalLM,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Tensor:
    """For `custom_generate`: tokens as of `generate()`, without its loop; sampled ones are others of the same distribution.

    It supports temperature, top-k, top-p, a repetition penalty, stopping by length and by tokens, padded prompts, and several
    sequences per prompt. transformers does not pass a streamer to such functions.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: as `generate()` gives them.

    Returns:
        Tokens (B, T), prompt and what follows; a row that has ended is padded.

    Raises:
        ConfigError: an unsupported setting. DivergedError: logits that are not finite.
    """
    how = _sampling(logits_processor, generation_config)
    budget, ends = _ends(stopping_criteria, input_ids.shape[1])
    cache = model_kwargs.get(CACHE)
    embedded = model_kwargs.get("inputs_embeds") is not None
    if cache is None or getattr(cache, "_is_user_defined", False) or embedded:
        raise ConfigError(f"in_bursts starts from a prompt of tokens and makes its own cache: {_INSTEAD}")
    if budget < 1:
        return input_ids
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.all():
        mask = None
    chunk = generation_config.prefill_chunk_size or input_ids.shape[1]
    logits_BV = read(model, input_ids, cache, chunk, mask)
    seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
    seen_BV.scatter_(1, input_ids, True)
    padding = generation_config._pad_token_tensor
    seed = int(torch.randint(2**63 - 1, ()))  # so `torch.manual_seed` decides the texts
    rows: list[list[int]] = []
    ended = [False] * len(input_ids)
    for drawn in decode(model, cache, logits_BV, seen_BV, how, seed, budget):
        rows.append([int(padding) if was else token for was, token in zip(ended, drawn, strict=True)])
        ended = [was or token in ends for was, token in zip(ended, drawn, strict=True)]
        if all(ended):
            break
    return torch.cat((input_ids, torch.tensor(rows, dtype=input_ids.dtype).t().to(input_ids.device)), 1)


def _sampling(processors: Any, config: Any) -> Sampling:
    """Return the sampling settings of the prepared logits processors."""
    if config.num_beams not in (None, 1) or config.return_dict_in_generate:
        raise ConfigError(f"in_bursts returns the tokens of one beam: {_INSTEAD}")
    arguments: dict[str, Any] = {}
    for processor in processors:
        name = type(processor).__name__
        if name not in _PROCESSORS:
            raise ConfigError(
                f"in_bursts supports temperature, top-k, top-p and a repetition penalty, not {name}: {_INSTEAD}"
            )
        field = _PROCESSORS[name]
        arguments["repetition_penalty" if field == "penalty" else field] = getattr(processor, field)
    if not config.do_sample:
        return Sampling(temperature=0.0, repetition_penalty=arguments.get("repetition_penalty", 1.0))
    return Sampling(**arguments)


def _ends(criteria: Any, length: int) -> tuple[int, set[int]]:
    """(tokens to draw at most, tokens that end a row)."""
    budget, ends = None, set()
    for each in criteria:
        name = type(each).__name__
        if name == "MaxLengthCriteria":
            budget = each.max_length - length
        elif name == "EosTokenCriteria":
            ends |= set(each.eos_token_id.tolist())
        else:
            raise ConfigError(f"in_bursts supports stopping by length and by tokens, not by {name}: {_INSTEAD}")
    if budget is None:
        raise ConfigError("in_bursts needs a length: give max_new_tokens")
    return budget, ends
