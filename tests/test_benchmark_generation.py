"""The benchmark of decoding runs on a CPU at a tiny size: its figures mean nothing there, its table must be whole."""

import importlib.util
import json
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "generation.py"


def load():
    spec = importlib.util.spec_from_file_location("generation_benchmark", SCRIPT)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    return benchmark


def test_every_way_of_decoding_is_a_row(tmp_path):
    benchmark = load()
    out = tmp_path / "table.json"
    words = ["--decode", "e42@16x1", "--samples", "1,3", "--bytes", "20", "--dtype", "float32", "--repeats", "2"]
    report = benchmark.main([*words, "--how", "eager,generate,bursts,graph", "--out", str(out), "--profile"])
    assert json.loads(out.read_text()) == report
    assert [(r["samples"], r["how"]) for r in report["rows"]] == [
        (n, how) for how in ("graph", "eager", "generate", "bursts") for n in (1, 3)
    ]
    for row in report["rows"]:
        if row["how"] == "graph":
            assert row["reason"] == "RuntimeError: CUDA graphs need a GPU"
            continue
        assert row["lowest"] <= row["bytes_s"] <= row["highest"]
        assert row["lowest"] > 0
        assert (row["how"] == "eager") == ("profile" in row)
    profile = report["rows"][2]["profile"]
    assert profile["us"] >= profile["busy_us"] > 0
    assert profile["launches"] > len(profile["kernels"]) > 0


def test_a_row_that_takes_too_long_says_so_and_the_next_one_comes():
    benchmark = load()
    words = ["--decode", "e42@16x1", "--samples", "1,2", "--bytes", "100000", "--dtype", "float32", "--repeats", "1"]
    report = benchmark.main([*words, "--how", "eager", "--limit", "0.3"])
    assert [row["reason"] for row in report["rows"]] == ["TimeoutError: longer than 0.3 s"] * 2
