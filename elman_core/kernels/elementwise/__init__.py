"""Elementwise recurrences: the operator (`op`), plain PyTorch (`portable`), compiled modules (`native`), problems (`spec`)."""
