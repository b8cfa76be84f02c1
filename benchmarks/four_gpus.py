"""Everything that only a machine with several GPUs can say, in one call that ends in time.

    python benchmarks/four_gpus.py --out FOLDER [--data FILE] [--seconds 520] [--gpus 2] [--list]
        [--only ranks,tests,scaling,sums,suite,comparison]

In this order, each part with a limit of its own, so that one that fails or hangs costs the others little:

ranks       two ranks, from meeting each other to FSDP2, stage by stage (benchmarks/two_ranks.py): 120 s at most
tests       two ranks train as one GPU (NCCL, CUDA graphs, FSDP2), a killed rank ends the job, which resumes: half of the tests
            on the first two GPUs, half on the next, 160 s at most; with two GPUs all of them there, 220 s; then those of four
            ranks, 120 s. Meanwhile the Triton kernels of --triton are compiled by the idle cores
scaling     tok/s of three models on one GPU and on all of them (benchmarks/scaling.py): 240 s at most, a measurement 60 s
sums        of the gradients of those models inside a CUDA graph, in several ways (benchmarks/gradient_sums.py): 120 s at most
suite       `elman bench 50m` with a planted process, company and a killed training (benchmarks/suite_watch.py): 180 s at most,
            with two GPUs 270 s
comparison  `elman bench 100mb`, from the moment at which every run of the suite has begun; stopped when --seconds are over, and
            gone on with by the same call: what has ended is not repeated

Most of that is starting: on two or four H200s a training takes 15 to 19 s from its command to its first step (`phases` in
results/scaling_h200.json); torchrun comes before that, and pytest with its launcher of ranks imports everything twice. What
does not end in time prints the stacks of all its threads into its log before it is killed, every rank of it.

--data is a text of 100 MB or more; without it the Python sources installed here (benchmarks/python_sources.py). FOLDER gets
each part's log and results as they come, and summary.json. --pack FILE.tar.gz: all of it but weights, to carry away; unpacked
in FOLDER on another machine, it is gone on with there (with the same --data at the same place). Leaves with 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaling import LEAST
from stacks import end_with_stacks, no_core_files

HERE = Path(__file__).parent
ROOT = HERE.parent
PYTHON = sys.executable
PARTS = ("ranks", "tests", "scaling", "sums", "suite", "comparison")
LIMITS = {"ranks": 120.0, "tests": 160.0, "scaling": 240.0, "sums": 120.0, "suite": 180.0, "comparison": 3600.0}
"""Seconds that a part may take."""
ONE_AFTER_THE_OTHER = {"tests": 60.0, "suite": 90.0}
"""Seconds more where two GPUs do what four would do beside each other."""
MEASUREMENT = 60.0
"""Seconds for one measurement of scaling."""
SPARE = 15.0
"""Seconds that scaling.py needs besides its measurements: to start, and to have ranks that hang say where."""
FOUR_RANKS = 120.0
"""Seconds for the tests of four ranks, which come after the others."""
PER_TEST = 100
"""Seconds for one test; its ranks end themselves before, with their stacks."""
LAST = 25.0
"""Seconds kept at the end for what is stopped to save, and for packing."""
PYTEST = (PYTHON, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", "--durations=8", "--tb=short")
MODELS = "e1@1280x6,e42@1536x6,e88:h32n16@1536x20"
KEPT = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "NVSHMEM_", "CUDA_VISIBLE_DEVICES", "ELMAN_", "TRITON_")
"""Beginnings of the variables that the summary shows: every process that is started here inherits all."""


@dataclass
class Child:
    """A process under way: its log, and when it is to be ended, by time.monotonic."""

    name: str
    process: subprocess.Popen[bytes]
    began: float
    until: float
    first: int = 0  # the signal with which it is asked to end, before it is killed
    outcome: dict[str, Any] = field(default_factory=dict)


def limit_of(part: str, gpus: int) -> float:
    """Seconds that a part may take on so many GPUs."""
    return LIMITS[part] + (0 if gpus > 3 else ONE_AFTER_THE_OTHER.get(part, 0))


class Call:
    """The whole call: what runs, what has ended, and how much time is left.

    Args:
        out: the folder. seconds: for everything.
    """

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.began = out, time.monotonic()
        self.end = self.began + seconds - LAST
        self.outcomes: list[dict[str, Any]] = []

    @property
    def age(self) -> float:
        return time.monotonic() - self.began

    def start(self, name: str, words: Sequence[str], limit: float, gpus: str = "", stop: int = 0, **more: str) -> Child:
        """Start a process with its log; it never has longer than the call.

        Args:
            gpus: the only ones it sees. stop: the signal that asks it to end. more: environment.
        """
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **more}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        with (self.out / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                list(words), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
            )
        now = time.monotonic()
        return Child(name, process, now, min(now + limit, self.end), stop)

    def over(self, child: Child) -> bool:
        """Whether it has ended, by itself or because its time is up."""
        if child.outcome:
            return True
        code = child.process.poll()
        if code is None and time.monotonic() < child.until:
            return False
        status = "ok" if code == 0 else "failed" if code is not None else "stopped"
        if code is None:
            end(child)
        seconds = round(time.monotonic() - child.began, 1)
        child.outcome = {
            "part": child.name,
            "status": status,
            "code": code,
            "from": round(child.began - self.began, 1),
            "seconds": seconds,
        }
        self.outcomes.append(child.outcome)
        self.write()
        print(
            f"{self.age:5.0f} s  {child.name}: {status} after {seconds} s; {last_line(self.out / f'{child.name}.log')}",
            flush=True,
        )
        return True  # fmt: skip

    def wait(self, *children: Child) -> None:
        while sum(self.over(child) for child in children) < len(children):  # each is looked at
            time.sleep(0.2)

    def write(self) -> None:
        """summary.json: what ended how, and by what it was surrounded."""
        shown = {k: v for k, v in sorted(os.environ.items()) if k.startswith(KEPT)}
        facts = {"host": platform.node(), "parts": self.outcomes, "environment": shown, "seconds": round(self.age)}
        (self.out / "summary.json").write_text(json.dumps(facts, indent=1) + "\n")


def end(child: Child) -> None:
    """Ask it to end, if there is a signal for that, and then end it with all that it started, which prints its stacks first."""
    if child.first:
        child.process.send_signal(child.first)
        try:
            child.process.wait(LAST - 10)
            return
        except subprocess.TimeoutExpired:
            pass
    end_with_stacks(child.process)
    child.process.wait()


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


# parts -------------------------------------------------------------------------------------------------------------------


def ranks(call: Call, _given: argparse.Namespace) -> None:
    words = [PYTHON, str(HERE / "two_ranks.py"), "--out", str(call.out / "two_ranks"), "--limit", "20"]
    call.wait(call.start("ranks", words, LIMITS["ranks"], gpus="0,1"))


def tests(call: Call, given: argparse.Namespace) -> None:
    equal, killed = "gpus_train_as_one and fp32", "killed_rank_on_gpus or (gpus_train_as_one and bf16 and auto)"
    if given.gpus > 3:
        jobs = [("tests-equal", "0,1", equal), ("tests-killed", "2,3", killed)]
    else:  # a rank that is killed shall not have another job's ranks beside it
        jobs = [("tests", "0,1", f"({equal}) or {killed}")]
    file, children, limit = "tests/test_train_distributed.py", [], limit_of("tests", given.gpus)
    if given.triton:
        words = [PYTHON, str(HERE / "fill_triton_cache.py"), *given.triton.split(","), "--no-choice"]
        words += ["--workers", str(given.workers), "--limit", str(limit)]
        children.append(call.start("triton", words, limit + 5, gpus=str(given.gpus - 1)))
    for name, gpus, which in jobs:
        words = [*PYTEST, file, "-k", which, "--timeout", str(PER_TEST)]
        children.append(call.start(name, words, limit, gpus=gpus))
    call.wait(*children)
    if given.gpus > 3:
        words = [*PYTEST, file, "-k", "gpus_train_as_one and four", "--timeout", str(PER_TEST)]
        call.wait(call.start("tests-four", words, FOUR_RANKS))


def scaling(call: Call, given: argparse.Namespace) -> None:
    until = time.monotonic() + LIMITS["scaling"]
    every = str(given.gpus)
    out = call.out / "scaling.json"
    for name, more in (
        ("scaling", ["--gpus", f"1,{every}", "--kinds", "auto", "--together"]),
        *([("scaling-2", ["--gpus", "2", "--kinds", "auto"])] if given.gpus > 2 else ()),
        ("scaling-fsdp", ["--gpus", every, "--models", "e42@1536x6", "--kinds", "fsdp"]),
        ("scaling-eager", ["--gpus", every, "--models", "e42@1536x6", "--kinds", "eager"]),
    ):
        left = min(until, call.end) - time.monotonic()
        if left < LEAST + SPARE:
            call.outcomes.append({"part": name, "status": "skipped", "seconds": 0})
            continue
        words = [PYTHON, str(HERE / "scaling.py"), "--models", MODELS, "--out", str(out), "--add", *more]
        words += ["--limit", str(MEASUREMENT), "--steps", str(given.steps), "--seconds", str(left - SPARE)]
        call.wait(call.start(name, words, left))


def sums(call: Call, given: argparse.Namespace) -> None:
    words = [PYTHON, str(HERE / "gradient_sums.py"), "--gpus", "2,4" if given.gpus > 3 else "2", "--models", MODELS]
    call.wait(call.start("sums", [*words, "--out", str(call.out / "gradient_sums.json")], LIMITS["sums"]))


def suite(call: Call, given: argparse.Namespace) -> Child:
    words = [PYTHON, str(HERE / "suite_watch.py"), "--out", str(call.out / "suite-50m"), "--data", str(given.data)]
    words += ["--minutes", str(given.minutes), "--planted", str(given.planted)]
    limit = limit_of("suite", given.gpus)
    return call.start("suite", [*words, "--limit", str(limit - 30)], limit, TRITON_CACHE_AUTOTUNING="1")


def comparison(call: Call, given: argparse.Namespace) -> Child:
    words = [
        PYTHON,
        "-m",
        "elman_core",
        "bench",
        given.suite,
        "--data",
        str(given.data),
        "--out",
        str(call.out / "100mb"),
    ]
    if given.tuning:
        words += ["--tuning", str(given.tuning)]
    return call.start("comparison", words, LIMITS["comparison"], stop=2, TRITON_CACHE_AUTOTUNING="1")


def all_begun(folder: Path) -> bool:
    """Whether every run of a suite has begun, and none waits to be begun again: it would wait for what is started now."""
    from suite_watch import states_of

    states = states_of(folder)
    return bool(states) and all(state.status == "running" or not state.unfinished for state in states.values())


def run(call: Call, given: argparse.Namespace, parts: Sequence[str]) -> None:
    """The parts in order; the comparison takes the GPUs that the suite leaves."""
    serial: dict[str, Callable[[Call, argparse.Namespace], None]] = {
        "ranks": ranks, "tests": tests, "scaling": scaling, "sums": sums
    }  # fmt: skip
    for name, part in serial.items():
        if name in parts:
            part(call, given)
    children = []
    if "suite" in parts:
        children.append(suite(call, given))
        while not call.over(children[0]) and not all_begun(call.out / "suite-50m" / "suite"):
            time.sleep(0.2)
    if "comparison" in parts:
        children.append(comparison(call, given))
    call.wait(*children)


def pack(folder: Path, file: Path) -> None:
    """Everything in the folder but weights, locks and texts."""
    with tarfile.open(file, "w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            weights = "checkpoints" in inside.parts or inside.name in (".lock", ".scheduler.lock")
            if path.is_file() and not weights and path.suffix not in (".lock", ".txt"):
                tar.add(path, arcname=str(inside))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("four_gpus"))
    parser.add_argument("--data", type=Path, help="the text; a file that is not there yet gets the Python sources")
    parser.add_argument("--seconds", type=float, default=520, help="for all of it")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--suite", default="100mb", help="that the comparison runs")
    parser.add_argument("--minutes", type=float, default=0.15, help="of each run of the suite")
    parser.add_argument("--planted", type=float, default=45, help="seconds that the last GPU is held")
    parser.add_argument("--steps", type=int, default=60, help="of each measurement of scaling")
    parser.add_argument("--tuning", type=int, help="bytes of each trial of the comparison; by default the suite's")
    parser.add_argument("--triton", default="gdn@640x8,mamba2@640x10", help="models whose kernels are compiled ahead")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile, for each of them")
    parser.add_argument("--pack", type=Path, help="a .tar.gz of everything but weights")
    parser.add_argument("--list", action="store_true", help="say what would run, and for how long at most")
    given = parser.parse_args(argv)
    parts = [part for part in given.only.split(",") if part]
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"no part {sorted(unknown)[0]!r}: choose among {', '.join(PARTS)}")
    if given.list:
        limits = {part: min(limit_of(part, given.gpus), given.seconds) for part in parts}
        print("\n".join(f"{part:11} at most {limit:.0f} s" for part, limit in limits.items()))
        return 0
    no_core_files()
    given.out.mkdir(parents=True, exist_ok=True)
    given.data = given.data or given.out / "python-sources.txt"
    call = Call(given.out.resolve(), given.seconds)
    given.out = call.out
    try:
        if not given.data.exists():
            words = [PYTHON, str(HERE / "python_sources.py"), str(given.data.resolve())]
            text = call.start("text", words, 120)
            call.wait(text)
            if text.outcome["status"] != "ok":
                return 1
        given.data = given.data.resolve()
        about = given.data.with_name(f"{given.data.name}.json")
        if about.exists() and about.parent != call.out:
            shutil.copy(about, call.out / "python-sources.txt.json")
        run(call, given, parts)
    finally:
        call.write()
        if given.pack:
            pack(call.out, given.pack)
    return 0 if all(o["status"] in ("ok", "skipped") for o in call.outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
