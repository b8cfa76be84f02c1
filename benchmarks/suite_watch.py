"""A suite on real GPUs, watched from outside: one job on each GPU, company avoided and flagged, a killed training resumed.

    python benchmarks/suite_watch.py --out FOLDER --data FILE [--suite 50m] [--minutes 0.15] [--planted 60] [--limit 240]

`elman bench SUITE --seeds 1 --minutes M` runs on a terminal of its own, while this script

* holds the last GPU with a process that computes there for --planted seconds, from before the suite starts;
* puts a second such process for some seconds beside a training that is under way on another GPU;
* kills (SIGKILL) another training once it has a checkpoint;
* asks the driver each second which processes compute on which GPU, and reads the states of the jobs.

Then it checks what was seen, prints a line for each check, and leaves with 1 unless all hold. In FOLDER: suite/, the suite's
folder; live.log, what the terminal showed; samples.jsonl, what each second said; status.log, what `elman jobs status` said
every ten seconds; check.json, the checks with what they rest on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from elman_core.experiments.jobs.gpus import Monitor
from elman_core.experiments.jobs.job import State, read_state

HOLD = """
import sys, time, torch
sys.stdin.readline()
x = torch.randn(8192, 8192, device="cuda")
print("on", flush=True)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    x = (x @ x).tanh()
    torch.cuda.synchronize()
"""
ELMAN = (sys.executable, "-m", "elman_core")
COMPANY = 6.0
"""Seconds that a process stays beside a training: some looks of the scheduler."""
FRESH = 5.0
"""Seconds since it was first seen on its GPU in which a training is young enough to have company before it ends."""
Sample = Mapping[str, Any]


def now() -> float:
    return time.time()


@dataclass
class Watch:
    """What happened, in order. Times are seconds since the epoch.

    Attributes:
        samples: one a second: time, gpus {uuid: [[pid, session, name]]}, jobs {id: status}.
        planted: of the process that was there first: pid, uuid, began, ended. company, killed: likewise, with the job's id.
        said: what `elman jobs status` said of the GPUs while the planted process was there.
    """

    samples: list[Sample] = field(default_factory=list)
    planted: dict[str, Any] = field(default_factory=dict)
    company: dict[str, Any] = field(default_factory=dict)
    killed: dict[str, Any] = field(default_factory=dict)
    said: str = ""


def hold(uuid: str, seconds: float) -> subprocess.Popen[bytes]:
    """A process of nobody's that computes on a GPU for so long, from when it is told. It says "on" once it is there."""
    command, environment = [sys.executable, "-c", HOLD, str(seconds)], {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def tell(process: subprocess.Popen[bytes]) -> None:
    """Let such a process begin."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


def is_on(process: subprocess.Popen[bytes]) -> bool:
    """Wait until such a process is there; False if it never comes."""
    assert process.stdout is not None
    return process.stdout.readline() == b"on\n"


def states_of(folder: Path) -> dict[str, State]:
    """The state of every job, in the suite's order; of those that have none yet, a new one."""
    try:
        jobs = json.loads((folder / "suite.json").read_text())["jobs"]
    except (OSError, ValueError):
        return {}
    return {job["id"]: read_state(folder / "jobs" / f"{job['id']}.json", job["id"]) for job in jobs}


def sample(driver: Monitor, uuids: Iterable[str], states: Mapping[str, State]) -> dict[str, Any]:
    """Who computes where, by the driver, and how the jobs stand."""
    gpus: dict[str, list[list[Any]]] = {}
    for uuid in uuids:
        gpus[uuid] = []
        for pid in sorted(driver.look(uuid).pids):
            with contextlib.suppress(OSError, psutil.Error):  # it has ended meanwhile
                gpus[uuid].append([pid, os.getsid(pid), psutil.Process(pid).name()])
    return {"time": now(), "gpus": gpus, "jobs": {id: state.status for id, state in states.items()}}


class Terminal:
    """A command on a terminal of its own, whose output goes to a file."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.main, side = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "40"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=side, stderr=side, env=environment, start_new_session=True
        )
        os.close(side)
        self.thread = threading.Thread(target=self._copy, args=(log,), daemon=True)
        self.thread.start()

    def _copy(self, log: Path) -> None:
        with log.open("wb") as out:
            while True:
                try:
                    data = os.read(self.main, 1 << 16)
                except OSError:  # the other side is closed
                    return
                if not data:
                    return
                out.write(data)
                out.flush()


def training_of(state: State) -> int | None:
    """The process that trains, below the one that the scheduler started."""
    leader = state.attempts[-1].pid if state.attempts else None
    if leader is None:
        return None
    with contextlib.suppress(psutil.Error):
        below = [p.pid for p in psutil.Process(leader).children() if "elman_core" in " ".join(p.cmdline())]
        return below[0] if below else None
    return None


def watch(given: argparse.Namespace, driver: Monitor) -> tuple[Watch, int | None]:
    """Run the suite and do what the file's first lines say; returns what happened and the suite's exit code."""
    folder, seen = given.out / "suite", Watch()
    uuids = [gpu.uuid for gpu in driver.gpus()]
    planted = hold(uuids[-1], given.planted)
    ready = {uuid: hold(uuid, COMPANY) for uuid in uuids[:-1]}  # to start takes longer than the training may have left
    tell(planted)
    if not is_on(planted):
        raise SystemExit("the process that is to be planted did not start")
    seen.planted = {"pid": planted.pid, "uuid": uuids[-1], "began": now()}
    words = ["bench", given.suite, "--data", str(given.data), "--seeds", "1", "--minutes", str(given.minutes)]
    words += ["--set", f"train.save_every={given.save_every}", "--out", str(folder)]
    terminal = Terminal([*ELMAN, *words], given.out / "live.log")
    end, asked, company = time.monotonic() + given.limit, 0.0, None
    with (given.out / "samples.jsonl").open("w") as log, (given.out / "status.log").open("w") as status:
        while terminal.process.poll() is None and time.monotonic() < end:
            began = time.monotonic()
            states = states_of(folder)
            seen.samples.append(sample(driver, uuids, states))
            log.write(json.dumps(seen.samples[-1]) + "\n")
            log.flush()
            if planted.poll() is not None and "ended" not in seen.planted:
                seen.planted["ended"] = now()
            if company is not None and company.poll() is not None:
                seen.company.setdefault("ended", now())
            if not seen.killed:
                seen.killed = kill_one(folder, states)
            elif not seen.company:
                seen.company, company = accompany(states, seen, ready)
            if began - asked > 10:
                asked = began
                seen.said += ask(folder, status, planted.poll() is None)
            wait = 1 - (time.monotonic() - began)
            while wait > 0 and not seen.killed:  # a checkpoint may be there for a second only
                time.sleep(min(wait, 0.1))
                wait -= 0.1
                seen.killed = kill_one(folder, states_of(folder))
            time.sleep(max(0.0, wait))
    code = terminal.process.poll()
    if code is None:
        terminal.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            terminal.process.wait(20)
    for process in (planted, *ready.values()):
        process.kill()
    return seen, code


def kill_one(folder: Path, states: Mapping[str, State]) -> dict[str, Any]:
    """Kill the first training that is under way with a checkpoint; says which, or nothing."""
    for id, state in states.items():
        found = sorted((folder / "runs" / id / "checkpoints").glob("step-*"))
        pid = training_of(state) if state.status == "running" and found else None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            return {"job": id, "pid": pid, "time": now(), "checkpoint": found[-1].name}
    return {}


def accompany(
    states: Mapping[str, State], seen: Watch, ready: Mapping[str, subprocess.Popen[bytes]]
) -> tuple[dict[str, Any], subprocess.Popen[bytes] | None]:
    """Let the process that is ready for its GPU begin beside a training that has just come there. Does not wait for it."""
    for id, state in states.items():
        uuid = state.attempts[-1].gpu_uuid if state.attempts else None
        pid = training_of(state) if state.status == "running" and id != seen.killed["job"] and uuid in ready else None
        times = [s["time"] for s in seen.samples if pid in [p for p, _, _ in s["gpus"].get(uuid, [])]]
        if uuid is not None and times and now() - times[0] < FRESH:
            tell(ready[uuid])
            return {"job": id, "pid": ready[uuid].pid, "uuid": uuid, "began": now()}, ready[uuid]
    return {}, None


def ask(folder: Path, log: Any, planted: bool) -> str:
    """What `elman jobs status` says of the suite and of the GPUs; returned if the planted process is there."""
    said = []
    for words in (("jobs", "status"), ("jobs", "status", str(folder))):
        done = subprocess.run([*ELMAN, *words], capture_output=True, text=True, timeout=30)
        said.append(done.stdout + done.stderr)
    log.write(f"--- {time.strftime('%H:%M:%S', time.gmtime())}\n{said[0]}\n{said[1]}\n")
    log.flush()
    return said[0] if planted else ""


# checks ------------------------------------------------------------------------------------------------------------------


def sessions(states: Mapping[str, State]) -> dict[int, str]:
    """The job of each session of processes."""
    return {a.pid: id for id, state in states.items() for a in state.attempts if a.pid is not None}


def crowded(samples: Iterable[Sample], jobs: Mapping[int, str]) -> list[str]:
    """Moments at which two jobs were on a GPU, or one job on two."""
    found = []
    for one in samples:
        by_gpu = {u: {jobs[s] for _, s, _ in on_it if s in jobs} for u, on_it in one["gpus"].items()}
        found += [f"{one['time']:.0f}: {', '.join(sorted(ids))} on {u}" for u, ids in by_gpu.items() if len(ids) > 1]
        homes: dict[str, list[str]] = {}
        for uuid, ids in by_gpu.items():
            for id in ids:
                homes.setdefault(id, []).append(uuid)
        found += [f"{one['time']:.0f}: {id} on {' and '.join(us)}" for id, us in homes.items() if len(us) > 1]
    return found


def checks(seen: Watch, folder: Path, code: int | None) -> dict[str, tuple[bool, Any]]:
    """Each check: whether it holds, and what it rests on."""
    states = states_of(folder)
    jobs = sessions(states)
    flagged = {id: state.attempts[-1].strangers for id, state in states.items() if state.contended}
    planted, company, killed = seen.planted, seen.company, seen.killed
    there = [s for s in seen.samples if planted["pid"] in [p for p, _, _ in s["gpus"][planted["uuid"]]]]
    beside = {jobs[s] for one in there for _, s, _ in one["gpus"][planted["uuid"]] if s in jobs}
    crowd = crowded(seen.samples, jobs)
    alone = {
        id for s in seen.samples for on_it in s["gpus"].values() for _, session, _ in on_it if (id := jobs.get(session))
    }
    busiest = max(
        (len({jobs[s] for on in one["gpus"].values() for _, s, _ in on if s in jobs}) for one in seen.samples),
        default=0,
    )
    return {
        "every run is ok": (
            code == 0 and bool(states) and all(state.ok for state in states.values()),
            {"exit code": code, "runs": {id: state.status for id, state in states.items()}},
        ),
        "the driver saw every job, never two on a GPU nor one on two": (
            bool(states) and not crowd and alone == set(states),
            {"samples": len(seen.samples), "jobs seen": sorted(alone), "at once": busiest, "crowded": crowd},
        ),
        "the planted process was avoided": (
            len(there) > 3 and not beside, {**planted, "samples": len(there), "jobs beside it": sorted(beside)},
        ),
        "elman jobs status named it": (f"used by pid {planted['pid']}" in seen.said, f"used by pid {planted['pid']}"),
        "company was flagged, and nothing else was": (
            bool(company) and len(flagged) == 1 and all(f"pid {company['pid']}" in " ".join(who) for who in flagged.values()),
            {**company, "flagged": flagged},
        ),
        "the killed training was resumed and misses and repeats no step": resumed(killed, folder, states),
    }  # fmt: skip


def resumed(killed: Mapping[str, Any], folder: Path, states: Mapping[str, State]) -> tuple[bool, Any]:
    """Whether the killed run went on from its checkpoint to its end."""
    if not killed:
        return False, "no training was killed: none was under way with a checkpoint"
    run = folder / "runs" / killed["job"]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = [line["step"] for line in steps if line["kind"] == "step"]
    again = json.loads((run / "manifest.json").read_text()).get("resumed", [])
    codes = [attempt.exit_code for attempt in states[killed["job"]].attempts]
    first = int(killed["checkpoint"].rpartition("-")[2])
    good = codes == [137, 0] and numbers == list(range(1, len(numbers) + 1)) and len(again) == 1
    good = good and again[0]["at_step"] >= first
    return good, {**killed, "exit codes": codes, "resumed": again, "steps": len(numbers)}


def plain(log: Path) -> list[str]:
    """The lines of a terminal's log that are events, without what moves the cursor."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", log.read_bytes().decode(errors="replace"))
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    return [line for line in lines if re.match(r"\[ *\d+:\d\d\]", line)]


def main(argv: Sequence[str] | None = None, driver: Monitor | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--suite", default="50m")
    parser.add_argument("--minutes", type=float, default=0.15, help="of each run")
    parser.add_argument("--planted", type=float, default=60, help="seconds that the last GPU is held")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--limit", type=float, default=240, help="seconds for all of it")
    given = parser.parse_args(argv)
    if (given.out / "suite").exists():
        shutil.rmtree(given.out / "suite")
    given.out.mkdir(parents=True, exist_ok=True)
    if driver is None:
        from elman_core.experiments.jobs.gpus import monitor

        driver = monitor()
    if len(driver.gpus()) < 2:
        raise SystemExit("this needs at least two GPUs")
    seen, code = watch(given, driver)
    found = checks(seen, given.out / "suite", code)
    events = plain(given.out / "live.log")
    facts = {name: {"holds": holds, "rests on": why} for name, (holds, why) in found.items()}
    (given.out / "check.json").write_text(json.dumps({"checks": facts, "events": events}, indent=1) + "\n")
    for name, (holds, why) in found.items():
        print(f"{'ok  ' if holds else 'NOT '} {name}" + ("" if holds else f": {json.dumps(why)}"))
    return 0 if all(holds for holds, _ in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
