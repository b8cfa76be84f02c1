"""The decoding step of transformers' `generate()` with a static cache, recorded as one CUDA graph.

It replaces the compiled step of transformers: nothing is traced, the step runs the same kernels as without compiling, and
recording takes one step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from .cache import CACHE, LadderStaticCache
from .graph import WARM, CudaRecorder, Recorder, try_to_record

log = logging.getLogger("elman_core")

_PLAIN = {"input_ids", CACHE, "use_cache", "return_dict", "logits_to_keep"}


class GraphedStep:
    """Called like the model: a step with one new token per row is recorded and replayed; anything else runs normally.

    Make one for each generation: it keeps the cache of its first step. Each call overwrites the logits that the previous call
    returned. The model is in evaluation mode.
    """

    def __init__(self, model: Any, recorder: Recorder) -> None:
        self.model, self.recorder = model, recorder
        self.steps = 0
        self._cache: Any = None
        self._tokens_B1: Tensor | None = None
        self._replay: Callable[[], Tensor] | None = None
        self._failed = False

    def __call__(self, **inputs: Any) -> Any:
        if not self._takes(inputs):
            return self.model(**inputs)
        self.steps += 1
        if self._replay is None and self.steps <= WARM:
            with self.recorder.work():
                return self.model(**inputs)
        if self._replay is None:
            self._record(inputs["input_ids"])
        if self._replay is None or self._tokens_B1 is None:  # it cannot be recorded
            return self.model(**inputs)
        self._tokens_B1.copy_(inputs["input_ids"])
        logits: Any = self._replay()
        return CausalLMOutputWithPast(logits=logits, **{CACHE: self._cache})

    def _takes(self, inputs: dict[str, Any]) -> bool:
        tokens, cache = inputs.get("input_ids"), inputs.get(CACHE)
        others = [k for k, v in inputs.items() if k not in _PLAIN and v is not None and v is not False]
        if self._failed or self.model.training or torch.is_grad_enabled() or others or tokens is None:
            return False
        if not isinstance(cache, LadderStaticCache) or not cache.is_initialized or not inputs.get("use_cache"):
            return False
        if self._cache is None:
            self._cache = cache
        first = self._tokens_B1
        return cache is self._cache and tokens.shape[1] == 1 and (first is None or first.shape == tokens.shape)

    def _record(self, tokens_B1: Tensor) -> None:
        held = tokens_B1.clone()

        def run() -> Tensor:
            return self.model(input_ids=held, past_key_values=self._cache, use_cache=True, return_dict=True).logits

        with self.recorder.work():
            recording = try_to_record(self.recorder, run)
        if isinstance(recording, RuntimeError):
            first = str(recording).splitlines()[0]
            log.warning("elman: the step of generate() cannot be captured as a CUDA graph and runs eager: %s", first)
            self._failed = True
        else:
            self._replay, self._tokens_B1 = recording, held


def has_one_size(model: Any) -> bool:
    """Whether the state has a constant size and the model one device: then a step can be recorded."""
    constant = all(block.mixer.state_growth == "constant" for block in model.model.layers)
    return constant and len({p.device for p in model.parameters()}) == 1


def is_watched(model: Any) -> bool:
    """Whether a module has hooks or is compiled: then code of others sees every step, which no program repeats."""
    return any(m._forward_hooks or m._forward_pre_hooks or m._compiled_call_impl for m in model.modules())


def recorder_for(model: Any) -> Recorder | None:
    """The recorder of a generation's steps on a GPU; None where they cannot be recorded."""
    return CudaRecorder(model.device) if model.device.type == "cuda" and has_one_size(model) else None
