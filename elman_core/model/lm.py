"""`LadderLM`: the ladder by variant, width and depth, in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from elman_core.registry import ConfigError

from .config import LadderConfig
from .modeling import LadderForCausalLM


class _Backbone(TypedDict, total=False):
    """The fields of `LadderConfig` beside variant, options and sizes, so that a type checker finds a misspelt one."""

    mlp_ratio: float
    norm_eps: float
    initializer_range: float
    tie_word_embeddings: bool
    use_cache: bool
    max_position_embeddings: int
    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_id: int | list[int] | None


class LadderLM(LadderForCausalLM):
    """A `LadderForCausalLM` made from a variant, a width and a depth::

        model = LadderLM("name", dim=1536, depth=6, options={"option": value})
        loss = model(tokens_BT1, return_loss=True)

    Same tensors, same checkpoint: what it saves is a `LadderForCausalLM`.

    Args:
        variant: name, `name:preset`, published level name, or a list with one of these per layer; or a `LadderConfig`, alone.
        dim: width D. depth: layers L. vocab_size: V.
        level: a published level number or name, instead of `variant`.
        options, backbone: as of `LadderConfig`.

    Raises:
        ConfigError: unknown or wrong options, or sizes that the variant does not support.
        PluginError: the variant is not installed.
    """

    def __init__(
        self,
        variant: str | int | list | LadderConfig | None = None,
        dim: int = 512,
        depth: int = 12,
        vocab_size: int = 256,
        *,
        level: str | int | None = None,
        options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        **backbone: Unpack[_Backbone],
    ) -> None:
        if isinstance(variant, LadderConfig):  # from_pretrained and from_config call with a config alone
            if options or backbone or level is not None:
                raise ConfigError("give LadderLM a config, or a variant with options, not both")
            super().__init__(variant)
            return
        if (variant is None) == (level is None):
            raise ConfigError("LadderLM needs a variant, or a published level: LadderLM(variant=…, dim=…, depth=…)")
        chosen: dict[str, Any] = {"variant": level if variant is None else variant, "options": options, **backbone}
        super().__init__(LadderConfig(hidden_size=dim, num_hidden_layers=depth, vocab_size=vocab_size, **chosen))
