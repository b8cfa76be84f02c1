"""The tables of READMEs and decisions come from the committed result files and from nowhere else."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = (
    "dense_h200.json",
    "matrix_state_h200.json",
    "training_step_h200.json",
    "decoding_h200.json",
    "gradient_sums_h200.json",
)
PAGES = (
    "README.md",
    "plugins/e88/README.md",
    "docs/decisions/0016-several-processes.md",
    "docs/decisions/0017-the-whole-step.md",
)


@pytest.fixture(scope="module")
def readme():
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "benchmarks" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_the_result_files_say(readme, page):
    assert set(readme.PAGES) == set(PAGES)
    text = (ROOT / page).read_text()
    assert readme.rendered(text, readme.PAGES[page]) == text, "run: python benchmarks/readme.py"


def test_a_changed_result_changes_the_pages(readme, tmp_path, monkeypatch):
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


def test_the_budget_of_a_step_has_each_product_once_and_follows_the_recurrences(tmp_path):
    import step_budget

    for name in FILES[:3]:
        (tmp_path / name).write_text((step_budget.RESULTS / name).read_text())
    before = [step_budget.budget(shape, tmp_path) for shape in step_budget.SHAPES]
    # a layer of E42: in_proj and out_proj, forward and two gradients; what multiplies W is in its recurrence; and the head
    multiplied = 2 * 32 * 512 * 3 * (6 * 2 * 1536**2 + 256 * 1536)
    assert before[1]["products"] == pytest.approx(1e3 * multiplied / step_budget.PRODUCTS)
    data = json.loads((tmp_path / "dense_h200.json").read_text())
    for row in data["rows"]:
        row["e42 tied bf16"]["forward_backward"]["median"] *= 2
    (tmp_path / "dense_h200.json").write_text(json.dumps(data))
    after = [step_budget.budget(shape, tmp_path) for shape in step_budget.SHAPES]
    assert [a["recurrence"] / b["recurrence"] for a, b in zip(after, before, strict=True)] == pytest.approx([1, 2, 1])


def test_a_note_of_a_row_stands_beside_its_figure(readme, tmp_path, monkeypatch):
    data = json.loads((readme.RESULTS / "training_step_h200.json").read_text())
    for row in data["rows"]:
        row["note"] = f"note on {row['setting']} at {row['B']}"
    (tmp_path / "training_step_h200.json").write_text(json.dumps(data))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    [line] = [line for line in readme.step_table().splitlines() if line.startswith("| 100M | e88")]
    assert [cell.strip() for cell in line.split("|")[7:] if "note" in cell] == [
        "graph (note on graph at 32)", "334,568 (note on eager at 32)", "490,026 (note on graph at 64)"
    ]  # fmt: skip
