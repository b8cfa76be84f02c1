"""The benchmark of training steps runs on a CPU at tiny sizes: the figures mean nothing there, the table must be whole."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from types import ModuleType

import machine
import pytest
import torch

from elman_core.registry import list_variants, parse_size, resolve

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "training_step.py"
TINY = ["--device", "cpu", "--sizes", "tiny", "--batches", "2", "--length", "12", "--warm", "1", "--steps", "3"]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("training_step", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_variant_and_its_reasons_are_in_the_table(benchmark: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    only = ["--only", "lstm,transformer,llama", "--settings", "eager,graph"]
    rows = benchmark.main([*TINY, *only, "--out", str(out)])
    assert [(r["name"], r["setting"]) for r in rows] == [
        ("lstm", "eager"), ("lstm", "graph"), ("transformer", "eager"), ("transformer", "graph"), ("llama", "eager"),
        ("llama", "graph"),
    ]  # fmt: skip
    for row in rows:
        if row["setting"] == "graph" and row["kind"] == "peer":
            assert row["reason"], "a library's model is recorded on a GPU alone"
        elif row["setting"] == "graph":
            assert row["reason"].startswith("ConfigError: train.launch='graph' is unavailable: no CUDA graphs on cpu")
        else:
            assert row["tok_s"] == pytest.approx(2 * 12 / (row["ms"] / 1e3), rel=0.02)
            assert row["ms_p10"] <= row["ms"] <= row["ms_p90"]
    written = json.loads(out.read_text())
    assert written["rows"] == rows
    profiled = benchmark.main(
        [*TINY, "--only", "lstm", "--settings", "eager", "--profile", "--out", str(tmp_path / "p.json")]
    )
    assert 0 <= profiled[0]["idle"] < 1
    assert "aten::" in (tmp_path / f"{profiled[0]['profile']}.md").read_text()
    report = out.with_suffix(".md").read_text()
    assert "| transformer@64x1 | 82,112 | 2 | eager |" in report
    assert "llama 64x1 (peer)" in report
    again = benchmark.main([*TINY, *only, "--out", str(out), "--add"])
    assert again == rows, "rows that are there are not measured again"


def test_a_run_as_elman_train_runs_it_is_what_is_timed(benchmark: ModuleType, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 256)
    with benchmark.trainer("lstm@16x1", "eager", 2, 8, "cpu", text) as made:
        before = [p.clone() for p in made.model.parameters()]
        made.advance(2)
        assert made.step == 2
        assert len((made.path / "metrics.jsonl").read_text().splitlines()) == 2
        assert any(not torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("size", "target"), [("43M", 42.9e6), ("49M", 49.5e6), ("50M", 50e6), ("64M", 64.3e6), ("100M", 100e6)]
)
def test_the_sizes_are_near_what_they_are_called(benchmark: ModuleType, size: str, target: float) -> None:
    known = [n for n in list_variants() if n in benchmark.SIZES[size]]
    assert known
    for variant in known:
        name, width, depth = parse_size(benchmark.shape(variant, size))
        assert width is not None
        assert depth is not None
        found = resolve(name)
        found.variant.check(width, found.config)
        assert found.variant.param_count is not None
        layer = found.variant.param_count(width, found.config) + found.variant.rungs * width
        assert abs((257 * width + depth * layer) / target - 1) < 0.06, name


def test_a_failure_is_a_row_with_its_reason(benchmark: ModuleType) -> None:
    def fails() -> dict:
        raise ValueError("first line\nsecond")

    assert benchmark.row_of(fails) == {"reason": "ValueError: first line"}


def test_files_of_equal_machines_are_merged_and_others_refused(benchmark: ModuleType, tmp_path: Path) -> None:
    about = {"what": "", "T": 512, "steps": 20, "gpu": "a", "driver": "", "python": "", "versions": {}, "commit": "c"}
    row = {"kind": "ours", "name": "e1", "size": "100M", "B": 32, "model": "e1@8x1", "parameters": 1, "ms": 1.0}
    row |= {"peak_gib": 1.0}
    eager, graph = row | {"setting": "eager", "tok_s": 5}, row | {"setting": "graph", "tok_s": 7}
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, some, when in zip(files, (graph, eager), ("2", "1"), strict=True):
        file.write_text(json.dumps(about | {"when": when, "rows": [some]}))
    out = tmp_path / "all.json"
    rows = benchmark.main(["--merge", *map(str, files), "--out", str(out)])
    assert [r["setting"] for r in rows] == ["eager", "graph"]
    assert json.loads(out.read_text()) == about | {"when": "1", "rows": [eager, graph]}
    assert "eager 5" in out.with_suffix(".md").read_text()
    files[1].write_text(json.dumps(about | {"commit": "d", "when": "3", "rows": [graph | {"tok_s": 8}]}))
    assert benchmark.main(["--merge", *map(str, files), "--out", str(out)]) == [graph | {"tok_s": 8, "commit": "d"}]
    files[1].write_text(json.dumps(about | {"gpu": "b", "when": "3", "rows": []}))
    with pytest.raises(SystemExit, match="gpu differs: \\['a', 'b'\\]"):
        benchmark.main(["--merge", *map(str, files), "--out", str(out)])


def test_a_row_whose_clocks_changed_says_so(benchmark: ModuleType) -> None:
    steady = {"setting": "graph", "ms_p10": 40.0, "ms_p90": 41.0}
    assert benchmark.remarks(steady) == ""
    assert benchmark.remarks(steady | {"ms_p90": 90.0}) == "unsteady: 40.0 to 90.0 ms"
    assert benchmark.remarks(steady | {"ms_p90": 90.0, "setting": "eager"}) == "", "the host sets the pace of these"
    assert benchmark.remarks(steady | {"note": "as it was"}) == "as it was"


def test_clocks_are_asked_for_while_the_gpu_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "1980 MHz, 3201 MHz, 640.10 W, 61, 0x0000000000000004"
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\nsleep 0.2\necho '{said}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    steps: list[int] = []
    found = machine.under_load(lambda: (steps.append(1), time.sleep(0.01)))
    assert len(steps) > 2
    assert found["clocks.sm"] == "1980 MHz"
    assert found["clocks_event_reasons.active"] == "0x0000000000000004"
    fake.write_text("#!/bin/sh\nexit 9\n")
    assert machine.under_load(lambda: None) == {}
    monkeypatch.setenv("PATH", "")
    assert machine.under_load(lambda: None) == {}
