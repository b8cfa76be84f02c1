"""Everything that only a GPU can say, in one call: verification, GPU tests and all benchmarks.

    python benchmarks/gpu_day.py [--out gpu_day] [--only verify,matrix] [--skip training] [--minutes 60] [--gpus 4] [--list]

Each step is a process of its own with a time limit; one that fails or runs out of time does not stop the others. --out gets
each step's log and results as they come, and summary.json; a table is printed last. --only and --skip take names of steps or
groups.
With --minutes a step does not start unless its usual time is left. With --gpus, steps that time something have a GPU of their
own, one at a time; those that only check share the last GPU; with one GPU they come first. Leaves with 1 if a step failed.

Peers are measured where they are installed (flash-linear-attention, mamba-ssm, flashrnn); nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verified import reports

HERE = Path(__file__).parent
ROOT = HERE.parent
PYTHON = sys.executable
Words = tuple[str, ...]
TOGETHER = 6
"""Steps at once on the GPU of those that time nothing."""


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name, group: what --only and --skip choose by.
        command: {out} stands for the step's result file.
        usual, limit: seconds on an H200 with 16 cores, by estimate, compilation included; when it is stopped.
        summary: from the parsed result file, or None for a step without one, and its log, to a line.
        timed: whether it measures time, and so wants a GPU to itself.
    """

    name: str
    group: str
    command: Words
    usual: int
    limit: int
    summary: Callable[[Any, str], str]
    timed: bool = True


@dataclass
class Outcome:
    step: str
    status: str  # ok, failed, timeout, skipped
    seconds: float = 0.0
    summary: str = ""


def last_line(_result: Any, log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "said nothing"


def verified(_result: Any, log: str) -> str:
    """Cases and the worst error / limit of each kernel that `elman verify --json` reported."""
    try:
        found = reports(log)
    except ValueError:
        return last_line(None, log)
    words = []
    for report in found:
        bad = len(report["faults"]) + sum(not row["passed"] for row in report["rows"])
        worst = max((row["ratio"] for row in report["rows"]), default=0.0)
        words.append(f"{report['name']} {report['cases']} cases, worst {worst:.2f}{f', {bad} WRONG' if bad else ''}")
    return "; ".join(words)


def rows_counted(result: Any, log: str) -> str:
    """Rows measured, and those that could not be."""
    if not result or "rows" not in result:
        return last_line(result, log)
    without = [r for r in result["rows"] if r.get("reason") or r.get("passed") is False]
    return f"{len(result['rows'])} rows, {len(without)} without a result or beyond a limit"


def script(name: str, *more: str) -> Words:
    return (PYTHON, str(HERE / name), "--out", "{out}", *more)


def verify(variant: str, dtype: str, usual: int) -> Step:
    command = (PYTHON, "-m", "elman_core", "verify", variant, "--grid", "full", "--dtype", dtype, "--json")
    return Step(f"verify-{variant}-{dtype}", "verify", command, usual, 900, verified, timed=False)


# -v: what failed is named at once, also where the step is stopped.
def gpu_tests(name: str, *words: str, usual: int, timed: bool = False) -> Step:
    command = (PYTHON, "-m", "pytest", "-v", "-m", "gpu", "-rs", "-p", "no:cacheprovider", *words)
    return Step(f"tests-{name}", "tests", command, usual, 900, last_line, timed)


def training(name: str, usual: int, *words: str) -> Step:
    return Step(name, "training", script("training_step.py", *words), usual, 3 * usual, rows_counted)


DENSE_TESTS, E88_TESTS = "tests/test_kernels_dense_gpu.py", "tests/test_kernels_matrix.py"
SANITIZED_TESTS = "tests/test_kernels_sanitized.py"
ELSEWHERE = [word for tests in (DENSE_TESTS, E88_TESTS, SANITIZED_TESTS) for word in ("--ignore", tests)]
OURS = ("--settings", "eager,graph", "--only", "e1,e42,e88")
TARGETED = script("training_step.py", "--targets", *OURS, "--profile")
RIVALS = ("mamba2", "gdn", "mamba_ssm", "fla")
COMPILED = ("--settings", "compile,compile+graph", "--only", ",".join(("transformer", "llama", *RIVALS)))
DECODING = script("generation.py", "--device", "cuda", "--decode", "e42@1536x6", "--samples", "1,64", "--profile")
STEPS = (
    *(
        verify(v, d, 120 if v == "e88" else 40)
        for v in ("e88", "e1", "e42", "decode")
        for d in ("bf16", "fp16", "fp32")
    ),
    gpu_tests("dense", DENSE_TESTS, usual=120, timed=True),  # among them, how long a kernel may wait
    gpu_tests("e88", E88_TESTS, usual=120),
    gpu_tests("sanitized", SANITIZED_TESTS, usual=120),
    # These ask which processes are on a GPU, and compare memory.
    gpu_tests("rest", *ELSEWHERE, usual=240, timed=True),
    Step("dense", "dense", script("dense.py"), 240, 900, rows_counted),
    Step("targets", "training", TARGETED, 40, 300, rows_counted),
    training("rivals", 400, "--targets", "--settings", "eager,graph", "--only", ",".join(RIVALS)),
    training("training-100M", 150, "--sizes", "100M", "--batches", "32", "--settings", "eager,graph"),
    Step("optimizers", "training", script("optimizers.py"), 60, 300, rows_counted),
    training("compiled-100M", 400, "--sizes", "100M", "--batches", "32", *COMPILED),
    Step("parity", "baselines", script("baseline_parity.py"), 60, 300, rows_counted, timed=False),
    Step("learn", "baselines", script("baselines_learn.py"), 90, 300, rows_counted, timed=False),
    Step("matrix", "e88", script("matrix_state.py"), 120, 600, rows_counted),
    Step("decoding", "generation", DECODING, 180, 600, rows_counted),
    training("training-50M", 150, "--sizes", "50M", "--batches", "32", "--settings", "eager,graph"),
    training("training-64-rows", 300, "--batches", "64", "--settings", "eager,graph"),
    training("rivals-compiled", 300, "--targets", "--settings", "compile,compile+graph", "--only", ",".join(RIVALS)),
    training("compiled-50M", 400, "--sizes", "50M", "--batches", "32", *COMPILED),
)


def choose(only: Sequence[str], skip: Sequence[str]) -> list[Step]:
    """Steps by name or group.

    Raises:
        SystemExit: a word that is neither.
    """
    known = {step.name for step in STEPS} | {step.group for step in STEPS}
    for word in (*only, *skip):
        if word not in known:
            raise SystemExit(f"no step or group {word!r}: choose among {', '.join(sorted(known))}")
    wanted = [s for s in STEPS if not only or {s.name, s.group} & set(only)]
    return [s for s in wanted if not {s.name, s.group} & set(skip)]


def run(step: Step, out: Path, gpu: int | None = None) -> Outcome:
    """The step in a process group of its own, on that GPU or on all that there are; its log and its result are in `out`."""
    result, log = out / f"{step.name}.json", out / f"{step.name}.log"
    result.unlink(missing_ok=True)
    command = [word.replace("{out}", str(result)) for word in step.command]
    begin = time.monotonic()
    with log.open("w") as file:
        # What the autotuners of Triton choose is kept, as far as Triton keeps it.
        env = (
            os.environ | {"TRITON_CACHE_AUTOTUNING": "1"} | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)})
        )
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=env, start_new_session=True
        )
        try:
            status = "ok" if process.wait(step.limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            stop(process)
    text = log.read_text(errors="replace")
    try:
        summary = step.summary(read(result), text)
    except (KeyError, TypeError, ValueError) as error:
        summary = f"a result of another form ({type(error).__name__}: {error}); see {log.name}"
    return Outcome(step.name, status, round(time.monotonic() - begin, 1), summary)


def stop(process: subprocess.Popen[Any]) -> None:
    """End what is left of the step, compilers among it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def table(outcomes: Sequence[Outcome]) -> str:
    width = max((len(o.step) for o in outcomes), default=0)
    return "\n".join(f"{o.step:{width}}  {o.status:8} {o.seconds:7.0f} s  {o.summary}" for o in outcomes)


def run_all(steps: Sequence[Step], out: Path, gpus: int, minutes: float | None) -> list[Outcome]:
    """Every step, in order: timed ones alone on their GPU; the others together on the last, or on the only one before them."""
    begin, outcomes, lock = time.monotonic(), list[Outcome](), threading.Lock()

    def work(queue: deque[Step], gpu: int | None) -> None:
        while True:
            with lock:
                if not queue:
                    return
                step = queue.popleft()
            left = float("inf") if minutes is None else minutes * 60 - (time.monotonic() - begin)
            if left < step.usual:
                outcome = Outcome(step.name, "skipped", summary=f"{left:.0f} s left, usually takes {step.usual}")
            else:
                print(f"{step.name} ...", flush=True)
                outcome = run(step, out, gpu)
            with lock:
                outcomes.append(outcome)
                print(table([outcome]), flush=True)
                (out / "summary.json").write_text(
                    json.dumps(facts() | {"steps": [asdict(o) for o in outcomes]}, indent=1) + "\n"
                )

    timed, others = deque(s for s in steps if s.timed), deque(s for s in steps if not s.timed)
    alone = [threading.Thread(target=work, args=(timed, gpu)) for gpu in range(max(1, gpus - 1))]
    together = [threading.Thread(target=work, args=(others, gpus - 1)) for _ in range(TOGETHER)]
    for workers in [together, alone] if gpus == 1 else [together + alone]:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return outcomes


def facts() -> dict[str, str]:
    import torch

    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_day"))
    parser.add_argument("--only", default="", help="steps or groups, with commas")
    parser.add_argument("--skip", default="", help="likewise")
    parser.add_argument("--minutes", type=float, help="for all of it")
    parser.add_argument("--gpus", type=int, default=1, help="how many to spread the steps over")
    parser.add_argument("--list", action="store_true", help="the steps, their usual time and command; runs nothing")
    given = parser.parse_args(arguments)
    steps = choose(*([w.strip() for w in text.split(",") if w.strip()] for text in (given.only, given.skip)))
    if given.list:
        for step in steps:
            print(f"{step.name:18} {step.group:10} {step.usual:5d} s  {' '.join(step.command[1:])}")
        return 0
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: `--list` shows what would run")
    if not 1 <= given.gpus <= torch.cuda.device_count():
        raise SystemExit(f"--gpus {given.gpus}: there are {torch.cuda.device_count()} here")
    given.out.mkdir(parents=True, exist_ok=True)
    outcomes = run_all(steps, given.out.resolve(), given.gpus, given.minutes)
    print(f"\n{table(outcomes)}")
    return 0 if all(o.status in ("ok", "skipped") for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
