"""Charts as SVG text for a page: lines, points, intervals.

Colours are the page's variables `--s0` to `--s7`, so that they follow its light, dark and printed form; every series also has
a dash pattern and, in turn, a shape of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 640, 360
LEFT, TOP, BOTTOM = 62, 14, 46
DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 2 1 2 1 2", "12 4", "1 2", "4 4")
SHAPES = ("circle", "square", "triangle", "diamond")
SERIES = len(DASHES)


@dataclass(frozen=True)
class Line:
    """A series: points, and marks where something else was measured (held-out evaluations)."""

    name: str
    points: Sequence[tuple[float, float]]
    marks: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Axis:
    """One axis: its label, the values at its ends, and whether it is logarithmic."""

    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        """Round values inside the axis."""
        if self.log:
            found = [m * 10.0**e for e in range(-3, 16) for m in (1, 2, 5)]
            inside = [v for v in found if self.low <= v <= self.high]
            if len(inside) >= 4:
                return inside if len(inside) <= most else [v for v in inside if f"{v:e}".startswith("1.")]
        return _round_ticks(self.low, self.high, most)


def axis(label: str, values: Iterable[float], log: bool = False, margin: float = 0.04) -> Axis:
    """An axis around some values."""
    known = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not known:
        return Axis(label, 1.0 if log else 0.0, 10.0 if log else 1.0, log)
    low, high = min(known), max(known)
    if log:
        pad = max((high / low) ** margin, 1.05)
        return Axis(label, low / pad, high * pad, True)
    pad = margin * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(label, low - pad, high + pad)


def _round_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """A tick's label, with as many digits as its neighbours need, and K, M, B for the large."""
    largest = max(abs(t) for t in ticks)
    for scale, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if largest >= scale * (1 if scale > 1e3 else 10):
            return f"{value / scale:.6g}{letter}" if value else "0"
    gap = min((abs(b - a) for a, b in pairwise(ticks)), default=largest or 1)
    digits = max(0, -math.floor(math.log10(gap) + 1e-9)) if gap > 0 else 0
    return f"{value:,.{min(digits, 6)}f}"


class _Frame:
    """The drawing area with its axes; `right` leaves room for names at the lines' ends."""

    def __init__(self, x: Axis, y: Axis, right: int, title: str, height: int = HEIGHT) -> None:
        self.x, self.y, self.height = x, y, height
        self.inner = WIDTH - LEFT - right
        self.tall = height - TOP - BOTTOM
        self.parts = [
            f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}" class="chart">'
        ]

    def at(self, x: float, y: float) -> tuple[float, float]:
        return LEFT + self.inner * self.x.place(x), TOP + self.tall * (1 - self.y.place(y))

    def add(self, text: str) -> None:
        self.parts.append(text)

    def axes(self) -> None:
        """Grid, ticks, labels."""
        bottom, right = TOP + self.tall, LEFT + self.inner
        for ticks, across in ((self.x.ticks(7), True), (self.y.ticks(6), False)):
            for value in ticks:
                text = tick_text(value, ticks)
                if across:
                    at = LEFT + self.inner * self.x.place(value)
                    self.add(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
                    self.add(f'<text class="tick" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
                else:
                    at = TOP + self.tall * (1 - self.y.place(value))
                    self.add(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
                    self.add(f'<text class="tick" x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
        self.add(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
        middle = LEFT + self.inner / 2
        x_label, y_label = escape(self.x.label), escape(self.y.label)
        self.add(f'<text class="label" x="{middle:.0f}" y="{self.height - 8}" text-anchor="middle">{x_label}</text>')
        self.add(
            f'<text class="label" transform="translate(14 {TOP + self.tall / 2:.0f}) rotate(-90)" text-anchor="middle">'
            f"{y_label}</text>"
        )

    def done(self) -> str:
        return "\n".join([*self.parts, "</svg>"])


def line_chart(lines: Sequence[Line], x: Axis, y: Axis, title: str, key: str) -> str:
    """Lines with their names at their ends. What lies outside the axes is cut off.

    Args:
        key: a word that no other chart of the page has.
    """
    frame = _Frame(x, y, _room(line.name for line in lines), title)
    frame.axes()
    box = f'x="{LEFT}" y="{TOP}" width="{frame.inner}" height="{frame.tall}"'
    frame.add(f'<clipPath id="clip-{key}"><rect {box}/></clipPath><g clip-path="url(#clip-{key})">')
    ends = []
    for i, line in enumerate(lines):
        if not line.points:
            continue
        style = f'class="line s{i % SERIES}" stroke-dasharray="{DASHES[i % SERIES]}"'
        path = "L".join("{:.1f} {:.1f}".format(*frame.at(*p)) for p in line.points)
        frame.add(f'<path {style} d="M{path}"><title>{escape(line.name)}</title></path>')
        for px, py in line.marks:
            if not y.low <= py <= y.high:
                continue
            cx, cy = frame.at(px, py)
            note = f"{line.name}: {py:.4f} held out"
            frame.add(_shape(i, cx, cy, 3.4, note))
        end_x, end_y = frame.at(*line.points[-1])
        ends.append((i, line.name, end_x, min(max(end_y, TOP), TOP + frame.tall)))
    frame.add("</g>")
    _names(frame, ends)
    return frame.done()


def _names(frame: _Frame, ends: Sequence[tuple[int, str, float, float]]) -> None:
    """The lines' names to the right of the frame, pushed apart, each joined to its line's end."""
    at = LEFT + frame.inner
    gap = 14.0
    places: list[float] = []
    for _, _, _, y in sorted(ends, key=lambda e: e[3]):
        places.append(max(y, places[-1] + gap) if places else y)
    excess = (places[-1] - (TOP + frame.tall)) if places else 0
    if excess > 0:
        places[-1] -= excess
        for i in range(len(places) - 2, -1, -1):
            places[i] = min(places[i], places[i + 1] - gap)
    for (i, name, x, y), place in zip(sorted(ends, key=lambda e: e[3]), places, strict=True):
        frame.add(f'<path class="leader s{i % SERIES}" d="M{x:.1f} {y:.1f}L{at + 8} {place:.1f}"/>')
        frame.add(
            f'<line class="line s{i % SERIES}" stroke-dasharray="{DASHES[i % SERIES]}" x1="{at + 8}" x2="{at + 28}" '
            f'y1="{place:.1f}" y2="{place:.1f}"/>'
        )
        frame.add(f'<text class="name" x="{at + 32}" y="{place + 4:.1f}">{escape(_cut(name))}</text>')


def scatter(points: Sequence[tuple[str, float, float]], x: Axis, y: Axis, title: str) -> str:
    """Named points. The name stands beside the point where there is room for it; it is in the point's tooltip anyway."""
    frame = _Frame(x, y, 30, title)
    frame.axes()
    places = [frame.at(px, py) for _, px, py in points]
    taken = [(cx - 6, cy - 6, cx + 6, cy + 6) for cx, cy in places]
    for i, ((name, px, py), (cx, cy)) in enumerate(zip(points, places, strict=True)):
        frame.add(_shape(i, cx, cy, 5, f"{name}: {px:,.0f} {x.label}, {py:.4f} {y.label}"))
        room = _beside(_cut(name), cx, cy, taken)
        if room is not None:
            box, side = room
            taken.append(box)
            tx = box[0] if side == "start" else box[2]
            frame.add(
                f'<text class="name" x="{tx:.1f}" y="{box[3] - 3:.1f}" text-anchor="{side}">{escape(_cut(name))}</text>'
            )
    return frame.done()


_Box = tuple[float, float, float, float]  # left, top, right, bottom


def _beside(name: str, x: float, y: float, taken: Sequence[_Box]) -> tuple[_Box, str] | None:
    """A free place for a name next to a point: right, left, above or below on either side; None if all are taken."""
    wide = 7.2 * len(name)
    for dy in (0, -12, 12):
        for side in ("start", "end"):
            left = x + 9 if side == "start" else x - 9 - wide
            box = (left, y + dy - 7, left + wide, y + dy + 7)
            inside = box[0] >= LEFT and box[2] <= WIDTH - 2 and box[1] >= TOP - 6 and box[3] <= HEIGHT - BOTTOM
            if inside and not any(_overlap(box, other) for other in taken):
                return box, side
    return None


def _overlap(one: _Box, two: _Box) -> bool:
    return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]


def intervals(rows: Sequence[tuple[str, float, float, float]], label: str, title: str) -> str:
    """A row each: a name, and a mean with its interval beside zero."""
    height = TOP + BOTTOM + 26 * len(rows)
    x = axis(label, [0.0, *(v for row in rows for v in row[1:])], margin=0.06)
    frame = _Frame(x, Axis("", 0, len(rows)), 16, title, height)
    names = min(290, 20 + max(int(7.2 * len(_cut(row[0], 38))) for row in rows))
    frame.inner -= names - LEFT

    def place(value: float) -> float:
        return names + frame.inner * x.place(value)

    bottom = TOP + frame.tall
    ticks = x.ticks(6)
    for value in ticks:
        frame.add(f'<line class="grid" x1="{place(value):.1f}" x2="{place(value):.1f}" y1="{TOP}" y2="{bottom}"/>')
        text = tick_text(value, ticks)
        frame.add(f'<text class="tick" x="{place(value):.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
    frame.add(f'<line class="zero" x1="{place(0):.1f}" x2="{place(0):.1f}" y1="{TOP}" y2="{bottom}"/>')
    for i, (name, mean, low, high) in enumerate(rows):
        y = TOP + 26 * i + 13
        note = f"<title>{escape(name)}: {mean:+.4f} [{low:+.4f}, {high:+.4f}]</title>"
        frame.add(f'<text class="name" x="{names - 8}" y="{y + 4}" text-anchor="end">{escape(_cut(name, 38))}</text>')
        frame.add(f'<path class="interval" d="M{place(low):.1f} {y}H{place(high):.1f}">{note}</path>')
        frame.add(f'<path class="interval" d="M{place(low):.1f} {y - 4}v8M{place(high):.1f} {y - 4}v8"/>')
        frame.add(f'<circle class="mean" cx="{place(mean):.1f}" cy="{y}" r="4">{note}</circle>')
    middle = names + frame.inner / 2
    frame.add(f'<text class="label" x="{middle:.0f}" y="{height - 8}" text-anchor="middle">{escape(label)}</text>')
    return frame.done()


_CORNERS: dict[str, list[tuple[float, float]]] = {
    "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "triangle": [(0, -1.2), (1.1, 0.9), (-1.1, 0.9)],
    "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
}


def _shape(i: int, x: float, y: float, r: float, note: str) -> str:
    inside = f"<title>{escape(note)}</title>"
    style = f'class="mark s{i % SERIES}"'
    shape = SHAPES[(i + i // SERIES) % len(SHAPES)]  # colours come round before pairs of colour and shape do
    if shape == "circle":
        return f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="{r}">{inside}</circle>'
    where = " ".join(f"{x + r * dx:.1f},{y + r * dy:.1f}" for dx, dy in _CORNERS[shape])
    return f'<polygon {style} points="{where}">{inside}</polygon>'


def _room(names: Iterable[str]) -> int:
    return min(250, 46 + max((int(7.2 * len(_cut(n))) for n in names), default=0))


def _cut(name: str, most: int = 28) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
