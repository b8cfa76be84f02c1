"""SIGKILL at random moments, on a CPU: does a training end with the same bits as one that was never killed, does a scheduler
run every job exactly once, and does packing give the same file as without kills?

A training is `elman resume RUN || elman train --out RUN`, repeated after each kill, in processes forked from this one, which
has imported everything. It is compared with the same training without kills: the loss of every step, and every byte of every
tensor of the last checkpoint. A scheduler is `elman jobs run`; its jobs live on while it is dead. Each adds one line to its
own file, which must hold that line once.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch
from elman_data import inputs
from harness import Row, Setting
from safetensors.torch import load_file

import elman_core.training.start  # noqa: F401
from elman_core.cli import main

from .data import write_lines

CASES = {
    "e42": (),
    "e1, convolution, tbptt": ("model.options.use_conv=true", "data.sampling=tbptt", "data.documents=reset"),
    "e88, schedule-free": ("model.options.n_heads=2", "model.options.n_state=4", "train.optimizer=schedulefree"),
    "e42, stream, evaluation": ("data.sampling=stream", "train.eval_every=7"),
    "e1, accumulated, recomputed": ("train.accumulate=2", "train.gradient_checkpointing=true"),
    "gru, wsd": ("train.schedule=wsd",),
    "e42, rows of documents": ("data.documents=pack", "train.accumulate=2"),
    "e42, three weighted texts": ("data.path=['{text}:0.6', '{text}.b:0.3', '{text}.c:0.1']",),
}
COMMON = (
    "model.hidden_size=16", "model.num_hidden_layers=2", "data.eval_bytes=640", "train.batch_size=4", "train.chunk_size=32",
    "train.save_every=4", "train.warmup=3", "train.device=cpu",
)  # fmt: skip


def forked(words: list[str], log: Path) -> int:
    """Fork a process that runs `elman WORDS` in its own session."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        with log.open("ab") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        sys.modules["__main__"] = ModuleType(
            "__main__"
        )  # as of the command: processes that it starts import no benchmark
        code = main(words)
    finally:
        os._exit(code)


def ended(pid: int, seconds: float) -> int | None:
    """The exit code, or None if it was killed after so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def seconds_of(words: list[str], log: Path) -> float:
    """Run a command without kills. On a slow machine a kill may come as late as this, or no run would get further."""
    began = time.monotonic()
    if ended(forked(words, log), 600) != 0:
        raise SystemExit(log.read_text()[-2000:])
    return time.monotonic() - began


def until_it_ends(commands: Sequence[list[str]], log: Path, longest: float, draw: random.Random) -> int:
    """Return the number of kills. As in a shell's `one || other`, the next command runs if the one before it fails."""
    kills = 0
    while True:
        for words in commands:
            code = ended(forked(words, log), draw.uniform(0.02, longest))
            if not code:
                break
        else:
            raise SystemExit(f"exit code {code} after {kills} kills:\n{log.read_text()[-2000:]}")
        if code == 0:
            return kills
        kills += 1


def training(case: str, steps: int, folder: Path, text: Path, draw: random.Random) -> int:
    """Kill one training; its end equals that of the same training without kills."""
    asked = (*COMMON, f"train.steps={steps}", *CASES[case])
    sets = [word for s in asked for word in ("--set", s.replace("{text}", str(text)))]

    def train(run: Path) -> list[str]:
        return ["train", case.split(",")[0], "--data", str(text), "--out", str(run), *sets]

    whole, run = folder / "whole", folder / "killed"
    longest = max(2.5, seconds_of(train(whole), folder / "whole.log"))
    kills = until_it_ends([["resume", str(run)], train(run)], folder / "killed.log", longest, draw)
    assert losses(run) == losses(whole), case
    assert sorted(losses(run)) == list(range(1, steps + 1)), case
    one, two = (tensors(r / "checkpoints" / f"step-{steps:08d}") for r in (run, whole))
    assert one.keys() == two.keys(), case
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), two[name].view(torch.uint8)), (case, name)
    return kills


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]
    assert len(dict(steps)) == len(steps), "a step twice"
    return dict(steps)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {f"{f.name}:{n}": t.reshape(-1).contiguous() for f in files for n, t in load_file(f).items()}


def scheduler(folder: Path, draw: random.Random) -> int:
    """Kill one scheduler of twelve jobs; each job ran once and succeeded."""
    lines, done = folder / "commands.txt", folder / "done"
    done.mkdir()
    commands = [f"sleep {draw.uniform(0.05, 0.6):.2f}; echo ran >> {done}/{i}" for i in range(12)]
    lines.write_text("\n".join(commands) + "\n")
    words = ["jobs", "run", str(lines), "--gpus", "none", "--slots", "3", "--out", str(folder / "jobs")]
    kills = until_it_ends([words], folder / "log", 1.2, draw)
    assert sorted(int(f.name) for f in done.iterdir()) == list(range(12))
    assert all(f.read_text() == "ran\n" for f in done.iterdir()), "a job ran twice"
    return kills


def packing(folder: Path, text: Path, draw: random.Random) -> int:
    """Kill one packing; its file and manifest equal those of the same packing without kills."""
    write_lines(folder / "lines.jsonl", 8 << 20)
    inputs.UNIT = 1 << 20

    def words(out: str) -> list[str]:
        return [
            "data",
            "pack",
            str(folder / "lines.jsonl"),
            str(text) + ".txt",
            "--drop-duplicates",
            "--out",
            str(folder / out),
        ]

    longest = max(3.0, seconds_of(words("whole"), folder / "whole.log"))
    kills = until_it_ends([words("killed")], folder / "killed.log", longest, draw)
    for name in ("{}", "{}.json"):
        assert (folder / name.format("killed")).read_bytes() == (folder / name.format("whole")).read_bytes(), name
    assert not list(folder.glob(".*")), "something is left over"
    return kills


def repeat(wanted: int, one: Callable[[int, Path], int], folder: Path) -> Row:
    """Repeat until there were `wanted` kills; every run ended as it should."""
    runs, kills, began = 0, 0, time.monotonic()
    while kills < wanted:
        here = folder / f"{one.__name__}-{runs}"
        here.mkdir()
        kills += one(runs, here)
        shutil.rmtree(here)
        runs += 1
    return {"runs": runs, "kills": kills, "seconds": round(time.monotonic() - began)}


def rows(setting: Setting) -> Iterator[Row]:
    draw, cases = random.Random(1), list(CASES)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        main(["list"])  # imports what a command line needs, and the plugins: a fork must get further than its imports
    text = setting.folder / "text"
    for name, letter in (("text", "a"), ("text.b", "b"), ("text.c", "c"), ("text.txt", "d")):
        found = sorted(Path(os.__file__).parent.glob(f"{letter}*.py"))
        text.with_name(name).write_bytes(b"".join(p.read_bytes() for p in found))

    def trainings(i: int, folder: Path) -> int:
        return training(cases[i % len(cases)], 8 if setting.tiny else 120, folder, text, draw)

    def schedulers(_: int, folder: Path) -> int:
        return scheduler(folder, draw)

    def packings(_: int, folder: Path) -> int:
        return packing(folder, text, draw)

    wanted_kills = ((trainings, 200), (schedulers, 50), (packings, 30))
    kills = [(one, wanted) for one, wanted in wanted_kills if setting.wants(who=one.__name__)]
    for one, wanted in kills:
        yield setting.row(
            lambda o=one, w=wanted: repeat(1 if setting.tiny else w, o, setting.folder), who=one.__name__, kind="ours"
        )  # type: ignore[misc]
