"""The log-likelihood of a document of any length under a ladder. Shapes: T time, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elman_core import LadderCache, LadderForCausalLM

CHUNK = 2048


@torch.no_grad()
def document_loglikelihood(model: LadderForCausalLM, tokens: Sequence[int], prefix: int, chunk: int = CHUNK) -> float:
    """Sum of the log-probabilities, in nats, of every token given `prefix` and all tokens before it.

    The state is carried from chunk to chunk, so that a long document is not cut into windows, and memory does not grow.
    """
    text_T = torch.tensor([prefix, *tokens], device=model.device)
    cache: LadderCache | None = None
    total = 0.0
    for first in range(0, len(tokens), chunk):
        width = min(chunk, len(tokens) - first)
        inputs_1T = text_T[None, first : first + width]
        targets_T = text_T[first + 1 : first + width + 1]
        output = model(input_ids=inputs_1T, past_key_values=cache, use_cache=True)
        logits_TV, cache = output.logits[0].float(), output.past_key_values
        total += float(logits_TV.log_softmax(-1).gather(1, targets_T[:, None]).sum(dtype=torch.float64))
    return total
