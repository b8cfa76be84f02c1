"""What all benchmarks share: timing a computation, comparing it with its peer, and the contents of a result file.

A problem is a function from a `Setting` to rows; `run.py` lists the problems and writes the file. `Setting.row` makes a row:
the shape, `who`, and the figures, or the `reason` why there are none.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
WARM = 3
"""Calls that do not count."""
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""How far an output or a gradient may be from the peer's (relative L2 error), by the narrowest dtype among output and inputs:
two codes of one function differ by rounding, two functions by about 1."""
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "mamba-ssm",
    "causal-conv1d",
    "fla-core",
    "flashrnn",
    "pararnn-torch",
    "liger-kernel",
)

Row = dict[str, Any]


def visible_gpus(count: int) -> list[str]:
    """The names of this process's `count` GPUs in CUDA_VISIBLE_DEVICES, without starting CUDA."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")


def same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Run:
    """A differentiable computation.

    Attributes:
        forward: returns the output. leaves: the tensors whose gradients are taken, by the names that peers use too. as_ours:
            by name ("y" for the output), converts a result to the layout and meaning of ours; a leaf that ours lacks is not
            compared. peer_of: the run of ours that computes the same function; "" for ours. steps: launched step by step, so a
            CUDA graph of it is timed too, and the faster counts.
    """

    forward: Callable[[], Tensor]
    leaves: Mapping[str, Tensor]
    as_ours: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    peer_of: str = "ours"
    steps: bool = False


@dataclass(frozen=True)
class Setting:
    """How a problem is run.

    Attributes:
        device: where it runs. tiny: small sizes in float32, which show that everything runs and agrees, not how fast. peers:
            time others beside ours. repeats: of each figure. only: a row runs if one of these words is among its names; ()
            for all rows. folder: for files that a problem needs.
    """

    device: torch.device
    tiny: bool
    peers: bool
    repeats: int
    only: tuple[str, ...]
    folder: Path

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.tiny else torch.bfloat16

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def wants(self, **names: Any) -> bool:
        return not self.only or any(word == str(name) for word in self.only for name in names.values())

    def row(self, measure: Callable[[], Row], **names: Any) -> Row:
        """The names and the figures that `measure` returns, or the reason why it failed."""
        try:
            return {**names, **measure()}
        except Exception as error:  # any failure of any library is a result
            return {**names, "reason": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]}
        finally:
            gc.collect()
            torch.compiler.reset()
            if self.device.type == "cuda":
                # cuBLAS keeps 32 MiB for each stream and thread; the next row's peak would contain them.
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.empty_cache()

    def contest(
        self, ours: Mapping[str, Callable[[], Run]], peers: Mapping[str, Callable[[], Run]], per: int = 1, **shape: Any
    ) -> Iterator[Row]:
        """A row for each run: microseconds over `per` (forward as training runs it, backward, both), and how far a peer
        differs.

        `agrees` is false if a peer differs by more than the limit.
        """
        builders, made = {**ours, **(peers if self.peers else {})}, dict[str, Run]()

        def run(name: str) -> Run:
            return made[name] if name in made else made.setdefault(name, builders[name]())

        def measured(name: str) -> Row:
            mine = run(name).peer_of if name in peers else ""
            return ({"peer_of": mine, **agreement(run(mine), run(name))} if mine else {}) | self.times(run(name), per)

        for name in builders:
            if self.wants(who=name, **shape):
                kind = "ours" if name in ours else "peer"
                yield self.row(lambda name=name: measured(name), **shape, who=name, kind=kind)  # type: ignore[misc]

    def times(self, run: Run, per: int = 1) -> Row:
        """Microseconds of a run over `per`."""
        y, leaves = run.forward(), list(run.leaves.values())
        gy = torch.randn_like(y)

        def whole() -> None:
            torch.autograd.grad(run.forward(), leaves, gy)

        found: Row = {
            "forward": self.us(run.forward, per),
            "backward": self.us(partial(torch.autograd.grad, y, leaves, gy, retain_graph=True), per),
            "forward_backward": self.us(whole, per),
        }
        del y  # it holds the leaves' accumulators, which are of this stream and would break a capture on another
        if run.steps and self.device.type == "cuda":
            recorded = {
                "forward": self.us(captured(run.forward).replay, per),
                "forward_backward": self.us(captured(whole).replay, per),
            }
            if recorded["forward_backward"]["median"] < found["forward_backward"]["median"]:
                return recorded | {"launched": "graph"}
        return found

    def us(self, call: Callable[[], object], per: int = 1, repeats: int | None = None) -> dict[str, float]:
        """{"median", "p10", "p90"} of a call in microseconds over `per`."""
        ms = sorted(milliseconds(call, repeats or self.repeats, self.device))
        tenth = len(ms) // 10
        found = {"median": statistics.median(ms), "p10": ms[tenth], "p90": ms[-1 - tenth]}
        return {name: round(1e3 * value / per, 4) for name, value in found.items()}


def milliseconds(call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Durations of `repeats` calls. On a GPU, each is the time between two events; the GPU is kept busy first, so it does not
    wait for the host.
    """
    times = []
    for _ in range(WARM + repeats):
        if device.type != "cuda":
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # clocks, 2 ms
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times[WARM:]


def captured(call: Callable[[], object], times: int = 1) -> torch.cuda.CUDAGraph:
    """Capture `times` calls in a CUDA graph, after two calls in which libraries choose and allocate."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph


def agreement(ours: Run, peer: Run) -> Row:
    """{"differs": |ours - peer| / |peer| of the output and each gradient, "agrees": whether all are within the limit}."""
    mine = results(ours, None)
    theirs = results(peer, mine["gy"])
    both = {n: (mine[n].double(), theirs[n].double()) for n in theirs if n in mine and n != "gy"}
    differs = {n: float((a - b).norm() / b.norm().clamp(min=1e-30)) for n, (a, b) in both.items()}
    limit = max(LIMITS[x.dtype] for run in (ours, peer) for x in (mine["y"], theirs["y"], *run.leaves.values()))
    return {
        "differs": {n: float(f"{d:.1e}") for n, d in differs.items()},
        "agrees": all(d <= limit for d in differs.values()),
    }


def results(run: Run, gy: Tensor | None) -> dict[str, Tensor]:
    """The output as "y", its given gradient as "gy", and the leaves' gradients as "dNAME", in our layout."""
    y = run.as_ours.get("y", same)(run.forward())
    gy = torch.randn_like(y) if gy is None else gy.to(y.dtype)
    gradients = torch.autograd.grad(y, list(run.leaves.values()), gy) if run.leaves else ()
    named = zip(run.leaves, gradients, strict=True)
    return {"y": y.detach(), "gy": gy, **{f"d{n}": run.as_ours.get(n, same)(g).detach() for n, g in named}}


def leaves(**tensors: Tensor) -> dict[str, Tensor]:
    return {name: x.detach().requires_grad_() for name, x in tensors.items()}


# the facts beside a result -------------------------------------------------------------------------------------------


def said(*command: str) -> str:
    """The output of a command, or "unknown"."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def asked_gpu(*what: str) -> str:
    return said("nvidia-smi", f"--query-gpu={','.join(what)}", "--format=csv,noheader", "-i", "0")


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def facts(device: torch.device) -> Row:
    """Hardware, driver, versions, commit and time."""
    cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "cpu": platform.processor() or platform.machine(),
        "driver": asked_gpu("driver_version") if cuda else None,
        "clocks": asked_gpu("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu") if cuda else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "commit": said("git", "rev-parse", "--short=12", "HEAD"),
        "changed": said("git", "status", "--porcelain", "-uno") != "",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }
