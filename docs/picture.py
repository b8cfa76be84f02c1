"""Draw docs/models.svg from a table of README, docs/tracking.svg from one of docs/scoreboard.md: python docs/picture.py

Quality against speed, and against tracking, with a labelled point for each model. Circles are variants of this project, squares
are baselines. The two colours are from Okabe and Ito's palette, lighter in dark mode.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `([^`]+)` \|.*\| [\d.]+ \| ([\d.]+) \| \d+ \| ([\d,]+)K.*$", re.MULTILINE)
TRACKING = re.compile(r"^\| `([^`]+)` \| [\d.]+ \| ([\d.]+) \| `[^`]+` \| .* \| ([\d.]+) \| \d+ \|$", re.MULTILINE)
BASELINES = ("transformer", "gdn", "mamba2", "lstm", "gru")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 340, 64, 44, 16, 30
STYLE = """text { font: 13px system-ui, sans-serif; fill: #1c1f24 } .paper { fill: #ffffff } .rule { stroke: #d9dde3 }
.soft { fill: #5b6370; font-size: 12px } .ours { fill: #0072b2 } .baseline { fill: #d55e00 }
@media (prefers-color-scheme: dark) { text { fill: #e7e9ec } .paper { fill: #14171b } .rule { stroke: #343a43 }
.soft { fill: #a0a8b4 } .ours { fill: #56b4e9 } .baseline { fill: #e69f00 } }"""


def models(readme: str) -> str:
    """Bits against speed: the table in README's text."""
    points = [(name, float(bits), 1e3 * int(speed.replace(",", ""))) for name, bits, speed in ROW.findall(readme)]
    about = "bits per byte (lower is better) against bytes per second in training; squares are baselines"
    return draw(points, 1e5, 2, lambda x: f"{x / 1e3:.0f}K", about)


def tracking(scoreboard: str) -> str:
    """Bits against tracking: the table in the text of docs/scoreboard.md."""
    rows = TRACKING.findall(scoreboard)
    points = [(re.sub(r":\w+", "", name), float(bits), float(mean)) for name, bits, mean in rows]
    about = "bits per byte (lower is better) against the accuracy of small models in three formal languages"
    return draw(points, 0.1, 1, lambda x: f"{x:.1f}", about)


def draw(
    points: list[tuple[str, float, float]], apart_x: float, room: int, show: Callable[[float], str], about: str
) -> str:
    """A picture of (name, height, place) points. apart_x: of two marks below it, as `show` writes them; room: such distances
    beyond the last point."""
    first = math.floor(min(x for *_, x in points) / apart_x) - 1
    last = math.floor(max(x for *_, x in points) / apart_x) + room
    left, right = apart_x * first, apart_x * last
    low, high = (round(edge(y for _, y, _ in points) + margin, 2) for edge, margin in ((min, -0.024), (max, 0.01)))

    def across(x: float) -> float:
        return round(LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT), 1)

    def up(y: float) -> float:
        return round(HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - BOTTOM - TOP), 1)

    lines = [f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>']
    apart = 0.01 if high - low < 0.1 else 0.05
    for i in range(math.ceil(low / apart - 1e-6), math.floor(high / apart + 1e-6) + 1):
        y = i * apart
        lines.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y)}" y2="{up(y)}"/>')
        lines.append(f'<text class="soft" x="{LEFT - 8}" y="{up(y) + 4}" text-anchor="end">{y:.2f}</text>')
    for x in (apart_x * i for i in range(first, last + 1)):
        lines.append(
            f'<text class="soft" x="{across(x)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{show(x)}</text>'
        )
    lines.append(f'<text class="soft" x="{LEFT}" y="{HEIGHT - 6}">{about}</text>')
    taken = [(across(x), up(y), 14.0) for _, y, x in points]
    for name, height, place in points:
        x, y, label = across(place), up(height), name.partition("@")[0]
        label = re.sub(r":\w+(\*\d)?", "", label) if "+" in label else label
        ours = not name.startswith(BASELINES) or "+" in name
        kind = f'circle class="ours" cx="{x}" cy="{y}" r="6"'
        if not ours:
            kind = f'rect class="baseline" x="{x - 5.5}" y="{y - 5.5}" width="11" height="11"'
        wide = 8.6 * len(label)
        beside = 13 + wide / 2
        # Beside, above or below its point: the first place where no point and no label is.
        places = [
            (x + beside, y),
            (x - beside, y),
            (x, y - 16),
            (x - beside, y + 16),
            (x + beside, y + 16),
            (x, y + 16),
        ]
        inside = [place for place in places if LEFT + wide / 2 <= place[0] <= WIDTH - wide / 2]
        free = [place for place in inside if not any(_meet(*place, wide, *other) for other in taken)]
        middle, height = (free or places)[0]
        taken.append((middle, height, wide))
        lines.append(f'<{kind}/><text x="{middle}" y="{height + 4.5}" text-anchor="middle">{escape(label)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *lines, "</svg>\n"])


def _meet(x: float, y: float, wide: float, x2: float, y2: float, wide2: float) -> bool:
    """Whether two labels, or a label and a point, overlap: their middles and widths."""
    return abs(x - x2) < (wide + wide2) / 2 and abs(y - y2) < 15


if __name__ == "__main__":
    (ROOT / "docs/models.svg").write_text(models((ROOT / "README.md").read_text()))
    (ROOT / "docs/tracking.svg").write_text(tracking((ROOT / "docs/scoreboard.md").read_text()))
