"""How a checkpoint finds this package: `auto_map` in config.json and a file of one import beside the weights."""

from __future__ import annotations

import os
from pathlib import Path

from elman_core.registry import how_to_install

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


def write_shim(folder: str | os.PathLike) -> None:
    """Write the shim into `folder`; make the folder if it is missing."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{SHIM_NAME}.py").write_text(SHIM, encoding="utf-8")
