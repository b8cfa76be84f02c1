"""The code in the how-to pages runs, page by page, beside a folder `model`."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
from hf_helpers import tiny

HOW_TO = Path(__file__).parents[1] / "docs" / "how-to"
PAGES = ["load", "generate", "fine-tune", "evaluate", "publish", "transformers"]


def blocks(page):
    text = re.sub(r'"runs/[^"]*"', '"model"', (HOW_TO / f"{page}.md").read_text(encoding="utf-8"))
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


# Fine-tuning shows an adapter on a recurrent matrix, which is a parameter of its own in one of the two.
@pytest.mark.parametrize(("page", "variant"), [*((p, "e1") for p in PAGES), ("load", "e88"), ("generate", "e88")])
def test_the_code_of_a_page_runs(page, variant, tmp_path, monkeypatch):
    if page == "fine-tune":
        pytest.importorskip("accelerate")
        pytest.importorskip("peft")
    tiny(variant, dtype=torch.float32).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names = {}
    code = blocks(page)
    assert code
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for block in code:
            exec(compile(block, f"{page}.md", "exec"), names)
    if page == "generate":
        greedy, more = names["greedy"], names["more"]
        assert torch.equal(names["same"], names["static"])
        assert torch.equal(names["fast"], names["same"])
        assert greedy.shape[1] >= 4
        assert more.shape[0] == 1
    if page == "evaluate":
        assert "bits per byte" in said.getvalue()
    if page == "publish":
        assert "license: apache-2.0" in said.getvalue()


def test_every_page_is_in_the_table_of_contents():
    index = (HOW_TO.parent / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert f"how-to/{page}.md" in index
