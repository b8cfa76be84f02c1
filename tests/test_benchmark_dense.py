"""benchmarks/dense.py: what a file of two runs takes from each. Measuring needs a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
benchmark = pytest.importorskip("dense", reason="benchmarks/dense.py needs the baselines", exc_type=ImportError)

FACTS = {"what": "w", "T": 512, "gpu": "g", "driver": "d", "torch": "t", "cuda": "c", "cudnn": 1}


def cell(us, **more):
    return {"forward": {"median": us / 2}, "forward_backward": {"median": us}, **more}


def merged(tmp_path, old, new, **facts):
    files = []
    for name, row in (("old", old), ("new", new)):
        files.append(tmp_path / f"{name}.json")
        of = {**FACTS, **(facts if name == "new" else {}), "commit": name, "when": f"{name} day"}
        files[-1].write_text(json.dumps({**of, "rows": [{"d": 8, "B": 2, "target": None, **row}]}))
    benchmark.main(["--merge", *map(str, files), "--out", str(tmp_path / "out.json")])
    return json.loads((tmp_path / "out.json").read_text())


def test_ours_are_the_last_and_what_the_host_launches_is_the_faster(tmp_path):
    old = {
        "e1 bf16": cell(1.0, plan="grid: 5"), "cuDNN RNN fp16": cell(9.0), "cuDNN LSTM fp16": cell(12.0), "gone": cell(3.0),
        "e42 bf16": cell(7.0, plan="steps: a GEMM"), "FlashRNN fused bf16": "not installed",
        "plain bf16": cell(3.0, plan="steps: a GEMM", launched="graph"), "plain fp16": cell(3.0, plan="steps: a GEMM"),
    }  # fmt: skip
    new = {
        "e1 bf16": cell(2.0, plan="grid: 5"), "cuDNN RNN fp16": cell(19.0), "cuDNN LSTM fp16": cell(11.0),
        "e42 bf16": cell(8.0, plan="steps: a GEMM"), "FlashRNN fused bf16": cell(5.0),
        "plain bf16": cell(8.0, plan="steps: a GEMM"), "plain fp16": cell(4.0, plan="steps: a GEMM", launched="graph"),
    }  # fmt: skip
    made = merged(tmp_path, old, new)
    assert (made["commit"], made["when"]) == ("new", "new day")
    [row] = made["rows"]
    assert row["e1 bf16"] == new["e1 bf16"]
    assert row["cuDNN RNN fp16"] == {"commit": "old", "when": "old day", **old["cuDNN RNN fp16"]}
    assert row["cuDNN LSTM fp16"] == new["cuDNN LSTM fp16"]
    assert row["e42 bf16"]["commit"] == row["gone"]["commit"] == row["plain bf16"]["commit"] == "old"
    assert row["plain fp16"] == new["plain fp16"], "a graph has no host in it"
    assert row["FlashRNN fused bf16"] == new["FlashRNN fused bf16"]


def test_runs_on_different_gpus_are_not_one_file(tmp_path):
    with pytest.raises(SystemExit, match="gpu differs"):
        merged(tmp_path, {}, {}, gpu="another")


def test_a_shape_that_is_not_in_the_table_is_refused_before_anything_is_measured():
    assert benchmark.chosen("4096x32,512x64") == [(4096, 32), (512, 64)]
    with pytest.raises(SystemExit, match="no shape '512x63': choose among 512x32, 512x64"):
        benchmark.main(["--shapes", "512x32,512x63"])
