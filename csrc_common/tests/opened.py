"""A compiled module, opened through the launcher as Python opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from elman_core.kernels.family import Family
from elman_core.kernels.launch import open_module
from elman_core.registry import KernelError


class Opened:
    family: ClassVar[Family]

    def __init__(self, path: Path) -> None:
        self.path, self.library = path, open_module(path, self.family)

    def call(self, name: str, given: dict[str, Any]) -> str | None:
        """What the function said went wrong."""
        try:
            self.library.call(**given).run(name)
        except KernelError as error:
            return str(error).split(": ", 1)[1]
        return None
