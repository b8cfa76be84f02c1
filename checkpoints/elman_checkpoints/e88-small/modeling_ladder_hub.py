"""The classes of this checkpoint live in the package elman-core: pip install elman-core

config.json names under "made_with" the packages of the variants it needs.
"""

from elman_core import (  # noqa: F401
    LadderConfig,
    LadderForCausalLM,
    LadderForSequenceClassification,
    LadderForTokenClassification,
    LadderModel,
)
