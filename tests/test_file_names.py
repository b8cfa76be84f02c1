"""Names that are not UTF-8 or not one line: said at the start, not by a traceback at the first checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elman_core.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")


@pytest.fixture(params=[rb"text\xff", rb"te\nxt", rb"te\x1bxt"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + request.param.decode("unicode_escape").encode("latin-1")))
    path.write_bytes(bytes(range(256)) * 64)
    return path


@pytest.mark.parametrize("words", [["train", "toy@8x1", "--steps", "1"], ["bench", "quick"]])
def test_a_text_or_a_folder_with_such_a_name_is_refused_before_anything_is_written(odd, tmp_path, capsys, words):
    good, link, out = tmp_path / "good", tmp_path / "link", tmp_path / "out"
    good.write_bytes(odd.read_bytes())
    link.symlink_to(odd)
    for data, where in ((odd, out), (link, out), (good, odd.with_name(odd.name + "out"))):
        assert main([*words, "--data", str(data), "--out", str(where)]) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1
        assert said[0].endswith("a recipe cannot store names with control characters or outside UTF-8; rename it")
        assert any(escaped in said[0] for escaped in (r"\udcff", r"\n", r"\x1b"))
        assert not where.exists()
