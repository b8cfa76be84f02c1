"""How the tokens of a model are text."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from elman_core.extension import load_tokenizer, vocabulary_texts

from .states import Prompt


class Language(NamedTuple):
    """Attributes:
    texts: of each token, in UTF-8; it may be part of a character. encode: gives the tokens of a text.
    template: gives the prompt for messages; None without a chat template.
    """

    texts: list[bytes]
    encode: Callable[[str], Prompt] = str.encode
    template: Callable[[list[dict[str, Any]]], str] | None = None

    @classmethod
    def of(cls, model: Any) -> Language:
        """Of the tokenizer beside the weights of a model that was loaded; a `CheckpointError` if none loads."""
        tokenizer: Any = load_tokenizer(model)
        vocab = model.config.vocab_size

        def template(messages: list[dict[str, Any]]) -> str:
            plain = [{**m, "content": _joined(m["content"])} for m in messages]
            return str(tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True))

        chat = template if tokenizer.chat_template else None
        texts = vocabulary_texts(tokenizer, vocab)
        if vocab == 256:
            return cls(texts, template=chat)
        return cls(texts, lambda text: array("I", tokenizer(text, add_special_tokens=False).input_ids), chat)


def _joined(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
