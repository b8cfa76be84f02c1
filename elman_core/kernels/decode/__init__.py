"""Kernels for decoding with few rows, shared by all models."""

from . import op as op  # registers them with the chooser of back ends
