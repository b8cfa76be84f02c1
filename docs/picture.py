"""Draw docs/models.svg from README's table of models: python docs/picture.py

Quality against speed, with a labelled point for each model. Circles are variants of this project, squares are baselines. The
two colours are from Okabe and Ito's palette, lighter in dark mode.
"""

from __future__ import annotations

import math
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `([^`]+)` \|.*\| [\d.]+ \| ([\d.]+) \| \d+ \| ([\d,]+)K.*$", re.MULTILINE)
BASELINES = ("transformer", "gdn", "mamba2", "lstm", "gru")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 340, 64, 44, 16, 30
STYLE = """text { font: 13px system-ui, sans-serif; fill: #1c1f24 } .paper { fill: #ffffff } .rule { stroke: #d9dde3 }
.soft { fill: #5b6370; font-size: 12px } .ours { fill: #0072b2 } .baseline { fill: #d55e00 }
@media (prefers-color-scheme: dark) { text { fill: #e7e9ec } .paper { fill: #14171b } .rule { stroke: #343a43 }
.soft { fill: #a0a8b4 } .ours { fill: #56b4e9 } .baseline { fill: #e69f00 } }"""


def draw(readme: str) -> str:
    """The picture of the table in README's text."""
    points = [(name, float(bits), 1e3 * int(speed.replace(",", ""))) for name, bits, speed in ROW.findall(readme)]
    left, right = 1e5 * (min(x for *_, x in points) // 1e5 - 1), 1e5 * (max(x for *_, x in points) // 1e5 + 2)
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
    for x in range(int(left), int(right) + 1, 100_000):
        lines.append(
            f'<text class="soft" x="{across(x)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x // 1000}K</text>'
        )
    about = "bits per byte (lower is better) against bytes per second in training; squares are baselines"
    lines.append(f'<text class="soft" x="{LEFT}" y="{HEIGHT - 6}">{about}</text>')
    taken = [(across(speed), up(bits), 14.0) for _, bits, speed in points]
    for name, bits, speed in points:
        x, y, label = across(speed), up(bits), name.partition("@")[0]
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
        free = [place for place in places if not any(_meet(*place, wide, *other) for other in taken)]
        middle, height = (free or places)[0]
        taken.append((middle, height, wide))
        lines.append(f'<{kind}/><text x="{middle}" y="{height + 4.5}" text-anchor="middle">{escape(label)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *lines, "</svg>\n"])


def _meet(x: float, y: float, wide: float, x2: float, y2: float, wide2: float) -> bool:
    """Whether two labels, or a label and a point, overlap: their middles and widths."""
    return abs(x - x2) < (wide + wide2) / 2 and abs(y - y2) < 15


if __name__ == "__main__":
    (ROOT / "docs/models.svg").write_text(draw((ROOT / "README.md").read_text()))
