"""The ladder as a transformers model. Importing this registers the Auto classes."""

from elman_core.imports import without_collection

with without_collection():
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )
    from transformers.models.auto import modeling_auto

    from elman_core.nn import add_rms_norm
    from elman_core.nn.layers import resolve_layers

    from .cache import LadderCache, LadderStaticCache, RecurrentLayer, adopt
    from .card import model_card
    from .checkpoint import find_checkpoint, no_progress_bars
    from .config import LadderConfig
    from .heads import LadderForSequenceClassification, LadderForTokenClassification
    from .ladder import LadderBlock, LadderModel, RMSNorm
    from .lm import LadderLM
    from .modeling import LadderForCausalLM
    from .pretrained import LadderPreTrainedModel
    from .tokenizer import byte_tokenizer

AutoConfig.register(LadderConfig.model_type, LadderConfig, exist_ok=True)
for auto, model, table in (
    (AutoModel, LadderModel, "MODEL"),
    (AutoModelForCausalLM, LadderForCausalLM, "MODEL_FOR_CAUSAL_LM"),
    (AutoModelForSequenceClassification, LadderForSequenceClassification, "MODEL_FOR_SEQUENCE_CLASSIFICATION"),
    (AutoModelForTokenClassification, LadderForTokenClassification, "MODEL_FOR_TOKEN_CLASSIFICATION"),
):
    auto.register(LadderConfig, model, exist_ok=True)
    # Trainer, pipelines and others look for the names of classes in these tables, which register() leaves alone
    getattr(modeling_auto, f"{table}_MAPPING_NAMES")[LadderConfig.model_type] = model.__name__

__all__ = [
    "LadderBlock", "LadderCache", "LadderConfig", "LadderForCausalLM", "LadderForSequenceClassification",
    "LadderForTokenClassification", "LadderLM", "LadderModel", "LadderPreTrainedModel", "LadderStaticCache",
    "RMSNorm", "RecurrentLayer", "add_rms_norm", "adopt", "byte_tokenizer", "find_checkpoint", "model_card",
    "no_progress_bars", "resolve_layers",
]  # fmt: skip
