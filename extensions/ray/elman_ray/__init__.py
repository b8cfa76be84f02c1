"""Runs the jobs of `elman bench` and `elman jobs` on a Ray cluster: `--on ray`."""

from .executor import RayExecutor

__version__ = "0.1.0"
__all__ = ["RayExecutor"]
