"""The ladder with a classifier of sequences or tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.utils import can_return_tuple

from .cache import CACHE
from .pretrained import LadderPreTrainedModel


class _Classifier:
    """The forward of both classifiers: transformers' guesses padding from the bytes and drops `num_items_in_batch`."""

    @can_return_tuple
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits (B, C), or (B, T, C) for tokens, and the loss if there are labels. See `LadderModel.forward`.

        Args:
            labels: (B,) or (B, C), as `config.problem_type` says; or (B, T). -100 is ignored, and so is a masked token.
            num_items_in_batch: divides the summed loss; None for the mean.
        """
        out = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        hidden_BTD = out.last_hidden_state
        mask_BT = hidden_BTD.new_ones(hidden_BTD.shape[:2]) if attention_mask is None else attention_mask
        real_BT = mask_BT[:, -hidden_BTD.shape[1] :].to(hidden_BTD.device, torch.bool)
        logits, labels = self._classify(hidden_BTD, real_BT, labels)
        loss = None
        if labels is not None:
            items = num_items_in_batch
            loss = self.loss_function(
                logits=logits, labels=labels, pooled_logits=logits, config=self.config, num_items_in_batch=items
            )
            means = self.config.problem_type in ("regression", "multi_label_classification")
            if means and num_items_in_batch is not None:
                loss = loss * (labels != -100).sum() / num_items_in_batch
        return SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, hidden_states=out.hidden_states, **{CACHE: getattr(out, CACHE)}
        )


class LadderForSequenceClassification(_Classifier, GenericForSequenceClassification, LadderPreTrainedModel):
    """A ladder with a linear head on the last real token of each row: the last one where the mask is 1."""

    _loss = "ForSequenceClassification"

    def _classify(self, hidden_BTD: Tensor, real_BT: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        last_B = (real_BT * torch.arange(real_BT.shape[1], device=real_BT.device)).argmax(-1)
        return self.score(hidden_BTD[torch.arange(len(last_B), device=last_B.device), last_B]), labels


class LadderForTokenClassification(_Classifier, GenericForTokenClassification, LadderPreTrainedModel):
    """A ladder with a linear head on every token."""

    _loss = "ForTokenClassification"

    def _classify(self, hidden_BTD: Tensor, real_BT: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        counted = None if labels is None else labels.masked_fill(~real_BT.to(labels.device), -100)
        return self.score(self.dropout(hidden_BTD)), counted
