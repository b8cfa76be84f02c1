"""How far a run is, from the end of its metrics: cheap enough to be asked several times a second."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAIL = 1 << 14  # bytes; a line of metrics has some hundred


@dataclass(frozen=True)
class Progress:
    """The last step of a run: its number, mean loss of the last steps in nats per byte, speed, and bits per byte if scored."""

    step: int
    loss: float
    tok_s: float
    seconds: float
    bits_per_byte: float | None


def progress(run: Path) -> Progress | None:
    """How far a run is; None before its first step."""
    steps: list[dict[str, Any]] = []
    scored = None
    for line in _tail(run / "metrics.jsonl"):
        if line.get("kind") == "evaluation":
            scored = line["bits_per_byte"]
        elif line.get("kind") == "step":
            steps.append(line)
    if not steps:
        return None
    last, recent = steps[-1], steps[-20:]
    loss = sum(line["loss"] for line in recent) / len(recent)
    return Progress(last["step"], loss, last["tok_s"], last["seconds"], scored)


def _tail(path: Path) -> list[dict[str, Any]]:
    """The whole lines at the end of a file."""
    try:
        with path.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(max(0, size - TAIL))
            lines = opened.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    whole = [line for line in lines[1 if size > TAIL else 0 :] if line.endswith(b"\n")]
    return [json.loads(line) for line in whole]
