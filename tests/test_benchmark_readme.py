"""The tables of READMEs, decisions and docs/results.md come from the committed result files and from nowhere else."""

import json
from pathlib import Path

import pytest
import readme
import results_page
import step_budget

RUN = {
    "model": "a", "what": "a@8x1", "parameters": 1, "seed": 1, "lr": 0.1, "status": "ok", "trials": [], "step": {},
    "backends": [], "hardware": {"gpu": "NVIDIA Test"}, "versions": {"torch": "9.9"}, "protocol_hash": "p",
    "result": {"bits_per_byte": 1.0, "loss_last_100_steps": 1.0, "tok_s": 1.0, "peak_memory": 2**31, "bytes_seen": 7},
}  # fmt: skip


@pytest.mark.parametrize("page", readme.PAGES)
def test_a_page_says_what_the_result_files_say(page: str) -> None:
    text = (readme.ROOT / page).read_text()
    assert readme.rendered(text, readme.PAGES[page]) == text, "run: python benchmarks/readme.py"


def test_the_page_of_whole_models_says_what_the_result_files_say() -> None:
    page = (readme.ROOT / "docs/results.md").read_text()
    assert page == results_page.page(readme.RESULTS), "run: python benchmarks/results_page.py"


def test_a_changed_result_changes_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in readme.RESULTS.glob("*.json"):
        (tmp_path / file.name).write_text(json.dumps(json.loads(file.read_text()) | {"commit": "0123456789ab"}))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    plain = ("README.md", "checkpoints/README.md")  # the pages behind their links name the commits
    assert all("0123456" in table() for page, of in readme.PAGES.items() if page not in plain for table in of.values())


def test_the_budget_of_a_step_has_each_product_once() -> None:
    [budget] = [step_budget.budget(s, readme.RESULTS) for s in step_budget.SHAPES if s.name.startswith("e42")]
    # a layer of E42: in_proj and out_proj, forward and two gradients; what multiplies W is in its recurrence; and the head
    multiplied = 2 * 32 * 512 * 3 * (6 * 2 * 1536**2 + 256 * 1536)
    assert budget["products"] == pytest.approx(1e3 * multiplied / step_budget.PRODUCTS)


def test_what_did_not_end_and_what_differs_is_named(tmp_path: Path) -> None:
    trials = [
        RUN | {"lr": lr, "result": {**RUN["result"], "bits_per_byte": bits}} for lr, bits in ((0.1, 2.0), (0.2, 3.0))
    ]
    models = [
        RUN | {"trials": trials}, RUN | {"what": "b@8x1"}, RUN | {"what": "c@8x1", "protocol_hash": "q"},
        RUN | {"what": "d@8x1", "status": "running"},
    ]  # fmt: skip
    text = {"bytes": 123456789, "sha256": "ab" * 32}
    facts = {"suite": "100mb", "models": models, "text": text, "commit": "x"}
    (tmp_path / results_page.COMPARISON).write_text(json.dumps(facts))
    rows = [{"model": "e", "gpus": 4, "kind": "fsdp", "rows_per_gpu": 32, "reason": "not done after 40 s"}]
    facts = {"rows": rows, "length": 512, "target_on_four": 3.6, "commit": "abc123"}
    (tmp_path / results_page.SCALING).write_text(json.dumps(facts))
    page = results_page.page(tmp_path)
    assert "| `a@8x1` | 1 | 0.1 | 1.0000 | 1.0000 | 1 | 2.0 |" in page
    assert "| `a@8x1` | **2.0000** | 3.0000 |" in page
    assert "With another protocol or text than the rest: `c@8x1`." in page
    assert "Without a result: `d@8x1` (running)." in page
    assert "on 123,456,789 bytes" in page
    assert "NVIDIA Test; torch 9.9" in page
    assert "| `e` | 4 | fsdp | not done after 40 s |" in page
