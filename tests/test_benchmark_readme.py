"""The README's tables come from the committed result files and from nowhere else."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("dense_h200.json", "matrix_state_h200.json", "training_step_h200.json", "decoding_h200.json")


@pytest.fixture(scope="module")
def readme():
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "benchmarks" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["README.md", "plugins/e88/README.md"])
def test_a_readme_says_what_the_result_files_say(readme, page):
    text = (ROOT / page).read_text()
    assert readme.rendered(text, readme.PAGES[page]) == text, "run: python benchmarks/readme.py"


def test_a_changed_result_changes_the_readmes(readme, tmp_path, monkeypatch):
    for name in FILES:
        data = json.loads((readme.RESULTS / name).read_text())
        data["commit"] = "0123456789ab"
        (tmp_path / name).write_text(json.dumps(data))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    for page, tables in readme.PAGES.items():
        assert "0123456" in readme.rendered((ROOT / page).read_text(), tables)
        assert all("0123456" in table() for table in tables.values())


def test_missing_marks_are_said(readme):
    with pytest.raises(ValueError, match="no marks for the table 'step'"):
        readme.rendered("# nothing\n", readme.PAGES["README.md"])
