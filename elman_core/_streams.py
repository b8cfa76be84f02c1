"""The standard streams, whatever the shell and the locale made of them."""

from __future__ import annotations

import io
import os
import sys


def ready_to_print() -> None:
    """Replace streams that the shell has closed (>&-, <&-); escape characters that the terminal's encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (until the process ends)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")
