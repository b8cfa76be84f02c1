"""Where the contract for plugins' tests was: it is in the package that has `elman check`."""

from .registry.installing import moved

raise ImportError(moved(__name__, "check", "testing"))
