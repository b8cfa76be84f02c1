"""Settings as a recipe: the TOML that `elman train` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elman_core.training.settings import Settings


def recipe(settings: Settings) -> str:
    """Settings as the TOML of a recipe; what is not decided is left out."""
    lines: list[str] = []
    for table, values in settings.to_dict().items():
        lines += [f"[{table}]", *(f"{k} = {_toml(v)}" for k, v in values.items() if v is not None), ""]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
