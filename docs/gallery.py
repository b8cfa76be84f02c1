"""The gallery: a page for each variant, made from its `Variant`, the page that people wrote of it, and the results."""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from equations import display, drawing, statements
from options import table

from elman_core.registry import config_to_dict, plugins, resolve
from elman_core.registry.variant import Variant
from elman_core.size import count

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
WIDTH = 512
FAMILIES = ("Vector states", "Matrix states", "Attention")
MUON, ADAMW = "100 MB, Muon", "100 MB, AdamW"
COLUMNS = {
    MUON: "held out, 100 MB, Muon", ADAMW: "held out, 100 MB, AdamW", "training": "training step", "memory": "memory",
    "decoding": "decoding", "parity": "parity", "s3": "products in S3",
}  # fmt: skip
CURVE = "100mb_h200_loss-tokens.svg"
FILES = [*(f"benchmarks/results/{f}.json" for f in ("e88_gdn_h200", "100mb_h200", "scoreboard_h200", "variants_h200",
         "decoding_h200", "tasks_cpu")), f"benchmarks/results/{CURVE}"]  # fmt: skip
RELATIVE = "../source/benchmarks/results"


@functools.cache
def variants() -> dict[str, tuple[Variant, Path]]:
    """Every variant of this repository with its page, by name."""
    found = {}
    for name, installed in plugins().installed.items():
        package = installed.package.removeprefix("elman-").replace("-", "_")
        pages = [
            ROOT / f"plugins/{package}/README.md",
            ROOT / f"docs/variants/{name}.md",
            ROOT / "docs/variants/gru-lstm.md",
        ]
        if package == "baselines" or pages[0].is_file():  # others are not of this repository
            found[name] = (installed.variant, next(p for p in pages if p.is_file()))
    return found


def variants_of(plugin: str) -> list[str]:
    """The names of the variants whose page is that of a plugin."""
    return [name for name, (_, page) in variants().items() if page == ROOT / f"plugins/{plugin}/README.md"]


@functools.cache
def typeset(equations: tuple[str, ...]) -> dict[str, str]:
    """HTML of each TeX equation, by KaTeX; one that it refuses stops the build."""
    script = "const k=require('katex'),a=JSON.parse(require('fs').readFileSync(0));console.log(JSON.stringify(a.map(t=>"
    script += "k.renderToString(t,{displayMode:true,strict:'error',throwOnError:true}))))"
    done = subprocess.run(
        ["node", "-e", script],
        input=json.dumps(equations),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT / ".site",
    )
    return dict(zip(equations, json.loads(done.stdout), strict=True))


def configs(variant: Variant) -> dict[str, Any]:
    """The configs whose equations a page shows: the defaults, and the recommended preset, by name."""
    named = {variant.name: variant.make_config()}
    if variant.recommended:
        named[f"{variant.name}:{variant.recommended}"] = variant.make_config(preset=variant.recommended)
    return named


def state(variant: Variant) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the state of one text in a layer at `WIDTH`, with the recommended preset; -1 grows with the text."""
    config = list(configs(variant).values())[-1]
    specs = [variant.branch(i).state_spec(WIDTH, config) for i in range(variant.branches)]
    return [(name, shape) for spec in specs for name, (shape, _) in spec.items()]


def family(variant: Variant) -> str:
    """Attention; or matrix states, if a state has three dimensions; or vector states."""
    if variant.branch(0).state_growth == "per_token":
        return FAMILIES[2]
    return FAMILIES[any(len(shape) == 3 for _, shape in state(variant))]


def numbers(variant: Variant) -> int | None:
    """Numbers in the state of a layer; None if it grows."""
    shapes = [shape for _, shape in state(variant)]
    return None if any(-1 in shape for shape in shapes) else sum(math.prod(shape) for shape in shapes)


# results -------------------------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A measured figure: which quantity, of which model, the number, how it is written, the setting, the result file."""

    what: str
    model: str
    value: float
    text: str
    setting: str
    file: str


def read(file: str) -> Any:
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))


@functools.cache
def figures() -> dict[str, list[Figure]]:
    """Every figure that the gallery shows, by variant; runs that differ in nothing but their seed are one, their mean."""
    found: list[Figure] = []
    for (model, optimizer, lr), runs in _trained().items():
        bits, seeds, gpus, files = zip(*runs, strict=True)
        where = " and ".join(sorted({gpu.split()[1] for gpu in gpus}))
        setting = f"lr {lr:g}, {len(set(seeds))} seed{'s' * (len(set(seeds)) > 1)}, {where}"
        mean = statistics.fmean(bits)
        found.append(Figure(f"100 MB, {optimizer}", model, mean, f"{mean:.3f} bits/byte", setting, files[0]))
    for row in read("variants_h200.json")["rows"].values():
        if "tok_s" in row:
            setting = f"{row['parameters'] / 1e6:.1f}M parameters, 32 texts of 512, {row['peak_gib']:.1f} GiB, H200"
            text = f"{row['tok_s']:,} tok/s"
            found.append(Figure("training", row["model"], row["tok_s"], text, setting, "variants_h200.json"))
            found.append(Figure("memory", row["model"], row["peak_gib"], "", "", "variants_h200.json"))
    for row in read("decoding_h200.json")["rows"]:
        if row["samples"] == 1 and row["how"] == "graph":
            setting = f"one text, {row['parameters'] / 1e6:.1f}M parameters, H200"
            text = f"{row['bytes_s']:,} bytes/s"
            found.append(Figure("decoding", row["model"], row["bytes_s"], text, setting, "decoding_h200.json"))
    tracked = defaultdict(list)
    for run in read("tasks_cpu.json")["runs"]:
        if "+" not in run["model"]:
            tracked[run["name"], run["model"]].append(run["tests"]["320"]["end"])
    for (task, model), ends in tracked.items():
        mean, setting = (
            statistics.fmean(ends),
            f"accuracy at 320 inputs, trained at 40, {len(ends)} seed{'s' * (len(ends) > 1)}",
        )
        found.append(Figure(task, model, mean, f"{mean:.3f}", setting, "tasks_cpu.json"))
    by = defaultdict(list)
    for figure in found:
        by[re.match(r"\w+", figure.model)[0]].append(figure)  # type: ignore[index]
    return by


def _trained() -> dict[tuple[str, str, float], list[tuple[float, int, str, str]]]:
    """Held-out bits per byte after 100 MB at 26 to 27M parameters, seed, GPU and result file, by model, optimizer and rate."""
    found = defaultdict(list)
    for row in read("e88_gdn_h200.json")["rows"]:
        if row["bytes_seen"] // 10**6 == 100 and 26e6 < row["parameters"] < 27.5e6:
            optimizer = {"muon": "Muon", "adamw": "AdamW"}[row["options"].get("optimizer", "adamw")]
            run = row["bits_per_byte"], row["seed"], row["gpu"], "e88_gdn_h200.json"
            found[row["name"], optimizer, row["lr"]].append(run)
    for row in read("100mb_h200.json")["models"]:
        bits, gpu = row["result"]["bits_per_byte"], row["hardware"]["gpu"]
        found[row["what"], "AdamW", row["lr"]].append((bits, row["seed"], gpu, "100mb_h200.json"))
    board = read("scoreboard_h200.json")
    for run in board["runs"]:
        if not run["trial"]:
            one = run["bits_per_byte"], run["seed"], board["gpu"], "scoreboard_h200.json"
            found[run["model"], "Muon", run["lr"]].append(one)
    return found


def best(name: str, what: str, least: bool) -> Figure | None:
    """The best figure of a quantity among all models of a variant; None if it was not measured."""
    ours = [f for f in figures().get(name, ()) if f.what == what]
    return (min if least else max)(ours, key=lambda f: f.value) if ours else None


# pages ---------------------------------------------------------------------------------------------------------------


def navigation() -> list[Any]:
    """The gallery's part of the navigation: the overview, then the variants of each family."""
    nav: list[Any] = ["variants/README.md"]
    for title in FAMILIES:
        nav.append(
            {title: [f"variants/{n}.md" for n, (v, _) in sorted(variants().items(), key=_order) if family(v) == title]}
        )
    return nav


def _order(item: tuple[str, Any]) -> tuple[str, int, str]:
    letters, number = re.match(r"(\D*)(\d*)", item[0]).groups()  # type: ignore[union-attr]
    return (letters if number else f"~{item[0]}", int(number or 0), item[0])


def pages() -> dict[str, tuple[str, str]]:
    """Every page of the gallery: where its links start from, and its text, by its place."""
    equations = {n: [statements(v.equation_of(c)) for c in configs(v).values()] for n, (v, _) in variants().items()}
    made = {n: [display(lines) for lines in each] for n, each in equations.items()}
    drawn = typeset(tuple(tex for each in made.values() for tex in each))
    found = {}
    for name, (variant, page) in variants().items():
        text = page.read_text(encoding="utf-8")
        found[f"variants/{name}.md"] = (
            str(page.relative_to(ROOT)),
            _page(variant, text, [drawn[t] for t in made[name]]),
        )
    text = (ROOT / "docs/variants/README.md").read_text(encoding="utf-8")
    found["variants/README.md"] = ("docs/variants/README.md", text.replace("<!-- overview -->", _overview()))
    return found


def _page(variant: Variant, text: str, equations: list[str]) -> str:
    named = configs(variant)
    lead, rest = _people(text)
    head = [f"# {variant.name}", f'<p class="lead">{variant.summary}</p>', lead]
    for label, equation in zip(named, equations, strict=True):
        head.append(f'<div class="equation"><span class="label">{label}</span>{equation}</div>')
    matrix = family(variant) == FAMILIES[1]
    picture = drawing(variant.equation_of(list(named.values())[-1]), matrix, f"One step of {variant.name}")
    head.append(f'<figure class="step">{picture}</figure>')
    parts = [*head, _facts(variant), rest]
    if f"<!-- options {variant.name} -->" not in text:
        parts += ["## Options { data-search-exclude }", table(variant.name)]
    parts += [_presets(variant), _measured(variant), _published(variant)]
    if any(f.file == "100mb_h200.json" for f in figures().get(variant.name, ())):
        parts.append(f"## Curve\n\n![Bits per byte against bytes seen, AdamW]({RELATIVE}/{CURVE})")
    return "\n\n".join(filter(None, parts))


def _people(text: str) -> tuple[str, str]:
    """What people wrote: what stands above the equation, and what stands below it."""
    text = re.sub(r"^# .*\n+", "", text, count=1)
    blocks = text.split("\n\n")
    at = next((i for i, b in enumerate(blocks) if b.startswith("    ")), 1)
    lead = "\n\n".join(blocks[:at])
    return lead, "\n\n".join(blocks[at + (at < len(blocks) and blocks[at].startswith("    ")) :])


def _facts(variant: Variant) -> str:
    config = list(configs(variant).values())[-1]
    shapes = ", ".join(f"{n} {' × '.join('T' if d < 0 else str(d) for d in shape)}" for n, shape in state(variant))
    total, layer = numbers(variant), layer_parameters(variant, config)
    where = {t for kernel in variant.kernels for t in kernel.targets} - {"host"}
    rows = {
        f"State of one text, a layer at width {WIDTH}": f"{shapes}" + (f" = {total:,} numbers" if total else ""),
        f"Parameters of a layer at width {WIDTH}": f"{layer:,}",
        "Kernels": ", ".join({"cuda": "CUDA", "cpu": "CPU"}[t] for t in sorted(where, reverse=True)),
        "Faster with": ", ".join(f"<code>{how}</code>" for how in variant.accelerated_by.values()),
    }
    cells = "".join(f"<dt>{what}</dt><dd>{value}</dd>" for what, value in rows.items() if value)
    return f'<dl class="facts">{cells}</dl>'


def layer_parameters(variant: Variant, config: Any) -> int:
    layers = [resolve(variant.name, config_to_dict(config))]
    return count(layers, WIDTH, 2) - count(layers, WIDTH, 1)


def _presets(variant: Variant) -> str:
    rows = ["| preset | differs from the defaults in |", "|---|---|"]
    for preset, values in variant.presets.items():
        mark = ' <span class="mark">recommended</span>' if preset == variant.recommended else ""
        rows.append(f"| `{variant.name}:{preset}`{mark} | {', '.join(f'`{k}={v}`' for k, v in values.items())} |")
    if len(rows) <= 14:
        return "\n".join(("## Presets { data-search-exclude }\n", *rows)) if variant.presets else ""
    folded = "\n".join(f"    {row}" for row in rows)
    return f'## Presets {{ data-search-exclude }}\n\n??? note "{len(rows) - 2} presets"\n\n{folded}'


def _measured(variant: Variant) -> str:
    shown = [f for f in figures().get(variant.name, ()) if f.text]
    if not shown:
        return ""
    order = {what: i for i, what in enumerate(COLUMNS)}
    shown.sort(key=lambda f: (order[f.what], f.value if f.what in (MUON, ADAMW) else -f.value))
    rows = [
        "## Measured { data-search-exclude }",
        "",
        "| quantity | model | value | setting | source |",
        "|---|---|---|---|---|",
    ]
    rows += [
        f"| {COLUMNS[f.what]} | `{f.model}` | {f.text} | {f.setting} | [{f.file}]({RELATIVE}/{f.file}) |" for f in shown
    ]
    return "\n".join(rows)


PUBLISHED = """## Published { data-search-exclude }

What the research line on these variants reported before this project, on its own text and an RTX 6000 Ada. Minutes of training
are that GPU's, and losses that text's: do not compare them with the figures above.

| model | parameters | figures | setting |
|---|---|---|---|
"""


def _published(variant: Variant) -> str:
    rows = [f"| `{p.model}` | {p.parameters or ''} | {p.figures} | {p.note} |" for p in variant.published]
    return PUBLISHED + "\n".join(rows) if rows else ""


def _overview() -> str:
    """The table of all variants, with a figure where there is one."""
    heads = ["variant", "family", f"state, numbers a layer at {WIDTH}", "bits/byte, Muon", "bits/byte, AdamW",
             "training, tok/s", "GiB", "decoding, bytes/s", "parity", "S3"]  # fmt: skip
    rows = []
    for name, (variant, _) in sorted(variants().items(), key=_order):
        total = numbers(variant)
        cells = [
            f'<a href="{name}.html"><code>{name}</code></a><br><small>{variant.summary}</small>',
            family(variant).split()[0],
        ]
        cells.append(f"{total:,}" if total else "grows")
        for what in COLUMNS:
            figure = best(name, what, least=what in (MUON, ADAMW, "memory"))
            if what in ("training", "memory") and figure:  # of one model, the variant's first
                figure = next(f for f in figures()[name] if f.what == what)
            digits = {"training": ",.0f", "memory": ".1f", "decoding": ",.0f"}.get(what, ".3f")
            cells.append(f'<span title="{figure.model}">{figure.value:{digits}}</span>' if figure else "")
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f'<th scope="col">{h}</th>' for h in heads)
    body = "".join(rows)
    return (
        f'<div class="wide"><table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
