"""The table of kernels: sums, overlap and gaps; and that a real step fills it."""

import pytest
import torch
from step_profile import profile_steps, summarize


def test_overlap_counts_once_as_busy_and_gaps_are_idle():
    spans = [("a", 0.0, 4.0), ("b", 3.0, 5.0), ("a", 8.0, 10.0), ("c", 8.5, 9.0)]
    found = summarize(spans, steps=2)
    assert [(r.name, r.calls, r.us) for r in found.rows] == [("a", 1.0, 3.0), ("b", 0.5, 1.0), ("c", 0.5, 0.25)]
    assert sum(r.share for r in found.rows) == 1
    assert (found.wall_us, found.busy_us) == (5.0, 3.5)
    assert found.idle == pytest.approx(0.3)
    text = found.markdown(most=2)
    assert "5 µs a step, 4 busy, 30.0% idle" in text
    assert "| `a` | 1 | 3.0 | 70.6% |" in text
    assert "| 1 others | 0.5 | 0.2 |" in text


def test_operations_on_a_cpu_are_in_the_table(tmp_path):
    x = torch.randn(64, 64)
    found = profile_steps(lambda: [x @ x for _ in range(6)], 3, torch.device("cpu"))
    row = next(r for r in found.rows if r.name == "aten::matmul")
    assert row.calls == 2
    assert row.us > 0
    found.write(tmp_path / "profile")
    assert "aten::matmul" in (tmp_path / "profile.md").read_text()
    assert (tmp_path / "profile.json").is_file()
