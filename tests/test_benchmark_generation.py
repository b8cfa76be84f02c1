"""The benchmark of decoding runs on a CPU at a tiny size: its figures mean nothing there, its table must be whole."""

import importlib.util
import json
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "generation.py"


def test_every_way_of_decoding_is_a_row(tmp_path):
    spec = importlib.util.spec_from_file_location("generation_benchmark", SCRIPT)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    out = tmp_path / "table.json"
    words = ["--decode", "e42@16x1", "--samples", "1,3", "--bytes", "20", "--dtype", "float32", "--repeats", "2"]
    report = benchmark.main([*words, "--how", "eager,generate,graph", "--out", str(out), "--profile"])
    assert json.loads(out.read_text()) == report
    assert [(r["samples"], r["how"]) for r in report["rows"]] == [
        (n, how) for n in (1, 3) for how in ("eager", "generate", "graph")
    ]
    for row in report["rows"]:
        if row["how"] == "graph":
            assert row["reason"] == "RuntimeError: CUDA graphs need a GPU"
            continue
        assert row["lowest"] <= row["bytes_s"] <= row["highest"]
        assert row["lowest"] > 0
    assert "µs a step" in (tmp_path / "table_profile_3.md").read_text()
