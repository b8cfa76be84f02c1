"""A suite's report: one HTML file that opens anywhere without a network. Everything is inside; nothing is fetched.

Its content comes from the run folders alone. A short script sorts tables and switches the theme; without it, and on paper, the
page reads the same.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from elman_core.extension import ConfigError, write_text

from . import plots
from .collect import collect, hardware
from .compare import compare, ranked, verdict
from .identity import flatten, spelled
from .rows import Group, Row
from .runs import ENDED_WELL, Run, find_runs
from .tables import columns, difference_lines, heading

REPORT = "report.html"
VERDICTS = 6
"""Comparisons at the top of a section; the others unfold."""
_HERE = Path(__file__).parent
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"  # browsers enforce it
)


@dataclass(frozen=True)
class Extra:
    """A section before those of the protocols: a table, and pictures as SVG by their captions."""

    title: str
    summary: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    pictures: Mapping[str, bytes]


def write_report(folder: Path, extras: Sequence[Extra] = ()) -> Path:
    """Write report.html into a suite's folder (or any folder with runs) from its present state. Replaces it in one step.

    Raises:
        ConfigError: the folder has no run. StorageError: the file cannot be written, or metrics cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"a report needs a folder with runs, and {folder} is not a folder")
    path = folder / REPORT
    write_text(path, build(find_runs([folder]), folder, extras))
    return path


def build(runs: Sequence[Run], folder: Path, extras: Sequence[Extra] = ()) -> str:
    """The page."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.tests["finite"] = lambda value: isinstance(value, int | float) and math.isfinite(value)
    css, js, page = (
        (_HERE / name).read_text(encoding="utf-8") for name in ("report.css", "report.js", "report.html.j2")
    )
    suite = runs[0].suite if runs else None
    facts = suite.facts if suite is not None else {}
    skipped = facts.get("skipped") or []
    results, every = collect(runs, by_model=True, everything=False), collect(runs)
    by_key = {(group.hash, group.target): group for group in every.groups}
    return environment.from_string(page).render(
        title=suite.name if suite is not None else folder.resolve().name,
        policy=_POLICY,
        css=css,
        js=js,
        most=VERDICTS,
        summary=facts.get("summary"),
        overview=_overview(runs, facts.get("created")),
        skipped=[f"left out: {s.get('model')}: {s.get('reason')}" for s in skipped if isinstance(s, dict)],
        differences=[line.strip() for line in difference_lines(results)],
        extras=[vars(extra) | {"pictures": _embedded(extra.pictures)} for extra in extras],
        sections=[_section(group, by_key[group.hash, group.target]) for group in results.groups],
        failures=[_failure(run) for run in runs if run.status not in ("ok", "waiting")],
        surroundings=_surroundings([run for run in runs if run.manifest]),
    )


def _overview(runs: Sequence[Run], created: Any) -> str:
    """How many runs there are, how they ended, when, and on what hardware."""
    counts = Counter(run.status.partition("@")[0] for run in runs)
    ended = max((str(run.manifest.get("ended") or "") for run in runs), default="")
    places = sorted({hardware(run) for run in runs if run.manifest.get("hardware")})
    parts = [", ".join(f"{n} {word}" for word, n in counts.items())]
    for what, when in (("created", created), ("last run ended", ended)):
        to_the_minute = re.sub(r"T(\d\d:\d\d).*", r" \1 UTC", str(when))
        parts += [f"{what} {to_the_minute}"] if when else []
    return f"{len(runs)} runs: {' · '.join([*parts, *places])}"


def _section(group: Group, every: Group) -> dict[str, Any]:
    """One protocol: `group` has a row a model, `every` a row a run."""
    members = ranked(group)
    comparisons = [compare(members[0], other) for other in members[1:]]
    caveats = [f"{c.first.name} − {c.second.name}: {note}" for c in comparisons for note in c.caveats]
    pictures = plots.for_report(members, group.rows, comparisons)
    return {
        "title": f"{group.target} parameters" if group.target else "Results",
        "heading": heading(group),
        "group": group,
        "columns": columns(group, by_model=True),
        "verdicts": [verdict(comparison) for comparison in comparisons],
        "pictures": _embedded(pictures),
        "tried": _tried(every),
        "runs": every.rows if len(every.rows) > len(group.rows) or not comparisons else (),
        "run_columns": columns(every),
        "comparisons": comparisons,
        "caveats": list(dict.fromkeys(caveats)),
    }


def _embedded(pictures: Mapping[str, bytes]) -> list[dict[str, str]]:
    return [{"caption": c, "base64": base64.b64encode(svg).decode()} for c, svg in pictures.items()]


def _tried(group: Group) -> list[tuple[str, str, float, int, str, bool]]:
    """(model, value, mean held-out bits per byte, seeds that ended well, statuses, whether it was chosen) of each value."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in group.rows:
        if row.tried:
            value = ", ".join(f"{k.rpartition('.')[2]} {spelled(v)}" for k, v in row.tuned.items())
            found.setdefault((row.model, value), []).append(row)
    lines = []
    for (model, value), rows in found.items():
        well = [row.value("bits_per_byte") for row in rows if row.status in ENDED_WELL]
        known = [bits for bits in well if math.isfinite(bits)]
        mean = sum(known) / len(known) if known else math.nan
        lines.append((model, value, mean, len(well), ", ".join(sorted({r.status for r in rows})), rows[0].chosen))
    return sorted(lines, key=lambda line: line[0])


def _failure(run: Run) -> tuple[str, str, int, str, str]:
    """(run, status, attempts, reason, log) of a run that did not end well."""
    attempts = run.state.get("attempts") or []
    last = attempts[-1] if attempts else {}
    console = run.path / "console.log"
    log = last.get("log") or (console if console.exists() else "")
    return (
        run.path.name,
        run.status,
        len(attempts),
        str(run.standing[1] or last.get("cause") or ""),
        Path(str(log)).name if log else "",
    )


def _surroundings(runs: Sequence[Run]) -> dict[str, list[tuple[str, str]]]:
    """Settings, hardware, versions and back ends: each entry with all the values that the runs have."""
    tables = {
        "Settings": [flatten(run.settings) for run in runs],
        "Hardware": [flatten(run.manifest.get("hardware") or {}) for run in runs],
        "Versions": [
            {**(run.manifest.get("versions") or {}), "git commit": run.manifest.get("git_commit") or "–"}
            for run in runs
        ],
        "Back ends": [{"layers": "; ".join(map(str, run.manifest.get("backends") or []))} for run in runs],
    }
    return {title: entries for title, found in tables.items() if (entries := _entries(found))}


def _entries(tables: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    entries = []
    for key in dict.fromkeys(k for table in tables for k in table):
        values = list(dict.fromkeys(spelled(table[key]) if key in table else "–" for table in tables))
        entries.append((key, ", ".join(values[:6]) + (f", … ({len(values)} values)" if len(values) > 6 else "")))
    return entries
