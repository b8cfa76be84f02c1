"""Kernels shared by all models: what decoding does with few rows."""
