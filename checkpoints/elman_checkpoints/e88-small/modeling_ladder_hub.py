"""The classes of this checkpoint live in the package elman-core.

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
    raise ImportError("this model needs the package elman-core: pip install . in a checkout of elman") from error
