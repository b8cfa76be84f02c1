"""lm-evaluation-harness on ladders: the command `elman evals`, and the harness's model type `elman`.

The harness's own type `hf` works too, after `import elman_core`. `elman` differs in one point: a document is scored whole,
with the state carried through, not in windows that forget.
"""
