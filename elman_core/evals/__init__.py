"""lm-evaluation-harness on ladders: `python -m elman_core.evals MODEL --tasks …`, or `--data FILE` for bits per byte.

What follows MODEL is handed to the harness. Its `hf` model type works too, once `import elman_core` has run; the type `elman`
here differs in one point: a document is scored whole, with the state carried through, instead of in windows that forget.
"""

from .command import main

__all__ = ["main"]
