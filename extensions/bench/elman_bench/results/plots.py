"""Pictures for papers and reports: runs side by side. Imports matplotlib when it draws.

Five colours are Okabe and Ito's, beside a darker green, a red and a violet; each has a lighter twin, for dark mode in an SVG.
People with either red-green blindness can tell all of them apart. Every line also has a dash pattern and every point a shape,
so that a grey print reads the same.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from elman_core.extension import ConfigError, replacing, storage_errors

from .collect import collect
from .compare import Comparison, Contender, by_seed, contenders, rank
from .curves import Curve, curve, smooth, thin, visible_range
from .rows import Row
from .runs import ENDED_WELL, Run, without_trials
from .tables import short

COLOURS = ("#0072b2", "#d55e00", "#007a56", "#cc79a7", "#56b4e9", "#e69f00", "#b3001b", "#3f007d")
DARK = ("#4c9be8", "#ff7a33", "#1fa67c", "#e58fc4", "#a5dcff", "#ffc34d", "#ffffff", "#8c6bb1")
PAPER, INK = ("#ffffff", "#14171b"), ("#1c1f24", "#e7e9ec")
"""In light and in dark mode."""
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 1)), (0, (3, 3)))
MARKERS = "os^DvPX*"
ACROSS = {"tokens": "bytes seen", "steps": "optimizer steps", "minutes": "minutes of training"}
CJK = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Source Han Sans SC", "WenQuanYi Zen Hei", "IPAexGothic",
    "NanumGothic", "PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic",
    "Arial Unicode MS",
)  # fmt: skip
"""Fonts for the characters that the first one lacks, where they are installed."""
MOST = len(COLOURS)
"""Most models in one picture of losses."""
_STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.titlesize": 10, "axes.labelsize": 10, "legend.fontsize": 9, "xtick.labelsize": 9,
    "ytick.labelsize": 9, "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.6, "axes.spines.top": False,
    "axes.spines.right": False, "lines.linewidth": 1.6, "legend.frameon": False, "figure.constrained_layout.use": True,
    "savefig.dpi": 200, "svg.hashsalt": "elman",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK[0]),
}  # fmt: skip
_IN_DARK_MODE = "".join(
    f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}\n'
    for light, dark in zip((*COLOURS, PAPER[0], INK[0]), (*DARK, PAPER[1], INK[1]), strict=True)
    for what in ("fill", "stroke")
)
"""Rules of CSS; a viewer without it draws the light picture."""


def plot(runs: Sequence[Run], out: Path, x: str | None = None) -> list[Path]:
    """Draw losses, and speed against quality; write each picture as PNG and as SVG.

    Args:
        out: the folder for the pictures; made if missing.
        x: one of `ACROSS`; by default tokens and minutes.

    Returns:
        The files, each written in one step.

    Raises:
        ConfigError: `x` is unknown, or no run has done a step. StorageError: a file cannot be written.
    """
    if x is not None and x not in ACROSS:
        raise ConfigError(f"--x takes one of {', '.join(ACROSS)}, not {x!r}")
    begun = [run for run in runs if len(run.metrics)]
    if not begun:
        raise ConfigError("there is nothing to draw: no run has done a step")
    with _style():
        return _save(out, _several(begun, [x] if x else ["tokens", "minutes"]))


def for_report(
    members: Sequence[Contender], rows: Sequence[Row], comparisons: Sequence[Comparison]
) -> dict[str, bytes]:
    """The pictures of one protocol as SVG, by their captions.

    Args:
        members: the models, best first. rows: of the table. comparisons: of the best model with each other model.
    """
    first = f", of the first {MOST} of {len(members)} models" if len(members) > MOST else ""
    with _style():
        found = {
            f"Training loss (lines) and held-out bits per byte (marks) by {ACROSS[x]}{first}.": _losses(
                members[:MOST], x
            )
            for x in ("tokens", "minutes")
            if members
        }
        if (speed := _speed(members, rows)) is not None:
            found["Speed against quality: further down and right is better."] = speed
        if (differences := _differences(comparisons)) is not None:
            best = comparisons[0].first.name
            found[f"Paired differences with 95 % intervals; left of zero, {best} is better."] = differences
        return {caption: _svg(figure) for caption, figure in found.items()}


def by_length(
    lines: Mapping[str, Mapping[int, Sequence[float]]], title: str, xlabel: str, ylabel: str, base: float
) -> bytes:
    """A picture as SVG: for each name, values by a length, their mean with the range that they span.

    Args:
        base: where a dotted line stands, such as chance.
    """
    with _style():
        figure, axes = _figure(6.4, 4.2)
        for i, (name, values) in enumerate(lines.items()):
            style = {"color": COLOURS[i % MOST], "linestyle": DASHES[(i + i // MOST) % len(DASHES)]}
            label = _label(name, max(map(len, values.values())))
            axes.plot([*values], [np.mean(v) for v in values.values()], label=label, marker="o", markersize=3, **style)
            low, high = [min(v) for v in values.values()], [max(v) for v in values.values()]
            axes.fill_between([*values], low, high, color=style["color"], alpha=0.15, linewidth=0)
        axes.axhline(base, color="0.5", linestyle=":", linewidth=1)
        axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, 1.03))
        axes.set_title(title, fontsize=8, loc="left", wrap=True)
        figure.legend(loc="outside right upper", fontsize=8)
        return _svg(figure)


def _plain(name: str) -> str:
    """A name as text for matplotlib, which reads mathematics between two `$` and leaves `_…` out of legends."""
    return (f" {name}" if name.startswith("_") else name).replace("$", r"\$")


def _label(name: str, seeds: int) -> str:
    return _plain(f"{name} ({seeds} seeds)" if seeds > 1 else name)


def _svg(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    rules = f"\n@media screen and (prefers-color-scheme: dark) {{\n{_IN_DARK_MODE}}}</style>"
    return out.getvalue().replace(b"</style>", rules.encode(), 1)


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib
    from matplotlib.font_manager import fontManager

    # It warns of a font that is not there, and of each character that no font has.
    fonts = {font.name for font in fontManager.ttflist}
    family = [*matplotlib.rcParams["font.family"], *(name for name in CJK if name in fonts)]
    with matplotlib.rc_context({**_STYLE, "font.family": family}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from font", UserWarning)
        yield


def _save(out: Path, figures: Mapping[str, Any]) -> list[Path]:
    written = []
    with storage_errors(f"cannot write pictures into {out}"):
        out.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            for kind in ("png", "svg"):
                path = out / f"{name}.{kind}"
                with replacing(path) as file:
                    if kind == "svg":
                        file.write(_svg(figure))
                    else:
                        figure.savefig(file, format=kind)
                written.append(path)
    return written


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes. Without pyplot there is no window and nothing to close."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


_KEYS = {"tokens": "tokens", "steps": "step", "minutes": "minutes"}


def _several(runs: Sequence[Run], kinds: Sequence[str]) -> dict[str, Any]:
    """Loss by each kind of x axis, and speed against quality."""
    runs = without_trials(runs)
    members = sorted(contenders(runs), key=rank)
    if not members:
        raise ConfigError("there is nothing to draw: no run with a readable manifest has done a step")
    found = {f"loss-{x}": _losses(members[:MOST], x) for x in kinds}
    rows = [row for group in collect(runs, by_model=True, everything=False).groups for row in group.rows]
    speed = _speed(members, rows)
    return found | ({"speed-quality": speed} if speed is not None else {})


def _losses(members: Sequence[Contender], x: str) -> Any:
    """A line a model: the mean of its seeds, with the range that they span."""
    figure, axes = _figure(6.4, 4.2)
    shown = []
    for i, member in enumerate(members):
        curves = [curve(run) for run in _drawn(member)]
        across, low, mean, high = _over_seeds(curves, _KEYS[x])
        style = {"color": COLOURS[i], "linestyle": DASHES[i]}
        axes.plot(*thin(across, mean, 800), label=_label(member.name, len(curves)), zorder=4, **style)
        if len(curves) > 1:
            xs, bottom = thin(across, low, 800)
            axes.fill_between(
                xs, bottom, thin(across, high, 800)[1], color=COLOURS[i], alpha=0.15, linewidth=0, zorder=2
            )
        for found in curves:
            axes.plot(
                found.heldout[_KEYS[x]][-1:], found.heldout["bits"][-1:], MARKERS[i], color=COLOURS[i], markersize=5,
                markeredgecolor="white", markeredgewidth=0.6, zorder=6, clip_on=False,
            )  # fmt: skip
            shown.append(found.heldout["bits"][-1:])
        shown.append(mean)
    visible = visible_range(shown)
    if visible:
        axes.set_ylim(*visible)
    axes.set(xlabel=ACROSS[x], ylabel="bits per byte", title=f"loss by {ACROSS[x]}")
    axes.set_xlim(left=0)
    if x != "minutes":
        axes.xaxis.set_major_formatter(lambda value, _: short(value) if value else "0")
    bands = " · bands: range of the seeds" if any(len(_drawn(member)) > 1 for member in members) else ""
    title = f"lines: training, smoothed{bands}\nmarks: held out"
    axes.legend(loc="upper right", title=title, title_fontsize=8, alignment="left")
    return figure


def _drawn(member: Contender) -> list[Run]:
    """One run of each seed, as in tables: those that ended well, if any did."""
    runs = [*by_seed(member).values()]
    return [run for run in runs if run.status in ENDED_WELL] or runs


def _over_seeds(curves: Sequence[Curve], key: str) -> tuple[Any, Any, Any, Any]:
    """(x, lowest, mean, highest) of the smoothed losses, at the steps that all seeds have."""
    common = curves[0].steps["step"]
    for other in curves[1:]:
        common = np.intersect1d(common, other.steps["step"])
    rows = [np.isin(c.steps["step"], common) for c in curves]
    bits = np.array([smooth(c.steps["bits"])[r] for c, r in zip(curves, rows, strict=True)])
    across = np.mean([c.steps[key][r] for c, r in zip(curves, rows, strict=True)], axis=0)
    return across, bits.min(axis=0), bits.mean(axis=0), bits.max(axis=0)


def _speed(members: Sequence[Contender], rows: Sequence[Row]) -> Any:
    """Held-out bits per byte against tok/s; None if fewer than two models have both."""
    of_run = {run.path: row for row in rows for run in row.runs}
    points = []
    for i, member in enumerate(members):
        row = of_run.get(member.runs[0].path)
        if row is not None and row.status == "ok" and {"tok_s", "bits_per_byte"} <= set(row.figures):
            points.append((i, member.name, row.figures["tok_s"], row.figures["bits_per_byte"]))
    if len(points) < 2:
        return None
    figure, axes = _figure(6.4, 4.2)
    for i, name, speed, bits in points:
        axes.errorbar(
            speed.value, bits.value, yerr=bits.spread, xerr=speed.spread, fmt=MARKERS[(i + i // MOST) % MOST],
            color=COLOURS[i % MOST], markersize=7, capsize=2, elinewidth=0.9, label=_plain(name), zorder=4,
        )  # fmt: skip
    axes.set(xscale="log", xlabel="bytes per second in training (tok/s)", ylabel="bits per byte, held out")
    axes.margins(0.18, 0.15)
    spread = "\nbars: standard deviation over seeds" if any(bits.spread is not None for *_, bits in points) else ""
    figure.legend(loc="outside right upper", fontsize=9 if len(points) <= 16 else 6)
    axes.set_title(f"speed and quality: further down and right is better{spread}", fontsize=9, loc="left")
    return figure


def _differences(comparisons: Sequence[Comparison]) -> Any:
    """The interval of each comparison beside zero; None if no comparison has one."""
    known = [(c.second.name, i) for c in comparisons if (i := c.decisive) is not None]
    if not known:
        return None
    figure, axes = _figure(6.4, 1.1 + 0.3 * len(known))
    means, places = [i.mean for _, i in known], range(len(known))
    reach = [[i.mean - i.low for _, i in known], [i.high - i.mean for _, i in known]]
    axes.errorbar(means, places, xerr=reach, fmt="o", color=COLOURS[0], capsize=4)
    axes.axvline(0, color="0.4", linewidth=1)
    axes.set_yticks(places, [_plain(name) for name, _ in known])
    axes.set_ylim(len(known) - 0.5, -0.5)
    axes.set_title("paired differences with 95 % intervals", fontsize=9, loc="left")
    axes.set_xlabel(_plain(f"bits per byte, {comparisons[0].first.name} minus the other"))
    return figure
