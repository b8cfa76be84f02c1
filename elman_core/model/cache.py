"""The recurrent state of a ladder as a transformers `Cache`: constant in size, one entry for each residual branch.

A recurrent state is not a key/value cache, and the linear-attention layers of transformers lose a state that has no
convolution beside it; so these layers hold a mixer's own state and speak the cache protocol around it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, StaticCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from elman_core.registry import ConfigError, State

from .config import LadderConfig
from .rollback import WINDOW, Tape, map_state
from .state_file import load_states, save_states

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name of a cache in transformers' outputs and in `generate()`; it was past_key_values before 5.24."""


class RecurrentLayer(CacheLayerMixin):
    """The state of one mixer, `{name: tensor (B, ...)}`, and how many tokens it has consumed (masked ones included).

    `static` keeps every tensor at its address, for compiled and captured steps; the counter is then a tensor too, because
    an int would force a recompilation at every token.

    While `record_past` is on, a tape records what `crop` needs to undo the last tokens.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, static: bool = False) -> None:
        super().__init__()
        self.state: State | None = None
        self.seen: Any = 0
        self.static = static
        self.is_compileable = static
        self.record_past = False
        self.window = WINDOW
        self.tape: Tape | None = None

    # what the model uses

    def get(self) -> State | None:
        """The state, or None before the first token."""
        return self.state

    def recorder(self) -> Tape | None:
        """The tape on which the mixer should run, if tokens may be undone."""
        self.tape = (self.tape or Tape(self.window)) if self.record_past else None
        return self.tape

    def set(self, state: State, n_tokens: int) -> None:
        """Store the state after `n_tokens` more tokens. Gradients flow through it, unless checkpointing is reentrant."""
        if not self.static:
            self.state = state
            self.seen += n_tokens
        elif self.state is None:
            self.state = map_state(torch.clone, state)
            device = next((t.device for t in state.values()), None)
            self.seen = torch.full((), n_tokens, dtype=torch.long, device=device)
            if not torch.compiler.is_compiling():
                for tensor in (*(self.state or {}).values(), self.seen):
                    torch._dynamo.mark_static_address(tensor)
        else:
            for name, tensor in state.items():
                if tensor.shape != self.state[name].shape:
                    raise ConfigError(
                        f"state {name!r} changed shape from {tuple(self.state[name].shape)} to {tuple(tensor.shape)}: "
                        "a static cache needs mixers with a state of constant size, and one batch size"
                    )
                self.state[name].copy_(tensor)
            self.seen.add_(n_tokens)
        self.is_initialized = True

    # the protocol of transformers

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first state brings its own shapes."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Only the (None, None) of a cache that is being rebuilt is accepted."""
        if key_states is None and value_states is None:
            return None, None
        raise ConfigError("a recurrent layer has a state, not keys and values: use get() and set()")

    def get_seq_length(self, *_: Any) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return not self.static

    def activate_past_recording(self) -> None:
        """From the next token on, keep what `crop` needs."""
        if self.static:
            raise ConfigError("a static cache cannot undo tokens: leave out cache_implementation")
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Undo the last `-tokens_to_remove` tokens; 0 for none. They must have been read since recording began."""
        tokens_to_remove = int(tokens_to_remove)  # transformers counts on the device
        if tokens_to_remove > 0:
            raise ConfigError(f"crop takes the number of tokens to remove as a negative number, not {tokens_to_remove}")
        if self.tape is not None:
            self.state = self.tape.crop(-tokens_to_remove, self.state)
        elif tokens_to_remove:
            raise ConfigError("cannot undo these tokens: call activate_past_recording() before reading them")
        self.seen += tokens_to_remove

    def expect_draft(self, tokens: int) -> None:
        """Allow a draft of this many tokens to be undone even if it follows the prompt in the same forward."""
        self.window = max(self.window, tokens + 2)
        if self.tape is not None:
            self.tape.window = self.window

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.state = map_state(fn, self.state)
        if self.tape is not None:
            self.tape.map(fn)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.static and self.state is not None:
            for tensor in self.state.values():
                tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))
        else:
            self._apply(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Any) -> None:
        self._apply(lambda t: t[indices.to(t.device) if isinstance(indices, Tensor) else indices])

    def offload(self) -> None:
        raise ConfigError("the state of a recurrent model is small and constant in size, so it cannot be offloaded")

    def prefetch(self) -> None:
        """Never offloaded, so always there."""

    def reset(self) -> None:
        if self.static and self.state is not None:
            for tensor in self.state.values():
                tensor.zero_()
            self.seen.zero_()
        else:
            self.state, self.seen, self.is_initialized, self.tape = None, 0, False, None

    @property
    def batch_size(self) -> int:
        """Rows of the state, or -1 before the first token. A branch without any state has none: it does not count."""
        if self.state == {}:
            raise AttributeError("batch_size")  # so that hasattr, by which a Cache asks its layers, says no
        return next((t.shape[0] for t in (self.state or {}).values()), -1)


class _Branches:
    """The common part of both caches: a layer for every residual branch.

    `ended` and `padded` (B,), in a generation that leaves a state: whether a row has ended, and its newest token is padding.
    """

    layers: list[Any]
    ended: Tensor | None = None
    padded: Tensor | None = None

    @property
    def states(self) -> list[State | None]:
        """The state of every residual branch."""
        return [layer.get() for layer in self.layers]

    @property
    def is_initialized(self) -> bool:
        return len(self.layers) > 0 and all(layer.is_initialized for layer in self.layers)


class LadderCache(_Branches, DynamicCache):
    """The cache that `generate()` and `use_cache=True` make. It is a `DynamicCache`, so code that checks for one accepts it.

    Args:
        config: of the model; or give `num_blocks`, the number of its residual branches.
    """

    def __init__(self, config: PreTrainedConfig | None = None, *, num_blocks: int | None = None) -> None:
        Cache.__init__(self, layers=_layers(config, num_blocks, static=False))

    @classmethod
    def from_states(cls, states: Iterable[State | None], seen: int = 0) -> LadderCache:
        """A cache that continues from `states`, one for each residual branch; None for an initial state."""
        given = list(states)
        cache = cls(num_blocks=len(given))
        for layer, state in zip(cache.layers, given, strict=True):
            if state is not None:
                layer.set(dict(state), seen)
        return cache

    def save(self, path: str | os.PathLike) -> None:
        """Write the state to a safetensors file, whose size does not depend on how much has been read.

        After `generate()`, the state has read every byte except the last one: feed that byte first to continue.

        Raises:
            ConfigError: nothing has been read yet.
        """
        save_states(path, self.states, int(self.get_seq_length()))

    @classmethod
    def load(
        cls, path: str | os.PathLike, config: LadderConfig | None = None, device: str | torch.device = "cpu"
    ) -> LadderCache:
        """The cache that `save` wrote.

        Args:
            config: of the model that is to continue, whose states are compared with those of the file.

        Raises:
            CheckpointError: no such file, a damaged one, one that holds something else, or another model's state.
        """
        return cls.from_states(*load_states(path, device, config))


class LadderStaticCache(_Branches, StaticCache):
    """The same state at fixed addresses, for `generate(cache_implementation="static")`, which records the step on a GPU.

    Args:
        config: of the model; or give `num_blocks`. max_cache_len: accepted but unused, because a state has a fixed size.
    """

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        max_cache_len: int | None = None,
        *,
        num_blocks: int | None = None,
        **kwargs: Any,
    ) -> None:
        Cache.__init__(self, layers=_layers(config, num_blocks, static=True))


def _layers(config: Any, num_blocks: int | None, static: bool) -> list[Any]:
    if num_blocks is None:
        if config is None:
            raise ConfigError("a ladder's cache needs the model's config: LadderCache(model.config)")
        num_blocks = config.get_text_config(decoder=True).num_blocks
    return [RecurrentLayer(static) for _ in range(num_blocks)]


def adopt(cache: Cache | None, num_blocks: int) -> Any:
    """`cache` ready for a ladder of `num_blocks` branches: a new one for None, and an empty foreign one refitted in place.

    Raises:
        ConfigError: not a cache, or one that holds another model's state.
    """
    if cache is None:
        return LadderCache(num_blocks=num_blocks)
    if not isinstance(cache, Cache):
        raise ConfigError(f"past_key_values must be a Cache such as LadderCache, not {type(cache).__name__}")
    ours = [isinstance(layer, RecurrentLayer) for layer in cache.layers]
    if len(cache.layers) == num_blocks and all(ours):
        return cache
    if any(ours) or any(_used(layer) for layer in cache.layers):
        raise ConfigError("this cache holds another model's state, or keys and values, from which no ladder continues")
    static = isinstance(cache, StaticCache)
    cache.layers[:] = [RecurrentLayer(static) for _ in range(num_blocks)]
    cache.layer_class_to_replicate = None
    return cache


def _used(layer: Any) -> bool:
    recurrent = getattr(layer, "is_recurrent_states_initialized", {})
    return bool(getattr(layer, "is_initialized", False) or any(recurrent.values()))
