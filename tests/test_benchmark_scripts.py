"""Scripts behind published figures: they can start, time what trains, and take from each run what they say they take."""

import argparse
import importlib
import importlib.util
import itertools
import json
import math
import statistics
from pathlib import Path

import baseline_parity
import gpu_day
import pytest
import python_sources
import scaling
import torch
import training_step
import verified
from predecessor_logs import read_log
from step_profile import profile_steps, summarize

from elman_core.cli.train import read_settings
from elman_core.registry import list_variants, parse_size, resolve
from elman_core.size import count

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELMAN_KERNELS", "auto")  # some set it when they start
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if (
            "." in missing
            or not missing.startswith("elman_")
            or (ROOT / "plugins" / missing.removeprefix("elman_")).is_dir()
        ):
            raise
        pytest.skip(f"compares {missing}, which is not here")


# the figures ---------------------------------------------------------------------------------------------------------


def test_training_steps_of_equal_machines_are_merged_and_others_refused(tmp_path: Path) -> None:
    about = {"what": "", "T": 512, "steps": 20, "gpu": "a", "driver": "", "python": "", "versions": {}, "commit": "c"}
    row = {"kind": "ours", "name": "e1", "size": "100M", "B": 32}
    eager, graph = row | {"setting": "eager", "tok_s": 5}, row | {"setting": "graph", "tok_s": 7}
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, some, when in zip(files, (graph, eager), ("2", "1"), strict=True):
        file.write_text(json.dumps(about | {"when": when, "rows": [some]}))
    out = tmp_path / "all.json"
    assert training_step.merge(files, out) == [eager, graph]
    assert json.loads(out.read_text()) == about | {"when": "1", "rows": [eager, graph]}
    files[1].write_text(json.dumps(about | {"commit": "d", "when": "3", "rows": [graph | {"tok_s": 8}]}))
    assert training_step.merge(files, out) == [graph | {"tok_s": 8, "commit": "d"}]
    files[1].write_text(json.dumps(about | {"gpu": "b", "when": "3", "rows": []}))
    with pytest.raises(SystemExit, match="gpu differs: \\['a', 'b'\\]"):
        training_step.merge(files, out)


def test_a_run_as_elman_train_runs_it_is_what_is_timed(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 256)
    with training_step.trainer("lstm@16x1", "eager", 2, 8, "cpu", text) as made:
        ms = training_step.steady(made, 1, 2)
        assert made.step >= 3, "those that warm up, one more, and two that count"
    assert len(ms) == 2
    assert min(ms) > 0


@pytest.mark.parametrize(
    ("size", "target"), [("43M", 42.9e6), ("49M", 49.5e6), ("50M", 50e6), ("64M", 64.3e6), ("100M", 100e6)]
)
def test_the_sizes_are_near_what_they_are_called(size: str, target: float) -> None:
    known = [n for n in list_variants() if n in training_step.SIZES[size]]
    assert known
    for variant in known:
        name, width, depth = parse_size(training_step.shape(variant, size))
        assert width is not None
        assert depth is not None
        assert abs(count(resolve(name), width, depth) / target - 1) < 0.06, name


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


# several GPUs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 4])
def test_scaling_has_settings_that_exist_and_a_batch_that_grows_with_the_gpus(gpus: int, tmp_path: Path) -> None:
    asked = argparse.Namespace(rows=32, length=512, device="cuda", steps=60)
    for kind in scaling.KINDS:
        words = scaling.command("e42@64x1", gpus, kind, tmp_path / "text", tmp_path / "run", asked)
        sets = [value for flag, value in itertools.pairwise(words) if flag == "--set"]
        train = read_settings("e42@64x1", steps=60, sets=sets).train
        assert train.batch_size == 32 * gpus
        assert train.parallel == ("auto" if gpus == 1 else "fsdp" if kind == "fsdp" else "ddp")


# a day with a GPU ----------------------------------------------------------------------------------------------------


def test_every_script_and_test_that_a_step_of_the_day_names_is_there() -> None:
    for step in gpu_day.STEPS:
        for word in step.command[1:]:
            assert not word.endswith(".py") or (gpu_day.ROOT / word).is_file(), word
    with pytest.raises(SystemExit, match="no step or group 'everything'"):
        gpu_day.choose(["everything"], [])


def test_verifications_are_summed_up_by_the_case_closest_to_its_limit(tmp_path: Path) -> None:
    row = {"dtype": "float32", "tensor": "y", "error": 1e-7, "reference": 5e-8, "limit": 1e-6, "case": "T=1"}
    rows = [{**row, "ratio": 0.1}, {**row, "ratio": 0.4, "case": "T=7"}]
    report = {"name": "e1", "cases": 2, "rows": rows, "faults": [], "passed": True}
    (tmp_path / "summary.json").write_text(json.dumps({"gpu": "a GPU", "torch": "2.11"}))
    log, out = tmp_path / "verify-e1-fp32.log", tmp_path / "table.md"
    log.write_text("a warning\n" + json.dumps([report], indent=1))
    given = [str(tmp_path), "--out", str(out), "--commit", "abc"]
    assert verified.main(given) == 0
    assert "| e1 | float32 | y | 1.0e-07 | 5.0e-08 | 1.0e-06 | 0.40 | T=7 |" in out.read_text()
    log.write_text(json.dumps([{**report, "faults": ["T=7: y is not finite"], "passed": False}], indent=1))
    assert verified.main(given) == 1
    assert "**T=7: y is not finite**" in out.read_text()


# the table of kernels ------------------------------------------------------------------------------------------------


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


# parity of the baselines: here on a CPU at tiny sizes, and on a GPU with the libraries' kernels and layers -----------


BRANCHES = ["GRUMixer", "LSTMMixer", "Attention", "SwiGLU", "Mamba2", "GatedDeltaNet"]


def test_every_baseline_is_as_near_to_float64_as_16_bits_allow(tmp_path: Path) -> None:
    found = baseline_parity.main(["--device", "cpu", "--tiny", "--out", str(tmp_path / "parity.json")])
    assert [r["branch"] for r in found] == BRANCHES
    for row in found:
        assert row["passed"], row
        assert 1e-5 < row["output"] < 0.05, "16 bits were not used, or something is wrong"


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "module"), [("mamba2", "mamba_ssm"), ("gdn", "fla")])
def test_kernels_and_the_librarys_own_layer_are_right_on_a_gpu(name: str, module: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    found = baseline_parity.main(["--only", name, "--out", str(tmp_path / "parity.json")])
    assert len(found) == 2
    assert all(r["passed"] for r in found), baseline_parity.table(found)


# logs of the predecessor: corrected where that is possible; what is not, is named ------------------------------------


def write_log(
    path: Path, losses: list[float], every: int = 10, accumulate: int = 1, day: str = "20260301", **more
) -> Path:
    """As `train.py` wrote it; `losses` are the true means of each line, which it multiplied by the accumulation."""
    rates = more.get("rates") or [3e-4] * len(losses)
    head = f"Output directory: out/x_{day}_104357\nModel: Level 42, 94,615,296 parameters\n"
    head += f"Gradient accumulation: {accumulate}\n"
    lines = [
        f"step {i * every:6d} | loss {loss * accumulate:.4f} | lr {rate:.2e} | grad 1.00 | tok/s 40,000"
        for i, (loss, rate) in enumerate(zip(losses, rates, strict=True), 1)
    ]
    path.write_text(
        head + "\n".join(lines) + more.get("end", f"\nTraining complete! Final step: {len(losses) * every}\n")
    )
    return path


def test_the_last_hundred_lines_become_the_last_hundred_steps(tmp_path):
    losses = [4 - 0.01 * i for i in range(1, 201)]
    log = read_log(write_log(tmp_path / "a.log", losses, accumulate=4))
    assert log.reported == pytest.approx(4 * statistics.fmean(losses[-100:]), abs=1e-3)
    assert log.mean_loss() == pytest.approx(statistics.fmean(losses[-10:]), abs=1e-4)
    assert (log.model, log.parameters, log.steps, log.status, log.tok_s) == ("E42", 94_615_296, 2000, "ok", 40_000)
    assert log.notes == ["corrected: loss divided by 4, the accumulation"]


@pytest.mark.parametrize(
    ("losses", "end", "status"),
    [([2.0], "\n", "incomplete"), ([2.0], "\nTraceback (most recent call last):\n  x\n", "crashed"),
     ([2.0], "\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n", "oom"),
     ([2.0, math.nan], "\nTraining complete!\n", "diverged@20")],
)  # fmt: skip
def test_what_did_not_end_well_is_not_ok(tmp_path, losses, end, status):
    assert read_log(write_log(tmp_path / "a.log", losses, end=end)).status == status


def test_what_cannot_be_corrected_is_named(tmp_path):
    warm = [3e-5 * i for i in range(1, 11)]
    for name, more, note in (
        ("zeros", {"day": "20260221"}, "zeros were trained on"),
        ("undated", {"day": "x"}, "perhaps zeros"),
        ("rates", {"rates": [*warm, 7e-6, 3e-5, 1e-4, 3e-4]}, "rose again"),
        ("end", {"end": "\nTraining complete! Final step: 99,999\n"}, "are not in the log"),
        ("well", {"rates": [*warm, 2e-4, 1e-4, 1e-5, 1e-6]}, ""),
    ):
        log = read_log(write_log(tmp_path / name, [2.0] * len(more.get("rates", [0])), **more))
        assert note in " ".join(log.notes), name
        assert bool(log.notes) == bool(note)
