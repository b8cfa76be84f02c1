"""The harness's model type `elman`. Importing this needs lm-evaluation-harness."""

from __future__ import annotations

import os
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from elman_core.model.checkpoint import find_checkpoint

from .scoring import document_loglikelihood


@register_model("elman")
class ElmanLM(HFLM):
    """The harness's own Hugging Face model, reading runs as well as checkpoints, and documents of any length whole.

    Args:
        pretrained: a run, a checkpoint folder or a hub id. All else is as for the harness's `hf`.
    """

    def __init__(self, pretrained: Any, **kwargs: Any) -> None:
        if isinstance(pretrained, str) and os.path.isdir(pretrained):
            pretrained = str(find_checkpoint(pretrained))
        super().__init__(pretrained=pretrained, **kwargs)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood, in nats, of each document after the separator byte."""
        results = []
        for request in requests:
            (text,) = request.args
            tokens = self.tok_encode(text, add_special_tokens=False)
            results.append(document_loglikelihood(self.model, tokens, self.prefix_token_id))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), results[-1])
        return results
