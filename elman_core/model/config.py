"""`LadderConfig`: what a ladder is made of, as transformers' configuration and as `config.json`."""

from __future__ import annotations

import difflib
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from elman_core.nn.layers import branches
from elman_core.registry import ConfigError, check_value, how_to_install

# How a checkpoint finds this package: `auto_map` in config.json and a file of one import beside the weights.
SHIM_NAME = "modeling_ladder_hub"

# Transformers reads the imports of this file before it runs it, but none below `try`: of those it would name the package
# `elman_core` on the index, which need not be ours.
SHIM = f'''"""The classes of this checkpoint live in the package elman-core.

config.json names under "made_with" the packages of the variants it needs.
"""

try:
    from elman_core import (  # noqa: F401
        LadderConfig,
        LadderForCausalLM,
        LadderForSequenceClassification,
        LadderForTokenClassification,
        LadderModel,
    )
except ImportError as error:
    raise ImportError("this model needs the package elman-core: {how_to_install("elman-core")}") from error
'''

AUTO_MAP = {
    "AutoConfig": f"{SHIM_NAME}.LadderConfig",
    "AutoModel": f"{SHIM_NAME}.LadderModel",
    "AutoModelForCausalLM": f"{SHIM_NAME}.LadderForCausalLM",
    "AutoModelForSequenceClassification": f"{SHIM_NAME}.LadderForSequenceClassification",
    "AutoModelForTokenClassification": f"{SHIM_NAME}.LadderForTokenClassification",
}

# What users of other libraries write for our fields; transformers would accept any of these and ignore it.
_MEANT = {
    "dim": "hidden_size", "d_model": "hidden_size", "width": "hidden_size", "depth": "num_hidden_layers",
    "n_layers": "num_hidden_layers", "num_layers": "num_hidden_layers", "level": "variant", "mixer": "variant",
    "eps": "norm_eps", "rms_norm_eps": "norm_eps",
}  # fmt: skip


@strict
class LadderConfig(PreTrainedConfig):
    """Configuration of a ladder: an embedding, `num_hidden_layers` layers of one or several variants, a tied head.

    The variant is looked up when a model is built, not here: transformers makes bare configs. Building expands `variant` and
    `options` in place: presets and level names become a variant's own name, and every option is written out, defaults
    included, so that `config.json` means the same after a default has changed.

    Args:
        variant: registry name, `name:preset` or published level name; a pattern of them that repeats over the layers, such as
            "a*3+b"; or a list of them, one for each layer.
        options: options of the variant; for several `{variant: its options}`, or a list with one for each layer (None for all
            defaults).
        made_with: `{variant: requirement}` such as `{"x": "elman-x==0.1.0"}`; written when a model is built.
        hidden_size: width D of the residual stream.
        num_hidden_layers: depth L. A variant may yield several residual branches in one layer.
        vocab_size: 256 for bytes.
        mlp_ratio: a SwiGLU of this width / D follows each layer as a separate branch; the width is rounded up to a
            multiple of 64. 0: none.
        norm_eps: epsilon of every RMS norm of the backbone.
        initializer_range: standard deviation of the embedding, and of a head of its own, but there at most 1/sqrt(D).
        tie_word_embeddings: the output head is the embedding.
        use_cache: return the recurrent state.
        max_position_embeddings: recommended evaluation window in tokens, read by evaluation harnesses. Not a limit: the state
            has no notion of position.
        pad_token_id: byte 0xff (0 in a smaller vocabulary). bos_token_id, eos_token_id: of bytes 0x1e, of other tokens None.

    Raises:
        ConfigError: a size that is not an integer from 1 on, more than 4,096 layers, or a keyword that looks like a misspelt
            one of these. Other unknown keywords are kept as attributes, as transformers requires.
    """

    model_type = "elman_ladder"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 (transformers declares it so)

    variant: str | int | list | None = None
    options: dict | list | None = None
    made_with: dict | None = None
    hidden_size: int = 512
    num_hidden_layers: int = 12
    vocab_size: int = 256
    mlp_ratio: float = 0.0
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    max_position_embeddings: int = 2048
    pad_token_id: int | None = 255
    bos_token_id: int | None = -1
    eos_token_id: int | list | None = -1

    def __post_init__(self, **kwargs: Any) -> None:
        own = [f.name for f in fields(LadderConfig) if f.name not in {g.name for g in fields(PreTrainedConfig)}]
        for key in kwargs:
            meant = _MEANT.get(key) or next(iter(difflib.get_close_matches(key, own, n=1, cutoff=0.85)), None)
            if meant:
                raise ConfigError(f"LadderConfig has no {key!r}; write {meant}=…")
        for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
            most = {"le": 4096} if name == "num_hidden_layers" else {}  # ten million are built for hours
            setattr(self, name, check_value(name, getattr(self, name), int, {"ge": 1} | most))
        if kwargs.get("num_labels") is not None:
            check_value("num_labels", kwargs["num_labels"], int, {"le": 1 << 20})  # transformers names each
        ends = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        if not all(token is None or isinstance(token, int) for token in ends):
            raise ConfigError(f"eos_token_id must be a token or a list of tokens, not {self.eos_token_id!r}")
        if self.pad_token_id == 255 >= self.vocab_size:
            self.pad_token_id = 0
        for name in ("bos_token_id", "eos_token_id"):
            if getattr(self, name) == -1:
                setattr(self, name, 30 if self.vocab_size == 256 else None)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As transformers', but the keyword `variant` names a file of weights there, and stays one of the unused keywords."""
        weights = {"variant": kwargs.pop("variant")} if "variant" in kwargs and "variant" in config_dict else {}
        made = super().from_dict(config_dict, **kwargs)
        return (made[0], {**made[1], **weights}) if isinstance(made, tuple) else made

    @property
    def layer_types(self) -> list[str]:
        """Tells transformers that no layer has a key/value cache that it could quantise, page or shard."""
        return ["linear_attention"] * self.num_hidden_layers

    @property
    def num_blocks(self) -> int:
        """The number of residual branches in the whole ladder; a cache has one entry for each. Looks the variants up."""
        return sum(1 for _ in branches(self))

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: otherwise saving would copy this package's source files into checkpoints."""

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write `config.json` and the file that lets `trust_remote_code=True` find this package."""
        self.auto_map = dict(AUTO_MAP)
        if self.architectures:
            self.architectures = ["LadderForCausalLM" if a == "LadderLM" else a for a in self.architectures]
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{SHIM_NAME}.py").write_text(SHIM, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
