"""The ladder that predicts the next byte, and how `generate()` uses it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from elman_core.nn import linear, scaled_once
from elman_core.registry import ConfigError

from . import step_graph
from .cache import CACHE, LadderCache, LadderStaticCache, RecurrentLayer, adopt
from .config import LadderConfig
from .ladder import LadderModel
from .pretrained import LadderPreTrainedModel


class LadderForCausalLM(LadderPreTrainedModel, GenerationMixin):
    """A ladder that predicts the next token. `generate()` carries its state, whose size is constant without attention."""

    _loss = "ForCausalLM"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: LadderConfig) -> None:
        super().__init__(config)
        self.model = LadderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As the base; an untied head starts no wider than 1/sqrt(D), so that logits start at about 1 for any embedding."""
        config = self.config
        if module is self.lm_head and not config.tie_word_embeddings:
            nn.init.normal_(module.weight, std=min(config.initializer_range, config.hidden_size**-0.5))
        else:
            super()._init_weights(module)

    def _get_name(self) -> str:  # by which Trainer decides whether to shift labels, so that of subclasses is the same
        return "LadderForCausalLM"

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_loss: bool = False,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Logits (B, T, V), and the loss if there are labels. See `LadderModel.forward` for the other arguments.

        Args:
            labels: (B, T), not shifted; -100 or `ignore_index` is ignored. Each real token predicts the next real one: where
                the mask is 0, a label does not count. `num_items_in_batch` divides the summed loss if given: labels of a
                whole step behind the first of each row, as Trainer counts them. Without labels the mean is NaN, the gradient 0.
            logits_to_keep: how many of the last positions get logits (0: all), or the indices of those that do. If some do, a
                masked one gets those of the last real one before it, so that `generate()` may follow padding.
            return_loss: `input_ids` is (B, T + 1); predict each of its last T tokens from those before and return the mean
                cross-entropy in nats alone.
        """
        past_key_values = past_key_values if cache is None else cache
        tokens: Any = input_ids  # with `return_loss`, also the last one, which is only predicted
        mask = attention_mask
        if return_loss:
            if input_ids is None or labels is not None or input_ids.ndim != 2 or input_ids.shape[1] < 2:
                raise ConfigError("return_loss=True takes tokens (B, T + 1): inputs the first T, targets the last T")
            input_ids, use_cache = input_ids[:, :-1], False
            attention_mask = None if attention_mask is None else attention_mask[:, :-1]
        return_dict = self.config.return_dict if return_dict is None else return_dict
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **{k: v for k, v in kwargs.items() if k != "num_items_in_batch"},
        )
        hidden_BTD = out.last_hidden_state
        if isinstance(logits_to_keep, int) and attention_mask is not None and 0 < logits_to_keep < hidden_BTD.shape[1]:
            steps, device = hidden_BTD.shape[1], hidden_BTD.device
            place_BT = attention_mask[:, -steps:].to(device, torch.bool) * torch.arange(steps, device=device)
            latest_BT = place_BT.cummax(1).values  # the place of the last real token up to each
            row_B1 = torch.arange(len(latest_BT), device=device)[:, None]
            hidden_BTD = hidden_BTD[row_B1, latest_BT[:, -logits_to_keep:]]
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV: Any = linear(self.lm_head, hidden_BTD[:, keep])
        targets: Any = None
        if return_loss:
            targets = _targets(tokens, mask)[:, :-1].contiguous()
        elif labels is not None:
            targets = kwargs.pop("shift_labels", None)
            if targets is None:
                targets = _shifted(labels, attention_mask, kwargs)
        loss = None
        if targets is not None:
            vocab_size = self.lm_head.weight.shape[0]
            loss = self.loss_function(logits_BTV, labels=None, shift_labels=targets, vocab_size=vocab_size, **kwargs)
        if return_loss:
            return loss
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits_BTV, hidden_states=out.hidden_states, **{CACHE: getattr(out, CACHE)}
        )
        return output if return_dict else output.to_tuple()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' `generate()`; a spectral norm scales its weight once for all of it."""
        with scaled_once(self):
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def get_compiled_call(self, compile_config: Any) -> Any:
        """The step of `generate()` where transformers would compile it: with a static cache on a GPU, a recorded step.

        With a user's `compile_config`, transformers compiles instead.
        """
        recorder = step_graph.recorder_for(self) if compile_config is None else None
        return super().get_compiled_call(compile_config) if recorder is None else step_graph.GraphedStep(self, recorder)

    # how generate() makes caches and masks

    def _prepare_cache_for_generation(  # type: ignore[override]
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        mode: Any,
        batch_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        cache = model_kwargs.get(CACHE)
        if cache is not None:
            adopt(cache, len(self.model.layers))._is_user_defined = True
            cache.ended = cache.padded = None
            rows = max(getattr(layer, "batch_size", -1) for layer in cache.layers)
            wanted = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            if rows < wanted and rows in (1, batch_size):  # samples or beams of each row
                cache.batch_repeat_interleave(wanted // rows)
        elif generation_config.use_cache is not False:
            kind = generation_config.cache_implementation
            if kind not in (None, "dynamic", "dynamic_full", "static"):
                raise ConfigError(
                    f"cache_implementation={kind!r}: a recurrent state is constant in size; leave it out, or use 'static'"
                )
            chosen = LadderStaticCache if kind == "static" else LadderCache
            model_kwargs[CACHE] = cache = chosen(num_blocks=len(self.model.layers))
            if generation_config.is_assistant:
                cache.activate_past_recording()
        if cache is not None:
            own = generation_config.is_assistant and generation_config.max_new_tokens
            _expect_draft(cache, max(own or 0, generation_config.prompt_lookup_num_tokens or 0))

    def _sample(  # type: ignore[override]
        self, input_ids: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
    ) -> Any:
        """As transformers', but a row that has ended does not read its padding, if its state is left to anyone."""
        cache = kwargs.get(CACHE)
        left = generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        if cache is not None and left and any(hasattr(each, "eos_token_id") for each in stopping_criteria):
            stopping_criteria = _Ends(stopping_criteria, cache)
        return super()._sample(  # type: ignore[misc]
            input_ids, stopping_criteria=stopping_criteria, generation_config=generation_config, **kwargs
        )

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        cache: Any = updated.get(CACHE)
        ended = getattr(cache, "ended", None)
        if ended is not None:
            cache.padded = ended
            updated["attention_mask"] = (~ended).long()[:, None]  # only that of the next token is looked at
        return updated

    def _prefill(self, input_ids: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers', but prompts in chunks, too, and new embeddings begin behind what a given state has read."""
        embeds, cache = model_kwargs.get("inputs_embeds"), model_kwargs.get(CACHE)
        if embeds is not None and cache is not None:
            longer = getattr(generation_config, "_mask_length", -1) > embeds.shape[1]  # a mask that newer ones left out
            if longer or not _read(embeds, model_kwargs):  # transformers always cuts off as many as the state has read
                model_kwargs["inputs_embeds"] = nn.functional.pad(embeds, (0, 0, int(cache.get_seq_length()), 0))
        read = _read(input_ids, model_kwargs)
        if not read:
            generation_config._mask_length = -1  # by which newer transformers leave out what a state has read
        if generation_config.prefill_chunk_size is not None:
            if not input_ids.shape[1]:
                raise ConfigError("prefill_chunk_size divides tokens: leave it out with inputs_embeds")
            mask = model_kwargs["attention_mask"]
            if mask is not None and not mask[:, -1].all():
                raise ConfigError("prefill_chunk_size needs padding on the left: set tokenizer.padding_side = 'left'")
            input_ids = input_ids[:, read:]
            if CACHE == "past_key_values":  # such transformers count the places of a mask from the first chunk on
                _cut_mask(model_kwargs, input_ids)
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]

    def _assisted_decoding(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("inputs_embeds") is not None:  # transformers would not read the first draft
            raise ConfigError("drafts continue tokens: leave them out with inputs_embeds")
        read = _read(input_ids, kwargs)
        if read:
            raise ConfigError(f"drafts continue a state from new tokens alone: leave out the {read} that it has read")
        _cut_mask(kwargs, input_ids)
        return super()._assisted_decoding(input_ids, *args, **kwargs)  # type: ignore[misc]

    def _get_candidate_generator(self, **kwargs: Any) -> Any:  # type: ignore[override]
        generator = super()._get_candidate_generator(**kwargs)  # type: ignore[misc]
        _expect_draft(kwargs["model_kwargs"][CACHE], int(getattr(generator, "num_assistant_tokens", 0)))
        return generator

    def _prepare_attention_mask_for_generation(  # type: ignore[override]
        self, inputs_tensor: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Tensor:
        # The base would call every 0x00 in a prompt padding; here every byte is text, and padding comes with a mask.
        ids = model_kwargs.get("input_ids")
        tensor = ids if ids is not None and ids.shape[1] > 0 else inputs_tensor
        length = tensor.shape[1]
        cache = model_kwargs.get(CACHE)
        if isinstance(cache, Cache) and cache.layers and isinstance(cache.layers[0], RecurrentLayer):
            padded = getattr(cache, "padded", None)
            if padded is not None and padded.any():
                rows = ", ".join(map(str, padded.nonzero().flatten().tolist()))
                raise ConfigError(f"rows that ended are padded ({rows}): give attention_mask, with 0 at their padding")
            seen = int(cache.get_seq_length())
            if 0 < length <= seen:  # fewer tokens than the state has consumed can only be new ones
                length += seen
        return torch.ones((tensor.shape[0], length), dtype=torch.long, device=tensor.device)

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> None:
        """None: positions tell only where packed documents begin."""

    def create_masks_for_generate(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor | None:
        """For static caches: a prompt keeps its mask, and a single new token has one if a row has ended, (B, 1)."""
        if inputs_embeds.shape[1] > 1 or attention_mask is None:
            return attention_mask
        last_B1 = attention_mask[:, -1:]
        return None if bool(last_B1.all()) else last_B1

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError("continuous batching pages keys and values, which a ladder has not: generate() takes a batch")


class _Ends(StoppingCriteriaList):
    """The same criteria; they tell the cache which rows have met one."""

    def __init__(self, criteria: Any, cache: Any) -> None:
        super().__init__(criteria)
        self.cache = cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        met_B = super().__call__(*args, **kwargs)
        self.cache.ended = met_B if self.cache.ended is None else self.cache.ended | met_B
        return met_B


def _read(input_ids: Tensor, kwargs: dict[str, Any]) -> int:
    """How many of these tokens the state has read. Under a mask of their own, fewer than it has read can only be new ones."""
    cache, mask = kwargs.get(CACHE), kwargs["attention_mask"]
    length = input_ids.shape[1]
    if cache is None or (mask is not None and mask.shape[1] != length):
        return 0
    seen = int(cache.get_seq_length())
    if length == 0 or seen < length:
        return seen
    if mask is not None:  # newer transformers leave out one of ones
        kwargs["attention_mask"] = nn.functional.pad(mask, (seen, 0), value=1)
    return 0


def _cut_mask(kwargs: dict[str, Any], input_ids: Tensor) -> None:
    """Keep only the part of the mask that belongs to these tokens, the last ones."""
    if kwargs["attention_mask"] is not None:
        kwargs["attention_mask"] = kwargs["attention_mask"][:, -input_ids.shape[1] :]


def _expect_draft(cache: Any, tokens: int) -> None:
    for layer in cache.layers:
        layer.expect_draft(tokens)


def _shifted(labels_BT: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
    """The targets of labels. `num_items_in_batch` in `kwargs` becomes the number of those that a real token predicts."""
    ignored = kwargs.get("ignore_index", -100)
    targets_BT = _targets(labels_BT, mask, ignored)
    items = kwargs.get("num_items_in_batch")
    if items is not None and mask is not None:
        # Trainer also counts the first byte after padding on the left, which no real byte predicts
        counted = (labels_BT[:, 1:] != ignored).sum().clamp(min=1)
        met = (targets_BT != ignored).sum().clamp(min=1)
        kwargs["num_items_in_batch"] = items * (met / counted)
    return targets_BT


def _targets(labels_BT: Tensor, mask: Tensor | None, ignored: int = -100) -> Tensor:
    """For each place the label of the next real token, or `ignored` if there is none or the place is not real."""
    shifted_BT = nn.functional.pad(labels_BT[:, 1:], (0, 1), value=ignored)
    if mask is None:
        return shifted_BT.contiguous()
    steps = labels_BT.shape[1]
    real_BT = mask[:, -steps:].to(labels_BT.device, torch.bool)
    place_T = torch.arange(steps, device=labels_BT.device)
    later_BT = nn.functional.pad(place_T.where(real_BT, steps)[:, 1:], (0, 1), value=steps)
    next_BT = later_BT.flip(1).cummin(1).values.flip(1)
    return nn.functional.pad(labels_BT, (0, 1), value=ignored).gather(1, next_BT).masked_fill(~real_BT, ignored)
