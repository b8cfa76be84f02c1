"""What a day with a GPU runs, and what it says of it: on a CPU, with small processes in the place of benchmarks."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def day() -> ModuleType:
    return load("gpu_day")


def python(day: ModuleType, code: str, limit: int = 30, summary: object = None) -> object:
    return day.Step("small", "group", (sys.executable, "-c", code, "{out}"), 1, limit, summary or day.last_line)


def test_steps_are_chosen_by_name_or_group_and_an_unknown_word_is_refused(day: ModuleType) -> None:
    names = [s.name for s in day.STEPS]
    assert [s.name for s in day.choose([], [])] == names
    assert len(set(names)) == len(names)
    assert [s.name for s in day.choose(["tests", "dense", "matrix"], ["tests-rest"])] == [
        "tests-dense", "tests-e88", "tests-sanitized", "dense", "matrix"
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="no step or group 'everything'"):
        day.choose(["everything"], [])


def test_every_script_and_module_that_a_step_names_is_there(day: ModuleType) -> None:
    for step in day.STEPS:
        if step.command[1] == "-m":
            assert importlib.util.find_spec(step.command[2]) is not None
        else:
            assert Path(step.command[1]).is_file()
            assert "--out {out}" in " ".join(step.command) or step.summary is day.last_line


def test_a_step_leaves_its_log_and_result_and_its_summary_reads_both(day: ModuleType, tmp_path: Path) -> None:
    code = "import sys, json; json.dump({'rows': [{}, {'reason': 'x'}]}, open(sys.argv[1], 'w')); print('said')"
    outcome = day.run(python(day, code, summary=day.rows_counted), tmp_path)
    assert (outcome.status, outcome.summary) == ("ok", "2 rows, 1 without a result or beyond a limit")
    assert (tmp_path / "small.log").read_text() == "said\n"


@pytest.mark.parametrize("gpus", [1, 3])
def test_steps_are_alone_and_the_others_share_the_last_gpu(
    gpus: int, day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(day, "facts", dict)
    code = (
        "import os, sys, time, json; begin = time.time(); time.sleep(0.4); "
        "json.dump([os.environ['CUDA_VISIBLE_DEVICES'], begin, time.time()], open(sys.argv[1], 'w'))"
    )
    step = python(day, code)
    names = {f"timed{i}": True for i in range(4)} | {f"checked{i}": False for i in range(3)}
    steps = [dataclasses.replace(step, name=name, timed=timed) for name, timed in names.items()]
    outcomes = day.run_all(steps, tmp_path, gpus, None)
    assert {o.step: o.status for o in outcomes} == dict.fromkeys(names, "ok")
    assert len(json.loads((tmp_path / "summary.json").read_text())["steps"]) == len(names)
    spans: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for name, timed in names.items():
        gpu, begin, end = json.loads((tmp_path / f"{name}.json").read_text())
        spans.setdefault((gpu, timed), []).append((begin, end))
    together = spans.pop((str(gpus - 1), False))
    assert max(begin for begin, _ in together) < min(end for _, end in together)
    assert sorted(spans) == [(str(gpu), True) for gpu in range(max(1, gpus - 1))]
    for alone in spans.values():
        alone.sort()
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(alone))
    if gpus == 1:
        assert max(end for _, end in together) <= spans["0", True][0][0]


def test_a_failure_and_a_time_limit_are_told_apart_and_nothing_is_left_running(day: ModuleType, tmp_path: Path) -> None:
    outcome = day.run(python(day, "import sys; print('boom'); sys.exit(3)"), tmp_path)
    assert (outcome.status, outcome.summary) == ("failed", "boom")
    mark = tmp_path / "mark"
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(mark)!r}).touch()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert day.run(python(day, code, limit=1), tmp_path).status == "timeout"
    time.sleep(1.5)
    assert not mark.exists()


def test_a_result_of_the_run_before_is_not_taken_for_this_one_and_an_odd_one_is_said(
    day: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "small.json").write_text(json.dumps({"rows": [{}]}))
    assert (
        day.run(python(day, "print('nothing written')", summary=day.rows_counted), tmp_path).summary
        == "nothing written"
    )
    odd = python(
        day,
        "import sys; open(sys.argv[1], 'w').write('{\"recurrence\": [{\"target_forward\": 1}]}')",
        summary=day.matrix,
    )
    assert "another form (KeyError" in day.run(odd, tmp_path).summary  # fmt: skip


def test_summaries_name_what_is_wrong(day: ModuleType) -> None:
    rows = [{"ratio": 0.25, "passed": True}, {"ratio": 2.5, "passed": False}]
    report = {"name": "e1", "cases": 2, "faults": ["a NaN"], "rows": rows}
    log = "elman: a warning [with a bracket\n" + json.dumps([report], indent=1)
    assert day.verified(None, json.dumps([report])) == "e1 2 cases, worst 2.50, 2 WRONG"
    assert day.verified(None, log) == day.verified(None, json.dumps([report]))
    assert day.verified(None, "KernelError: no GPU here") == "KernelError: no GPU here"


def test_without_a_gpu_it_says_so_and_lists(day: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert day.main(["--list", "--only", "e88"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["matrix"]
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no GPU here"):
            day.main(["--only", "matrix"])


def test_equality_of_steps_wants_every_bit_of_a_graph_and_float32_of_a_compiler() -> None:
    steps = load("step_equality")
    assert steps.compare([2.0, 1.0], [2.0, 1.0], "graph", "bf16")["passed"]
    assert not steps.compare([2.0, 1.0], [2.0, 1.0000001], "graph", "fp32")["passed"]
    assert steps.compare([2.0], [2.0001], "compile", "fp32")["passed"]
    assert not steps.compare([2.0], [2.001], "compile", "fp32")["passed"]
    assert steps.compare([2.0], [2.01], "compile", "bf16")["limit"] is None
    assert not steps.compare([2.0], [float("nan")], "compile", "fp32")["passed"]


def test_targets_and_rates_are_summed_up(day: ModuleType) -> None:
    row = {"model": "e42@8x1", "target": 700_000}
    rows = [
        {**row, "setting": "eager", "tok_s": 5},
        {**row, "setting": "graph", "tok_s": 7_000},
        {"model": "gdn@8x1", "reason": "no"},
    ]
    assert day.targets({"rows": rows}, "") == "e42@8x1 graph 7,000 tok/s (to reach 700,000)"
    decoded = [{"samples": 1, "how": "graph", "bytes_s": 5_100}, {"samples": 1, "how": "generate", "reason": "no"}]
    assert day.rates({"rows": decoded}, "") == "bytes/s 1 graph: 5,100, 1 generate: no"
    assert day.targets(None, "it failed") == day.rates(None, "it failed") == "it failed"


def test_verifications_are_summed_up_by_the_case_closest_to_its_limit(tmp_path: Path) -> None:
    verified = load("verified")
    row = {"dtype": "float32", "tensor": "y", "error": 1e-7, "reference": 5e-8, "limit": 1e-6, "case": "T=1"}
    rows = [{**row, "ratio": 0.1}, {**row, "ratio": 0.4, "case": "T=7"}]
    report = {"name": "e1", "cases": 2, "rows": rows, "faults": [], "passed": True}
    (tmp_path / "summary.json").write_text(json.dumps({"gpu": "a GPU", "torch": "2.11"}))
    log = tmp_path / "verify-e1-fp32.log"
    log.write_text("a warning\n" + json.dumps([report], indent=1))
    out = tmp_path / "table.md"
    given = [str(tmp_path), "--out", str(out), "--commit", "abc"]
    assert verified.main(given) == 0
    assert "a GPU, torch 2.11, commit abc. e1 float32 2 cases." in out.read_text()
    assert "| e1 | float32 | y | 1.0e-07 | 5.0e-08 | 1.0e-06 | 0.40 | T=7 |" in out.read_text()
    log.write_text(json.dumps([{**report, "faults": ["T=7: y is not finite"], "passed": False}], indent=1))
    assert verified.main(given) == 1
    assert "e1 float32 2 cases FAILED" in out.read_text()
    assert "**T=7: y is not finite**" in out.read_text()
    log.write_text("no GPU here")
    with pytest.raises(ValueError, match="no GPU here"):
        verified.main(given)
