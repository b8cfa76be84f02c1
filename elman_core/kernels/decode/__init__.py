"""Kernels for decoding with few rows, shared by all models."""

from . import spec as spec  # registers them with the chooser of back ends
