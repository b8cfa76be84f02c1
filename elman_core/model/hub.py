"""How a checkpoint finds this package: `auto_map` in config.json and a file of one import beside the weights."""

from __future__ import annotations

import os
from pathlib import Path

SHIM_NAME = "modeling_ladder_hub"

# Transformers reads the imports of this file before it runs it, and names the package to install if it is not there.
SHIM = '''"""The classes of this checkpoint live in the package elman-core: pip install elman-core

config.json names under "made_with" the packages of the variants it needs.
"""

from elman_core import (  # noqa: F401
    LadderConfig,
    LadderForCausalLM,
    LadderForSequenceClassification,
    LadderForTokenClassification,
    LadderModel,
)
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
