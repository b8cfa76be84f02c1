"""The harness's model type `elman`. Importing this needs lm-evaluation-harness."""

from __future__ import annotations

import sys
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from elman_core.extension import locate

from .scoring import document_loglikelihood


@register_model("elman")
class ElmanLM(HFLM):
    """The harness's own Hugging Face model, reading runs as well as checkpoints, and documents and contexts whole.

    Args:
        pretrained: a run, a checkpoint folder, pretrained/NAME or a hub id. All else is as for the harness's `hf`.
    """

    _max_length: int | None

    def __init__(self, pretrained: Any, **kwargs: Any) -> None:
        if isinstance(pretrained, str):
            pretrained = str(locate(pretrained))
        super().__init__(pretrained=pretrained, **kwargs)

    @property
    def max_length(self) -> int:
        """The most bytes of a context: a state has no window, so all of it unless `max_length` was given."""
        return self._max_length or sys.maxsize

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        """Without requests, the harness tries rows of the most bytes: here, of the window that the model recommends."""
        given = self._max_length
        self._max_length = given or (None if requests else self.model.config.max_position_embeddings)
        try:
            return int(super()._detect_batch_size(requests, pos))
        finally:
            self._max_length = given

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of both. The harness counts spaces at the context's end to the continuation: without others, the separator is
        left, as of an empty context."""
        before, after = super()._encode_pair(context, continuation)
        return before or [self.prefix_token_id], after

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood, in nats, of each document after the separator byte."""
        results = []
        mixed = self.mixed_precision_dtype
        for request in requests:
            (text,) = request.args
            tokens = self.tok_encode(text, add_special_tokens=False)
            with torch.autocast(self.device.type, dtype=mixed, enabled=mixed is not None):
                results.append(document_loglikelihood(self.model, tokens, self.prefix_token_id))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), results[-1])
        return results
