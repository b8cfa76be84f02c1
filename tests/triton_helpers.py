"""For tests of Triton kernels on machines without a GPU."""

import os
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest
from packaging.version import Version

from elman_core.nn.add_norm import has_triton

needs_triton = pytest.mark.skipif(
    not has_triton(), reason="needs Triton: pip install triton (not pinned: torch for a GPU brings its own)"
)

interprets_loops = pytest.mark.skipif(
    has_triton() and Version(version("triton")) < Version("3.8") and Version(np.__version__) >= Version("2.4"),
    reason="Triton's interpreter counted loops with arrays: with numpy 2.4 it needs Triton 3.8",
)

_CODE = """
import runpy, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent))
runpy.run_path(sys.argv[1])["compare"]("cpu")
"""


def compare_interpreted(file: str) -> None:
    """Call `compare("cpu")` of a test file in a process of its own: Triton decides at its import whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE, file],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
