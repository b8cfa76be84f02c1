"""The backbone: embedding, residual branches (add, norm, mixer), final norm. Prenorm, residual stream in float32.

    R_0 = E[tokens];  x_{i+1}, s_i = mixer_i(RMS(R_i), s_i);  R_{i+1} = R_i + x_{i+1};  output RMS(R_L)

Shapes: B batch, T time, D width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from elman_core.kernels.runtime import autocast_dtype
from elman_core.nn import RMSNorm as InnerNorm
from elman_core.nn import add_rms_norm
from elman_core.nn.layers import build_mixers
from elman_core.registry import ConfigError, Mixer, State, check_value

from .cache import CACHE, adopt
from .config import LadderConfig
from .pretrained import LadderPreTrainedModel
from .rollback import Tape

# Keyword arguments of other models that would be missed, with ours. All others are ignored, as transformers' models do.
_ELSEWHERE = {
    "actual_length": "labels, where -100 does not count",
    **dict.fromkeys(("prev_hiddens", "return_prev_hiddens", "cache_params", "inference_params"), "past_key_values"),
    **dict.fromkeys(("document_ids", "segment_ids", "sequence_ids", "offsets"), "seq_idx, position_ids or cu_seqlens"),
}


class RMSNorm(InnerNorm):
    """A pre-norm; `forward(x, residual)` adds and normalises."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return add_rms_norm(x, residual, self.weight, self.eps, autocast_dtype(self.weight))


class LadderBlock(GradientCheckpointingLayer):
    """A residual branch: add, norm, mixer. It returns output and stream separately; the next block adds them."""

    def __init__(self, config: LadderConfig, mixer: Mixer, ends_layer: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = mixer
        self.made = type(mixer).__name__, tuple(mixer.state_spec(mixer.dim, mixer.config))
        self.ends_layer = ends_layer
        for inner in mixer.modules():  # the mixer initialises all it owns: transformers' own rules stay away from it
            if inner is not mixer:
                inner._is_hf_initialized = True  # type: ignore[assignment]

    def forward(
        self,
        x_BTD: Tensor,
        residual_BTD: Tensor | None = None,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        tape: Tape | None = None,
        starts_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, State]:
        """Returns the mixer's output, the stream below it, and the mixer's state."""
        normed_BTD, residual_BTD = self.norm(x_BTD, residual_BTD)
        if tape is None:
            made = self.mixer(normed_BTD, state, mask_BT, starts_BT)
        else:
            made = tape.run(self.mixer, normed_BTD, state, mask_BT)
        y_BTD, state = _checked(made, *self.made)
        return y_BTD, residual_BTD, state


def _checked(made: Any, mixer: str, names: tuple[str, ...]) -> tuple[Tensor, State]:
    """Return the result of a mixer, checked: training alone would not notice a state that it forgets."""
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], dict):
        raise ConfigError(f"{mixer}.forward must return (y, state), a tensor and a dict, not a {type(made).__name__}")
    if len(made[1]) != len(names) or any(name not in made[1] for name in names):
        said = ", ".join(made[1]) or "none"
        wanted = ", ".join(names) or "none"
        raise ConfigError(f"{mixer}.forward must return the states of its state_spec ({wanted}); it returned {said}")
    return made


class LadderModel(LadderPreTrainedModel):
    """The backbone without a head: tokens or embeddings (B, T) to hidden states (B, T, D).

    Building it looks the variants up, writes their full options into `config`, and checks them before it allocates.

    Raises:
        ConfigError: no variant, unknown or wrong options, a size that a variant cannot have.
        PluginError: a variant that is not installed.
    """

    def __init__(self, config: LadderConfig) -> None:
        super().__init__(config)
        check_value("norm_eps", config.norm_eps, float, {"gt": 0, "le": 1})
        check_value("initializer_range", config.initializer_range, float, {"ge": 0})
        blocks = [LadderBlock(config, mixer, last) for mixer, last in build_mixers(config)]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self._keep_in_fp32_modules_strict = {
            rf"layers\.{i}\.mixer\.{re.escape(name)}$"
            for i, block in enumerate(blocks)
            for name in block.mixer.state_dict()
            if name in block.mixer.fp32_params  # which may name what these options leave out
        }
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """Hidden states after the final norm.

        Args:
            input_ids: (B, T) tokens; or `inputs_embeds` (B, T, D).
            attention_mask: (B, T) or, after a cache, (B, past + T): where it is 0 the state does not change and the output
                is zero. Any pattern is exact: left padding, right padding, gaps.
            position_ids: (B, T), in the keyword arguments: several documents packed into a row, each counted from 0. Each is
                computed as if it were alone in its row. `seq_idx` (B, T), and for B = 1 transformers' `cu_seq_lens_q` and fla's
                `cu_seqlens`, mean the same.
                A new document is recognised only if the position of its first real token is not greater than that of the
                real token before it; if a document's first tokens may be masked, pass `seq_idx`. `starts` (B, T), bool, is
                True where documents begin, as mixers take it; here it also ends what came before the row.
            past_key_values: the state so far, changed in place; an empty `DynamicCache` is accepted. `cache` means the same.
            output_hidden_states: also the residual stream before every layer; the last entry is after the final norm.

        Raises:
            ConfigError: both or neither input, no tokens, a mask or positions of the wrong shape, a keyword of other models for
                states or documents, or packed rows together with a cache that can undo tokens.
        """
        for name in kwargs.keys() & _ELSEWHERE.keys():
            if kwargs[name] is not None:
                raise ConfigError(f"{name} is an argument of other models: give {_ELSEWHERE[name]}")
        past_key_values = past_key_values if cache is None else cache
        if (input_ids is None) == (inputs_embeds is None):
            raise ConfigError("give exactly one of input_ids and inputs_embeds")
        config = self.config
        if use_cache is None:  # training does not need the state unless it is requested
            use_cache = config.use_cache and not (self.training and past_key_values is None)
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        return_dict = config.return_dict if return_dict is None else return_dict
        if input_ids is not None:
            _require_ids(input_ids, config.vocab_size)
        x_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        n_tokens = x_BTD.shape[1]
        if n_tokens == 0:
            raise ConfigError(_no_tokens(past_key_values))
        cache = adopt(past_key_values, len(self.layers)) if use_cache or past_key_values is not None else None
        mask_BT = _token_mask(attention_mask, x_BTD.shape[0], n_tokens)
        starts_BT = document_starts(kwargs, (x_BTD.shape[0], n_tokens), mask_BT, cache)

        hidden: list[Any] = [x_BTD]
        residual_BTD: Tensor | None = None
        for index, block in enumerate(self.layers):
            if cache is None:
                x_BTD, residual_BTD, _ = block(x_BTD, residual_BTD, None, mask_BT, None, starts_BT)
            else:
                entry = cache.layers[index]
                tape = None if self.training and torch.is_grad_enabled() else entry.recorder()
                if tape is not None and starts_BT is not None:
                    raise ConfigError("a cache that can undo tokens takes no packed rows: give each text its own row")
                x_BTD, residual_BTD, state = block(x_BTD, residual_BTD, entry.get(), mask_BT, tape, starts_BT)
                entry.set(state, n_tokens)
            if output_hidden_states and block.ends_layer:
                hidden.append(residual_BTD + x_BTD)
        out_BTD, _ = self.norm(x_BTD, residual_BTD)
        if mask_BT is not None:
            out_BTD = out_BTD.masked_fill(~mask_BT[:, :, None], 0)
        hidden[-1] = out_BTD
        output = BaseModelOutputWithPast(
            last_hidden_state=out_BTD,
            hidden_states=tuple(hidden) if output_hidden_states else None,
            **{CACHE: cache if use_cache else None},
        )
        return output if return_dict else output.to_tuple()


def _require_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Raise `ConfigError` unless these are (B, T) tokens. Values are checked on a CPU only: a GPU would make the host wait."""
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"input_ids must be (batch, time) .long(), not {tuple(input_ids.shape)} {input_ids.dtype}")
    if input_ids.device.type != "cpu" or torch.compiler.is_compiling() or not input_ids.numel():
        return
    if is_in_torch_dispatch_mode() or torch._C._functorch.peek_interpreter_stack():  # type: ignore[attr-defined]
        return  # fake tensors, a recording and torch.func show no values
    low, high = (int(end) for end in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise ConfigError(f"tokens must be from 0 to {vocab_size - 1}, not {low if low < 0 else high}")


def _token_mask(attention_mask: Tensor | None, rows: int, n_tokens: int) -> Tensor | None:
    """(B, T) booleans for the new tokens, or None if all are real. Looking costs a synchronisation on a GPU."""
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape)
    if len(shape) != 2 or shape[0] != rows or shape[1] < n_tokens:
        raise ConfigError(f"attention_mask must be ({rows}, time) and cover the {n_tokens} new tokens, not {shape}")
    mask_BT = attention_mask[:, -n_tokens:].bool()
    return mask_BT if torch.compiler.is_compiling() or not bool(mask_BT.all()) else None


def _no_tokens(past: Any) -> str:
    if past is not None and past.get_seq_length():
        return "no new tokens: with a cache give the whole sequence, or the new tokens with a mask over past and new"
    return "no tokens: there is nothing to continue; begin an empty text with bos_token_id, as generate() without input does"


def document_starts(
    packing: Mapping[str, Any], shape: tuple[int, int], mask_BT: Tensor | None, cache: Cache | None
) -> Tensor | None:
    """(B, T) booleans, True where a document begins after another text; None if none does, which a look at the values decides.

    Each real token is compared with the real token before it, so a document begins at its first real token, whatever is
    masked: its number (`seq_idx`, `cu_seqlens`) is another, or its position is not greater. The first real token of a
    row continues what came before, unless its position is 0.

    Args:
        packing: keyword arguments, of which the first that is given counts: `starts`, `position_ids`, `seq_idx`,
            `cu_seq_lens_q`, `cu_seqlens`. `starts` is returned as it is, without a look at its values, which a CUDA graph could
            not take.
        cache: what came before these tokens.
    """
    if packing.get("starts") is not None:
        return _of_shape("starts", packing["starts"], shape)
    rows, steps = shape
    positions = packing.get("position_ids")
    ends = packing.get("cu_seqlens") if packing.get("cu_seq_lens_q") is None else packing["cu_seq_lens_q"]
    if positions is not None:
        told_BT = _of_shape("position_ids", positions, shape)
    elif packing.get("seq_idx") is not None:
        told_BT = _of_shape("seq_idx", packing["seq_idx"], shape)
    elif ends is not None:
        if rows != 1 or ends[-1] != steps:
            raise ConfigError(f"cu_seqlens belongs to one row and ends with its {steps} tokens; give position_ids")
        told_BT = torch.bucketize(torch.arange(steps, device=ends.device), ends[1:], right=True)[None]
    else:
        return None
    real_BT = torch.ones_like(told_BT, dtype=torch.bool) if mask_BT is None else mask_BT
    place_T = torch.arange(steps, device=told_BT.device)
    latest_BT = torch.where(real_BT, place_T, -1).cummax(1).values  # the place of the last real token up to each
    before_BT = torch.nn.functional.pad(latest_BT[:, :-1], (1, 0), value=-1)
    previous_BT = told_BT.gather(1, before_BT.clamp(min=0))
    is_new_BT = told_BT != previous_BT if positions is None else told_BT <= previous_BT
    starts_BT = is_new_BT & (before_BT >= 0)
    if positions is not None and cache is not None and cache.get_seq_length():
        starts_BT = starts_BT | (told_BT == 0) & (before_BT < 0)
    starts_BT = starts_BT & real_BT
    return starts_BT if torch.compiler.is_compiling() or bool(starts_BT.any()) else None


def _of_shape(name: str, given: Tensor, shape: tuple[int, int]) -> Tensor:
    if given.ndim == 1:
        given = given[None]
    if given.ndim != 2 or given.shape[0] not in (1, shape[0]) or given.shape[1] != shape[1]:
        raise ConfigError(f"{name} must have the shape {tuple(shape)} of the tokens, not {tuple(given.shape)}")
    return given.expand(shape)
