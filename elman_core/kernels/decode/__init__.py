"""Kernels shared by all models: what decoding does with few rows."""

from . import spec as spec  # lets the chooser of back ends find them
