"""The ladder as a transformers model. Importing this registers the Auto classes."""

from elman_core._auto import without_collection

with without_collection():
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    from elman_core.nn import add_rms_norm
    from elman_core.nn.layers import resolve_layers

    from .cache import LadderCache, LadderStaticCache, RecurrentLayer, adopt
    from .card import model_card
    from .checkpoint import find_checkpoint, no_progress_bars
    from .config import LadderConfig
    from .ladder import LadderBlock, LadderModel, RMSNorm
    from .lm import LadderLM
    from .modeling import LadderForCausalLM, LadderForSequenceClassification, LadderForTokenClassification
    from .pretrained import LadderPreTrainedModel
    from .tokenizer import byte_tokenizer

AutoConfig.register(LadderConfig.model_type, LadderConfig, exist_ok=True)
AutoModel.register(LadderConfig, LadderModel, exist_ok=True)
AutoModelForCausalLM.register(LadderConfig, LadderForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(LadderConfig, LadderForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(LadderConfig, LadderForTokenClassification, exist_ok=True)

__all__ = [
    "LadderBlock", "LadderCache", "LadderConfig", "LadderForCausalLM", "LadderForSequenceClassification",
    "LadderForTokenClassification", "LadderLM", "LadderModel", "LadderPreTrainedModel", "LadderStaticCache",
    "RMSNorm", "RecurrentLayer", "add_rms_norm", "adopt", "byte_tokenizer", "find_checkpoint", "model_card",
    "no_progress_bars", "resolve_layers",
]  # fmt: skip
