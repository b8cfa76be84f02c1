"""The predecessor's logs as a table: what it reported beside what its logs say once corrected."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from elman_core.registry import ConfigError

from .tables import FORMATS, NOTHING, aligned, markdown_text, ruled, short
from .upstream import Log, common_tokens

WARNING = (
    "training losses on the predecessor's own text, nothing held out: they do not compare with runs of this package"
)


def log_data(log: Log, tokens: int | None) -> dict[str, Any]:
    """Plain values: losses in nats per byte, as they are after correction, but `reported`."""
    loss, equal = log.mean_loss(), None
    if tokens and log.tokens_per_step:
        equal = log.mean_loss(tokens // log.tokens_per_step)
    return {
        "model": log.model,
        "status": log.status,
        "parameters": log.parameters,
        "reported": _finite(log.reported),
        "last_100": _finite(loss),
        "loss": _finite(equal),
        "equal_tokens": tokens,
        "steps": log.steps,
        "tok_s": log.tok_s,
        "corrected": list(log.corrected),
        "doubtful": list(log.doubtful),
        "log": str(log.path),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _sorted(logs: Sequence[Log]) -> list[dict[str, Any]]:
    """Best corrected loss first, at equal tokens where they are known; what did not end well last."""
    tokens = common_tokens(logs)
    rows = [log_data(log, tokens) for log in logs]

    def key(row: dict[str, Any]) -> tuple[bool, float, str]:
        value = row["loss"] if row["loss"] is not None else row["last_100"]
        return row["status"] != "ok", math.inf if value is None else value, row["log"]

    return sorted(rows, key=key)


def render_logs(logs: Sequence[Log], form: str) -> str:
    """The table in one of `FORMATS`. Raises `ConfigError` for another."""
    rows = _sorted(logs)
    if form == "json":
        return json.dumps({"note": WARNING, "logs": rows}, indent=2, ensure_ascii=False)
    if form == "csv":
        return _csv(rows)
    if form not in FORMATS:
        raise ConfigError(f"--format takes one of {', '.join(FORMATS)}, not {form!r}")
    tokens = rows[0]["equal_tokens"]
    names = [
        "model",
        "parameters",
        "reported",
        "last 100",
        f"loss at {short(tokens)}" if tokens else "loss at equal tokens",
    ]
    names += ["steps", "tok/s", "status", "log"]
    numbers = [name not in ("model", "status", "log") for name in names]
    cells = [
        [r["model"], _whole(r["parameters"]), *(_loss(r[k]) for k in ("reported", "last_100", "loss")), _whole(r["steps"]),
         _whole(r["tok_s"]), r["status"], r["log"].rpartition("/")[2]]
        for r in rows
    ]  # fmt: skip
    notes = [WARNING]
    for kind in ("corrected", "doubtful"):
        for text in dict.fromkeys(text for row in rows for text in row[kind]):
            of = [row["log"].rpartition("/")[2] for row in rows if text in row[kind]]
            where = (
                "all"
                if len(of) == len(rows)
                else ", ".join(of[:5]) + (f" and {len(of) - 5} more" if len(of) > 5 else "")
            )
            notes.append(f"{kind} ({where}): {text}")
    if form == "markdown":
        return "\n".join([*ruled(names, cells, numbers), "", *(f"- {markdown_text(note)}" for note in notes)])
    return "\n".join([*aligned(names, cells, numbers), *(f"  note: {note}" for note in notes)])


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "; ".join(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows)
    return text.getvalue()


def _whole(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def _loss(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"
