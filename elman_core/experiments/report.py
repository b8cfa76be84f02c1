"""A suite's report: one HTML file that opens anywhere, without a network, for good. Everything is inside; nothing is fetched.

What stands in it comes from the run folders alone. Tables sort and the theme switches by a few lines of script; without script,
and printed, it reads the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from elman_core.registry import ConfigError
from elman_core.storage import write_text

from .charts import SERIES
from .compare import Comparison, compare, contenders, rank
from .figures import figures_of
from .names import flatten, spelled
from .notes import hardware
from .results import collect
from .rows import Group, Row
from .runs import Run, find_runs
from .tables import Column, columns, difference_lines, heading
from .wording import verdict

REPORT = "report.html"
VERDICTS = 6
"""Comparisons that are said at the top; the others unfold."""
_HERE = Path(__file__).parent
# The page may use what is inside it, and nothing else: a browser enforces it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_report(folder: Path) -> Path:
    """Write report.html into a suite's folder (or any folder with runs), from what is there now. Replaces it in one step.

    Raises:
        ConfigError: no run is there. StorageError: it cannot be written, or metrics cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"a report needs a folder with runs, and {folder} is none")
    path = folder / REPORT
    write_text(path, build(find_runs([folder]), folder))
    return path


def build(runs: Sequence[Run], folder: Path) -> str:
    """The page."""
    suite = runs[0].suite if runs else None
    title = suite.name if suite is not None else folder.resolve().name
    results = collect(runs, by_model=True, everything=False)
    detailed = collect(runs)
    parts = [_overview(runs, suite.facts.get("created") if suite else None)]
    differ = difference_lines(results)
    if differ:
        first, *rest = differ
        parts.append(f"<p>{_(first)}</p>{_list(line.strip() for line in rest)}")
    for number, group in enumerate(results.groups):
        parts.append(_section(group, detailed.groups[number], f"g{number}"))
    parts += [_not_ok(runs), _surroundings(runs)]
    css, js = ((_HERE / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{_(title)}</title>
<style>
{css}</style>
</head>
<body>
<main>
<header><h1>{_(title)}</h1><button class="theme" type="button" hidden>light / dark</button></header>
{"".join(part for part in parts if part)}
</main>
<script>
{js}</script>
</body>
</html>
"""


def _(text: Any) -> str:
    return escape(str(text), quote=True)


def _list(items: Iterable[str], kind: str = "notes") -> str:
    inside = "".join(f"<li>{_(item)}</li>" for item in items)
    return f'<ul class="{kind}">{inside}</ul>' if inside else ""


def _overview(runs: Sequence[Run], created: Any) -> str:
    """When, how many, how they stand, on what."""
    counts: dict[str, int] = {}
    for run in runs:
        word = run.status.partition("@")[0]
        counts[word] = counts.get(word, 0) + 1
    ended = max((str(run.manifest.get("ended") or "") for run in runs), default="")
    places = sorted({hardware(run) for run in runs if run.manifest.get("hardware")})
    parts = [", ".join(f"{n} {word}" for word, n in counts.items())]
    parts += [f"created {created}"] if created else []
    parts += [f"last run ended {ended}"] if ended else []
    parts += ["; ".join(places)] if places else []
    suite = runs[0].suite
    summary = f"<p>{_(suite.facts['summary'])}</p>" if suite is not None and suite.facts.get("summary") else ""
    skipped = (suite.facts.get("skipped") or []) if suite is not None else []
    left_out = _list(f"left out: {s.get('model')}: {s.get('reason')}" for s in skipped if isinstance(s, dict))
    return f'{summary}<p class="soft">{len(runs)} runs: {_(" · ".join(parts))}</p>{left_out}'


# one protocol --------------------------------------------------------------------------------------------------------


def _section(group: Group, detailed: Group, key: str) -> str:
    """A protocol: what is said of it, its models, its pictures, its runs."""
    members = contenders([run for row in group.rows for run in row.runs if run.status in ("ok", "contended")])
    members.sort(key=rank)
    comparisons = [compare(members[0], other) for other in members[1:]]
    title = f"{group.target} parameters" if group.target else "Results"
    parts = [f"<h2>{_(title)}</h2>", f'<p class="soft">{_(heading(group))}</p>']
    if comparisons:
        verdicts = [verdict(c) for c in comparisons]
        parts.append(_list(verdicts[:VERDICTS], "verdicts"))
        if len(verdicts) > VERDICTS:
            more = _list(verdicts[VERDICTS:], "verdicts")
            parts.append(f"<details><summary>{len(verdicts) - VERDICTS} more models</summary>{more}</details>")
    parts.append(_table(columns(group, by_model=True), group.rows))
    parts.append(
        '<p class="soft">Means over seeds ± standard deviation. bits/byte: on text that training never reads. '
        "Losses are nats per byte, means of 100 steps.</p>"
    )
    parts.append(_list(group.notes))
    parts.append(figures_of(members, group.rows, comparisons, key))
    if len(members) > SERIES:
        parts.append(f'<p class="soft">The losses drawn are those of the first {SERIES} of {len(members)} models.</p>')
    parts.append(_candidates(detailed))
    if len(detailed.rows) > len(group.rows) or not comparisons:
        parts.append(f"<h3>Every run</h3>{_table(columns(detailed), detailed.rows)}")
    parts.append(_details(comparisons))
    return "\n".join(part for part in parts if part)


def _table(heads: Sequence[Column], rows: Sequence[Row]) -> str:
    """A table that sorts; the first row that ended well stands out."""
    cells = _heads([c.name for c in heads], [c.name for c in heads if c.number])
    body = []
    for i, row in enumerate(rows):
        best = ' class="best"' if i == 0 and row.status == "ok" and len(rows) > 1 else ""
        body.append(f"<tr{best}>{''.join(_cell(c, row) for c in heads)}</tr>")
    return _framed(cells, body)


def _framed(heads: str, body: Sequence[str], sortable: bool = True) -> str:
    """A table of ready cells, in a frame that scrolls where the page is narrow."""
    kind = ' class="sortable"' if sortable else ""
    head = f"<thead><tr>{heads}</tr></thead>" if heads else ""
    return f'<div class="scroll"><table{kind}>{head}<tbody>{"".join(body)}</tbody></table></div>'


def _heads(names: Sequence[str], numbers: Sequence[str] = ()) -> str:
    return "".join(f'<th{" class=n" if name in numbers else ""} scope="col">{_(name)}</th>' for name in names)


_VALUES = {
    "parameters": "parameters", "bits/byte": "bits_per_byte", "last 100": "last_100", "tok/s": "tok_s",
    "GiB": "peak_memory", "minutes": "minutes",
}  # fmt: skip


def _cell(column: Column, row: Row) -> str:
    text = column.show(row)
    if column.name == "status":
        kind = "ok" if row.status == "ok" else "wait" if row.status in ("running", "waiting") else "bad"
        remark = f' title="{_(row.remark)}"' if row.remark else ""
        return f'<td><span class="status {kind}"{remark}>{_(text)}</span></td>'
    if not column.number:
        return f"<td>{_(text)}</td>"
    name = _VALUES.get(column.name, "loss" if column.name.startswith("loss") else "")
    value = row.value(name) if name else float(row.seeds[0]) if row.seeds else math.nan
    return f'<td class="n" data-v="{value if math.isfinite(value) else ""}">{_(text)}</td>'


def _candidates(group: Group) -> str:
    """For each model whose settings were tuned: the values tried and what came of each."""
    models: dict[str, dict[str, list[Row]]] = {}
    for row in group.rows:
        if row.tried:
            name = str(row.runs[0].job.get("model") or row.model)
            value = ", ".join(f"{k.rpartition('.')[2]} {spelled(v)}" for k, v in row.tuned.items())
            models.setdefault(name, {}).setdefault(value, []).append(row)
    if not models:
        return ""
    body = []
    for name, values in sorted(models.items()):
        for value, rows in values.items():
            known = [
                v for r in rows if r.status in ("ok", "contended") and math.isfinite(v := r.value("bits_per_byte"))
            ]
            mean = sum(known) / len(known) if known else math.nan
            states = ", ".join(sorted({r.status for r in rows}))
            chosen = "chosen" if rows[0].chosen else ""
            shown = f"{mean:.4f}" if known else "–"
            body.append(
                f"<tr{' class=best' if chosen else ''}><td>{_(name)}</td><td>{_(value)}</td>"
                f'<td class="n" data-v="{mean if known else ""}">{shown}</td>'
                f'<td class="n" data-v="{len(rows)}">{len(rows)}</td>'
                f"<td>{_(states)}</td><td>{chosen}</td></tr>"
            )
    heads = _heads(("model", "value", "bits/byte", "seeds", "status", "choice"), ("bits/byte", "seeds"))
    return (
        "<h3>Tuned settings</h3><p>The value with the lowest mean of held-out bits per byte is chosen for each model.</p>"
        + _framed(heads, body)
    )


def _details(comparisons: Sequence[Comparison]) -> str:
    """Every pair of runs that the comparisons rest on, and how the intervals were made."""
    if not comparisons:
        return ""
    body = []
    for c in comparisons:
        for p in c.pairs:
            d = p.difference
            loss = "–" if d is None else f"{d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}]"
            held = "–" if p.heldout is None else f"{p.heldout:+.4f}"
            seeds = " / ".join(dict.fromkeys(map(str, p.seeds)))
            block = "–" if d is None else f"{d.block:.0f}"
            cells = (f"{c.first.name} − {c.second.name}", seeds, f"{p.steps[0]:,}–{p.steps[1]:,}", loss, block, held)
            body.append(f"<tr>{''.join(f'<td>{_(cell)}</td>' for cell in cells)}</tr>")
    heads = _heads(("pair", "seed", "steps", "loss, bits/byte [95 %]", "block", "held out"))
    notes = dict.fromkeys(f"{c.first.name} − {c.second.name}: {note}" for c in comparisons for note in c.caveats)
    return (
        "<details><summary>How the models were compared</summary>"
        "<p>Runs of one seed read the same bytes at every step, so their losses are subtracted step by step, over the last "
        "part of the steps that both did. The interval is a stationary block bootstrap of that series, with the block length "
        "chosen from it; over several seeds it is Student’s interval of the differences of each seed. Below zero, "
        "the first is better.</p>"
        f"{_framed(heads, body, sortable=False)}{_list(notes)}</details>"
    )


# the rest ------------------------------------------------------------------------------------------------------------


def _not_ok(runs: Sequence[Run]) -> str:
    """Runs that did not end well: how, why, and where the log is."""
    body = []
    for run in runs:
        if run.status in ("ok", "waiting"):
            continue
        attempts = run.state.get("attempts") or []
        last = attempts[-1] if attempts else {}
        reason = run.standing[1] or last.get("cause") or ""
        log = last.get("log") or (run.path / "console.log" if (run.path / "console.log").exists() else "")
        cells = f"<td>{_(run.path.name)}</td><td>{_(run.status)}</td><td>{len(attempts) or ''}</td>"
        body.append(
            f'<tr>{cells}<td class="wrap">{_(reason)}</td><td><code>{_(Path(str(log)).name if log else "")}</code></td></tr>'
        )
    if not body:
        return ""
    heads = _heads(("run", "status", "attempts", "reason", "log"), ("attempts",))
    return f"<h2>Runs that did not end well</h2>{_framed(heads, body)}"


def _surroundings(runs: Sequence[Run]) -> str:
    """Settings, hardware, versions: what is the same in all, and what is not."""
    begun = [run for run in runs if run.manifest]
    if not begun:
        return ""
    sections = {
        "Settings": [flatten(run.settings) for run in begun],
        "Hardware": [flatten(run.manifest.get("hardware") or {}) for run in begun],
        "Versions": [
            {**(run.manifest.get("versions") or {}), "git commit": run.manifest.get("git_commit") or "–"}
            for run in begun
        ],
        "Back ends": [{"layers": "; ".join(map(str, run.manifest.get("backends") or []))} for run in begun],
    }
    parts = ["<h2>Protocol and surroundings</h2>"]
    for title, tables in sections.items():
        keys = dict.fromkeys(k for t in tables for k in t)
        rows = []
        for k in keys:
            values = list(dict.fromkeys(spelled(t.get(k)) if k in t else "–" for t in tables))
            shown = ", ".join(values[:6]) + (f", … ({len(values)} values)" if len(values) > 6 else "")
            rows.append(f'<tr><td>{_(k)}</td><td class="wrap"><code>{_(shown)}</code></td></tr>')
        if rows:
            state = " open" if title == "Hardware" else ""
            parts.append(f"<details{state}><summary>{title}</summary>{_framed('', rows, sortable=False)}</details>")
    return "".join(parts)
