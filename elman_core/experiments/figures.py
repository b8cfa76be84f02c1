"""The report's pictures: from models and comparisons to charts with their captions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .charts import SERIES, Axis, Line, axis, intervals, line_chart, scatter
from .compare import Comparison, Contender
from .curves import Curve, curve, mean_curve, smooth, thin, visible_range
from .rows import Row

ACROSS = {"tokens": "bytes seen", "minutes": "minutes of training"}


def figures_of(members: Sequence[Contender], rows: Sequence[Row], comparisons: Sequence[Comparison], key: str) -> str:
    """Loss against tokens and minutes, speed against quality, and the differences from the best.

    Args:
        members: the best first. The first `SERIES` have a line, the mean over their seeds.
        key: a word that no other part of the page has.
    """
    curves = [(m.name, mean_curve([curve(run) for run in m.runs])) for m in members[:SERIES]]
    figures = [*_losses(curves, key), *_speed(members, rows), *_differences(comparisons)]
    return f'<div class="figures">{"".join(figures)}</div>' if figures else ""


def _losses(curves: Sequence[tuple[str, Curve]], key: str) -> list[str]:
    ends = [c.heldout["bits"][-1:] for _, c in curves]
    visible = visible_range([*(smooth(c.steps["bits"]) for _, c in curves), *ends])
    if visible is None:
        return []
    y, found = Axis("bits per byte", *visible), []
    for x, name in ACROSS.items():
        lines = [line for label, c in curves if (line := _line(label, c, x)).points]
        across = (p[0] for line in lines for p in (line.points[0], line.points[-1]))
        chart = line_chart(lines, axis(name, across, margin=0.0), y, f"bits per byte against {name}", f"{key}-{x}")
        caption = (
            f"Training loss (lines: moving means over 2 % of the steps) and held-out bits per byte (marks), by {name}."
        )
        found.append(_figure(chart, caption))
    return found


def _line(name: str, found: Curve, x: str) -> Line:
    across, bits = thin(found.steps[x], smooth(found.steps["bits"]))
    marks = zip(found.heldout[x].tolist(), found.heldout["bits"].tolist(), strict=True)
    points = list(zip(across.tolist(), bits.tolist(), strict=True))
    return Line(name, points, [m for m in marks if all(map(math.isfinite, m))])


def _speed(members: Sequence[Contender], rows: Sequence[Row]) -> list[str]:
    """Each model's point, in the colour of its line."""
    of_run = {run.path: row for row in rows for run in row.runs}
    points = []
    for member in members:
        row = of_run[member.runs[0].path]
        points.append((member.name, row.value("tok_s"), row.value("bits_per_byte")))
    points = [p for p in points if math.isfinite(p[1]) and math.isfinite(p[2])]
    if len(points) < 2:
        return []
    x = axis("tok/s", (p[1] for p in points), log=True, margin=0.1)
    y = axis("bits per byte, held out", (p[2] for p in points), margin=0.12)
    return [
        _figure(
            scatter(points, x, y, "speed against quality"), "Speed against quality: further down and right is better."
        )
    ]


def _differences(comparisons: Sequence[Comparison]) -> list[str]:
    rows = [(c.second.name, i.mean, i.low, i.high) for c in comparisons if (i := c.decisive) is not None]
    if not rows:
        return []
    best = comparisons[0].first.name
    chart = intervals(rows, f"bits per byte, {best} minus the other", "paired differences")
    return [_figure(chart, f"Paired differences with 95 % intervals; left of zero, {best} is better.")]


def _figure(chart: str, caption: str) -> str:
    return f"<figure>{chart}<figcaption>{escape(caption)}</figcaption></figure>"
