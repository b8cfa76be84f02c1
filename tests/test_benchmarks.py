"""Every problem of the benchmarks runs here at a tiny size, and peers that are installed compute what ours compute."""

import importlib.util
import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import harness
import numpy as np
import pytest
import python_sources
import run
import torch
from elman_authors.testing.kernel import need_host_compiler
from problems import data, step, verify
from problems.step_profile import profile_steps, summarize

from elman_core.registry import parse_size, resolve
from elman_core.size import count

LONG = ("scaling", "kills", "verify", "feeding")
"""Problems of many processes, a compiler or a training that is killed: half a minute and more."""
AGREE = {
    "dense": {"cuBLAS per step", "torch.nn.RNN float32"}, "gates": {"torch.nn.GRU", "torch.nn.LSTM"}, "conv": {"torch conv1d"},
    "cross-entropy": {"torch linear_cross_entropy", "torch"},
    "parity": {"ours"}, "verify": {None}, "whole": {None},
}  # fmt: skip
"""Whose results are compared with another's here."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in run.PROBLEMS])
def test_a_problem_runs_at_a_tiny_size_and_its_peers_agree(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "serve":
        pytest.importorskip("uvicorn")
    if name == "whole":
        need_host_compiler()
    for variable in ("ELMAN_KERNELS", "EMENDER_TREE", "XMA_TREE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ELMAN_KERNELS", "off")
    out = tmp_path / "result.json"
    code = run.main([name, "--tiny", "--peers", "--device", "cpu", "--repeats", "2", "--out", str(out)])
    found = json.loads(out.read_text())
    assert code == 0, [row for row in found["rows"] if "reason" in row or row.get("agrees") is False]
    assert {row.get("who") for row in found["rows"] if row.get("agrees")} == AGREE.get(name, set())
    missing = [row["reason"] for row in found["rows"] if "reason" in row]
    assert all("No module named" in reason or "names no checkout" in reason for reason in missing), missing
    assert (
        found["versions"]["torch"] == torch.__version__.partition("+")[0]
        or found["versions"]["torch"] == torch.__version__
    )
    assert found["commit"]


def test_a_peer_that_computes_something_else_is_found(tmp_path: Path) -> None:
    setting = harness.Setting(torch.device("cpu"), True, True, 2, (), tmp_path)
    of = harness.leaves(x=torch.randn(8))
    ours, peer = (lambda f=f: harness.Run(lambda: f(of["x"]), of) for f in (torch.tanh, torch.sigmoid))
    first, second = setting.contest({"ours": ours}, {"peer": peer})
    assert first["forward"]["p10"] <= first["forward"]["median"] <= first["forward"]["p90"]
    assert second["agrees"] is False
    assert second["differs"]["y"] > 0.1


def test_the_time_of_eight_ranks_is_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, checked = os.getpid(), []

    class Batches:
        def batch(self, step: int, rows: np.ndarray | None = None) -> SimpleNamespace:
            until = time.process_time() + (0.5 if os.getpid() == parent else 0.0)
            while time.process_time() < until:  # what they read is read again
                checked.append(step)
            return SimpleNamespace(tokens=np.ones(data.ROWS if rows is None else len(rows)))

    monkeypatch.setattr(data, "mixture", lambda _: Batches())
    assert data.ranks([], 1)["tokens_cpu_s"] > data.ROWS * data.LENGTH / 0.25
    assert checked


def test_words_that_name_no_row_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    monkeypatch.setenv("ELMAN_KERNELS", "off")
    with pytest.raises(SystemExit, match="no row is named nobody"):
        run.main(["serve", "--tiny", "--device", "cpu", "--only", "nobody"])


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "module"), [("mamba2", "mamba_ssm"), ("mamba3", "mamba_ssm"), ("gdn", "fla")])
def test_kernels_and_the_librarys_own_layer_are_right_on_a_gpu(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELMAN_KERNELS", "require")  # what the program sets if nothing is
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    assert run.main(["parity", "--peers", "--only", name, "--out", str(tmp_path / "parity.json")]) == 0


@pytest.mark.parametrize(("size", "target"), [("25M", 25e6), ("27M", 26.6e6), ("49M", 49.5e6), ("100M", 100e6)])
def test_the_sizes_are_near_what_they_are_called(size: str, target: float) -> None:
    for model in step.OURS[size]:
        name, width, depth = parse_size(model)
        assert width is not None
        assert depth is not None
        assert abs(count(resolve(name), width, depth) / target - 1) < 0.06, model


def test_the_text_is_the_same_wherever_the_files_lie(tmp_path: Path) -> None:
    for place, names in (("a", ("x/one.py", "two.py", "again.py")), ("b", ("two.py", "y/z/other.py"))):
        for name in names:
            path = tmp_path / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("print(2)\n" if "two" in name or "again" in name else "print(1)\n")
    (tmp_path / "a/elman_core").mkdir()
    (tmp_path / "a/elman_core/new.py").write_text("print(3)\n")
    (tmp_path / "a/none.py").write_bytes(b"\xff\xfe")
    first, second = (python_sources.write(tmp_path / f"{p}.txt", [tmp_path / p]) for p in "ab")
    assert first["sha256"] == second["sha256"]
    assert (first["files"], first["bytes"]) == (2, 20)


def test_of_a_verification_the_case_closest_to_its_limit_and_the_first_fault_are_reported() -> None:
    row = {
        "dtype": "float32",
        "tensor": "y",
        "error": 1e-7,
        "reference": 5e-8,
        "limit": 1e-6,
        "case": "T=1",
        "ratio": 0.1,
    }
    more = {"faults": [], "unsuitable": [], "left_out": ["T=3: too large"]}
    [report] = verify.reports(
        "a warning\n" + json.dumps([{"rows": [row, {**row, "ratio": 0.4, "case": "T=7"}], **more}])
    )
    assert verify.found_of(report)["case"] == "T=7"
    assert "reason" not in verify.found_of(report)
    report |= {"rows": [], "faults": ["T=9: misaligned address", "T=11: the context is dead"]}
    assert verify.found_of(report) == {"reason": "T=9: misaligned address (and 1 more)", "left_out": 1}
    with pytest.raises(ValueError, match="no report"):
        verify.reports("elman: no such kernel")


def test_a_verification_without_memory_runs_again_alone_and_a_dtype_without_cases_has_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = {"name": "e42", "cases": 3, "rows": [], "faults": [], "unsuitable": [], "left_out": [], "passed": True}
    full, right = (SimpleNamespace(returncode=code, stdout=json.dumps([report]), stderr="") for code in (3, 0))
    asked = Mock(side_effect=[full, right])
    monkeypatch.setattr(verify.subprocess, "run", asked)
    setting = harness.Setting(torch.device("cpu"), tiny=True, peers=False, repeats=1, only=(), folder=Path())
    [row] = verify.rows(setting)
    assert (row["cases"], row["agrees"], asked.call_count) == (3, True, 2)
    assert not verify.takes("lstm", "fp32", "cuda", "full")
    assert verify.takes("lstm", "bf16", "cuda", "full")


# the table of kernels ------------------------------------------------------------------------------------------------


def test_overlap_counts_once_as_busy_and_gaps_are_idle() -> None:
    spans = [("a", 0.0, 4.0), ("b", 3.0, 5.0), ("a", 8.0, 10.0), ("c", 8.5, 9.0)]
    found = summarize(spans, steps=2)
    assert [(r.name, r.calls, r.us) for r in found.rows] == [("a", 1.0, 3.0), ("b", 0.5, 1.0), ("c", 0.5, 0.25)]
    assert math.isclose(sum(r.share for r in found.rows), 1)
    assert (found.wall_us, found.busy_us) == (5.0, 3.5)
    assert found.idle == pytest.approx(0.3)
    text = found.markdown(most=2)
    assert "5 µs a step, 4 busy, 30.0% idle" in text
    assert "| 1 others | 0.5 | 0.2 |" in text


def test_operations_on_a_cpu_are_in_the_table(tmp_path: Path) -> None:
    x = torch.randn(64, 64)
    found = profile_steps(lambda: [x @ x for _ in range(6)], 3, torch.device("cpu"))
    assert next(r for r in found.rows if r.name == "aten::matmul").calls == 2
    found.write(tmp_path / "profile")
    assert "aten::matmul" in (tmp_path / "profile.md").read_text()
