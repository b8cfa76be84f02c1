"""Results as text: aligned columns for a terminal, Markdown, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elman_core.extension import ConfigError, printable, wrapped

from .identity import spelled
from .rows import Figure, Group, Results, Row, spelled_tuned

NOTHING = "–"


@dataclass(frozen=True)
class Column:
    """One column: its heading, the text of a row, whether that is a number, and the figure it shows."""

    name: str
    show: Callable[[Row], str]
    number: bool = True
    figure: str = ""


def columns(group: Group, by_model: bool = False) -> list[Column]:
    """The columns of a group's table."""
    tokens = f"nats at {short(group.tokens)}" if group.tokens else "nats at equal tokens"
    found = [
        Column("model", lambda r: r.model, number=False),
        Column("parameters", lambda r: shown(_alone(r, "parameters"), "{:,.0f}"), figure="parameters"),
        Column("bits/byte", lambda r: shown(r.figures.get("bits_per_byte"), "{:.4f}"), figure="bits_per_byte"),
        Column(tokens, lambda r: shown(r.figures.get("loss"), "{:.4f}"), figure="loss"),
        Column("nats, last 100", lambda r: shown(r.figures.get("last_100"), "{:.4f}"), figure="last_100"),
        Column("tok/s", lambda r: shown(_alone(r, "tok_s"), "{:,.0f}"), figure="tok_s"),
        Column("GiB", lambda r: shown(_alone(r, "peak_memory"), "{:.2f}", 2**30), figure="peak_memory"),
        Column("minutes", lambda r: minutes(_alone(r, "minutes")), figure="minutes"),
        Column("seeds" if by_model else "seed", lambda r: ", ".join(map(str, r.seeds)) or NOTHING, number=not by_model),
        Column("status", lambda r: r.status, number=False),
        Column("tuned", spelled_tuned, number=False),
    ]
    if not by_model:
        found.append(Column("run", lambda r: str(r.runs[0].path.name), number=False))
    return found


def shown(figure: Figure | None, form: str, scale: float = 1) -> str:
    """`1.2345`, over seeds `1.2345 ± 0.0012`; a dash if unknown."""
    if figure is None or not math.isfinite(figure.value):
        return NOTHING
    text = form.format(figure.value / scale)
    return text if figure.spread is None else f"{text} ± {form.format(figure.spread / scale)}"


def _alone(row: Row, name: str) -> Figure | None:
    """A figure without its spread. The spread of costs would crowd the table; JSON and CSV have it."""
    figure = row.figures.get(name)
    return None if figure is None else Figure(figure.value)


def minutes(figure: Figure | None) -> str:
    """Minutes, with one more digit below ten."""
    return shown(figure, "{:.1f}" if figure is not None and figure.value >= 10 else "{:.2f}")


def short(count: float | None) -> str:
    """16.4M, 950K."""
    if count is None:
        return NOTHING
    for scale, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * scale:  # 999,700 is 1M
            return f"{count / scale:.3g}{letter}"
    return f"{count:.0f}"


def heading(group: Group) -> str:
    """One line with what the rows share."""
    if not group.protocol:
        return "protocol unknown: runs that have not started, or have no protocol in their manifest"
    p = group.protocol
    long = p.get("minutes")  # of a run that was continued, with the digits of a clock
    long = f"{long:g}" if isinstance(long, float) else long
    length = f"{p['steps']:,} steps" if isinstance(p.get("steps"), int) else f"{long} minutes"
    parts = [f"protocol {group.hash}"]
    if group.target:
        parts.append(f"{group.target} parameters")
    data: Any = p.get("data")
    data = data if isinstance(data, Mapping) else {}
    unit = "tokens" if data.get("tokenizer") else "bytes"
    parts.append(f"{length} of {p.get('batch_size')} x {p.get('chunk_size')} {unit}")
    if isinstance(data.get("size"), int):
        parts.append(f"text of {data['size'] / 1e6:,.1f} MB, {p.get('sampling')}")
    parts += [str(value[0]) for value in (p.get("optimizer"), p.get("schedule")) if isinstance(value, list) and value]
    parts.append(str(p.get("precision")))
    if isinstance(p.get("evaluation"), list) and all(isinstance(v, int) for v in p["evaluation"]):
        most, window = p["evaluation"]
        parts.append(f"held out: up to {most:,} {unit} in windows of {window}" if window else "nothing held out")
    return " · ".join(parts)


def difference_lines(results: Results) -> list[str]:
    """The settings that differ between the groups' protocols."""
    if not results.differences:
        return []
    names = list(dict.fromkeys(g.hash for g in results.groups))
    lines = [f"{len(names)} protocols, each ranked by itself; they differ in:"]
    return lines + [f"  {k}: {' | '.join(spelled(v) for v in values)}" for k, values in results.differences.items()]


def terminal(results: Results, by_model: bool = False, width: int | None = None) -> str:
    """The table for a terminal of `width` columns, or of any width: what does not fit is left out and named."""
    blocks, dropped = [], []
    for group in results.groups:
        names, rows, numbers = _cells(group, by_model)
        kept = _fitting(names, rows, width)
        dropped += [name for i, name in enumerate(names) if i not in kept and name not in dropped]
        cells = [[row[i] for i in kept] for row in (names, *rows)]
        lines = aligned(cells, [numbers[i] for i in kept])
        notes = (wrapped(f"  note: {note}", width) for note in group.notes)
        blocks.append("\n".join([wrapped(heading(group), width), *lines, *notes]))
    if dropped:
        blocks.append(wrapped(f"not shown at this width: {', '.join(dropped)} (--format markdown has them)", width))
    if results.differences:
        blocks.append("\n".join(wrapped(line, width) for line in difference_lines(results)))
    if results.hidden:
        blocks.append(f"{results.hidden} runs with values of tuned settings that were not chosen: --all shows them")
    return "\n\n".join(blocks)


def _cells(group: Group, by_model: bool) -> tuple[list[str], list[list[str]], list[bool]]:
    """The headings, the rows, and which columns hold numbers."""
    heads = columns(group, by_model)
    return [c.name for c in heads], [[c.show(row) for c in heads] for row in group.rows], [c.number for c in heads]


def _fitting(names: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """The columns that fit, in order; the least important are left out first. Some are never left out."""
    kept = list(range(len(names)))
    room = {i: 2 + max(len(row[i]) for row in (names, *rows)) for i in kept}
    for i in sorted(kept, key=lambda i: _rank(names[i])):
        if width is None or sum(room[k] for k in kept) <= width or _rank(names[i]) == len(_DROPPED):
            break
        kept.remove(i)
    return kept


_DROPPED = ("tuned", "GiB", "nats, last 100", "run", "nats at", "minutes", "seed")


def _rank(name: str) -> int:
    return next((i for i, start in enumerate(_DROPPED) if name.startswith(start)), len(_DROPPED))


def aligned(rows: Sequence[Sequence[str]], numbers: Sequence[bool]) -> list[str]:
    """Lines of a table for a terminal, the headings first; numbers align to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(numbers))]
    lines = []
    for row in rows:
        padded = [t.rjust(w) if n else t.ljust(w) for t, w, n in zip(row, widths, numbers, strict=True)]
        lines.append(("  " + "  ".join(padded)).rstrip())
    return lines


def markdown(results: Results, by_model: bool = False) -> str:
    """The table in Markdown."""
    blocks = []
    for group in results.groups:
        names, cells, numbers = _cells(group, by_model)
        lines = [f"**{markdown_text(heading(group))}**", "", "| " + " | ".join(names) + " |"]
        lines.append("|" + "|".join("---:" if number else "---" for number in numbers) + "|")
        lines += ["| " + " | ".join(map(markdown_text, row)) + " |" for row in cells]
        lines += ["", *(f"- {markdown_text(n)}" for n in group.notes)] if group.notes else []
        blocks.append("\n".join(lines))
    if results.differences:
        first, *rest = difference_lines(results)
        blocks.append("\n".join([first, "", *(f"- {markdown_text(line.strip())}" for line in rest)]))
    if results.hidden:
        blocks.append(f"{results.hidden} runs with values of tuned settings that were not chosen are left out.")
    return "\n\n".join(blocks) + "\n"


def markdown_text(text: str) -> str:
    """Text with Markdown's special characters escaped."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\n", " ")


FIGURES = (
    "parameters", "bits_per_byte", "loss", "last_100", "tok_s", "peak_memory", "minutes", "bytes_seen",
)  # fmt: skip


def as_data(results: Results) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {
        "groups": [
            {
                "protocol_hash": group.hash,
                "protocol": dict(group.protocol),
                "target": group.target,
                "equal_tokens": group.tokens,
                "notes": list(group.notes),
                "rows": [row_data(row) for row in group.rows],
            }
            for group in results.groups
        ],
        "differences": {k: list(v) for k, v in results.differences.items()},
        "hidden": results.hidden,
    }


def row_data(row: Row) -> dict[str, Any]:
    """A row as plain values; the figures have the units of `Row`."""
    known = {n: f for n, f in row.figures.items() if math.isfinite(f.value)}
    data: dict[str, Any] = {"model": row.model, "status": row.status, "remark": row.remark}
    data |= {n: known[n].value if n in known else None for n in FIGURES}
    if len(row.runs) > 1:
        data["spread"] = {n: f.spread for n, f in known.items() if f.spread is not None}
    return data | {
        "seeds": list(row.seeds),
        "tuned": dict(row.tuned),
        "tried": {k: list(v) for k, v in row.tried.items()},
        "chosen": row.chosen,
        "backends": list(dict.fromkeys(str(b) for run in row.runs for b in run.manifest.get("backends") or [])),
        "runs": [str(run.path) for run in row.runs],
    }


def as_csv(results: Results, by_model: bool = False) -> str:
    """One line per row, with the hash of its protocol."""
    names = ["protocol_hash", "target", "equal_tokens", "model", "status", *FIGURES]
    names += [f"{n}_spread" for n in FIGURES] if by_model else []
    names += ["seeds", "tuned", "tried", "chosen", "remark", "backends", "runs"]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for group in results.groups:
        for row in group.rows:
            data = row_data(row)
            more = {f"{n}_spread": v for n, v in data.pop("spread", {}).items() if f"{n}_spread" in names}
            flat = {k: _flat(v) for k, v in {**data, **more}.items()}
            writer.writerow({"protocol_hash": group.hash, "target": group.target, "equal_tokens": group.tokens, **flat})
    return text.getvalue()


def _flat(value: Any) -> Any:
    if isinstance(value, Mapping):
        return " ".join(f"{k}={spelled(v) if not isinstance(v, list) else json.dumps(v)}" for k, v in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value


FORMATS = ("terminal", "markdown", "csv", "json")


def render(results: Results, form: str, by_model: bool = False, width: int | None = None) -> str:
    """The table in one of `FORMATS`; `width`: columns of the terminal. Raises `ConfigError` for another format."""
    if form == "terminal":
        return terminal(results, by_model, width)
    if form == "markdown":
        return markdown(results, by_model)
    if form == "csv":
        return as_csv(results, by_model)
    if form == "json":
        return json.dumps(as_data(results), indent=2, default=str, ensure_ascii=False)
    raise ConfigError(f"--format takes one of {', '.join(FORMATS)}, not {form!r}")
