"""Equations in plain text, as `Variant.equation` and the pages of plugins have them: as TeX, and as a drawing of one step."""

from __future__ import annotations

import html
import re
from typing import NamedTuple

GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "Δ": "Delta", "κ": "kappa", "λ": "lambda", "σ": "sigma", "Σ": "sum",
}  # fmt: skip
SPELLED = {"alpha", "beta", "delta", "lambda", "sigma", "sum"}
FUNCTIONS = {"tanh", "silu", "sigmoid", "softmax", "softplus", "exp", "clamp", "diag", "conv", "RMSNorm", "σ"}
SIGNS = {
    " ": r"\, ", "|": r"\vert ", "[": r"\lbrack ", "]": r"\rbrack ", "⊙": r"\odot ", "·": r"\cdot ", "←": r"\leftarrow ",
    "→": r"\to ", "…": r"\dots ", "±": r"\pm ", "ᵀ": r"^{\top}", "²": "^2", "₂": "_2", "√": r"\sqrt ", "∈": r"\in ",
    "×": r"\times ",
}  # fmt: skip
LETTER = r"[^\W\d_](?:\u0302)?"
INDEX = r"(?:\{[^}]*\}|(?:(?![ᵀ²₂])[^\W_])+)"
TOKEN = re.compile(rf"(?:(?![ᵀ²₂]){LETTER})+|[_^]{INDEX}|.", re.DOTALL)


def tex(text: str) -> str:
    """One line of an equation as TeX. Words of two letters and more that are no function stand upright."""
    text = re.sub(r"(\w+)_hat\b", "\\1\u0302", re.sub(r"sqrt\(([^()]*)\)", r"√{\1}", text))
    text = re.sub(r"√(\w+)", r"√{\1}", text)
    return "".join(_token(token) for token in TOKEN.findall(text)).strip()


def _token(token: str) -> str:
    if token[0] in "_^" and len(token) > 1:
        inner = token[1:].strip("{}")
        word = len(inner) > 1 and inner.isalpha() and inner not in SPELLED
        return token[0] + "{" + (rf"\text{{{inner}}}" if word else tex(inner)) + "}"
    hat = "\u0302" in token
    name = token.replace("\u0302", "")
    if name in FUNCTIONS:
        made = r"\sigma" if name == "σ" else rf"\operatorname{{{name}}}"
    elif name in GREEK or name in SPELLED:
        made = rf"\{GREEK.get(name, name)}"
    elif len(name) > 1 and name.isalpha():
        made = rf"\text{{{name}}}"
    else:
        made = SIGNS.get(name, name)
    return rf"\hat{{{made}}}" if hat else f"{made} " if made.startswith("\\") else made


def statements(text: str) -> list[str]:
    """The single statements of an equation, which end at a semicolon, a line, a wide gap, or a comma in front of `name =`."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        named = re.match(r",\s*(\[[^]]*\]|[^\s=,;]+)\s*[=←]", text[i:]) and re.search("[=←]", text[start:i])
        if depth == 0 and (c in ";\n" or named or re.match(",?  ", text[i:])):
            parts.append(text[start:i])
            start = i + 1
    return [p for p in (p.strip(" ,") for p in (*parts, text[start:])) if p]


def display(lines: list[str]) -> str:
    """Statements below each other, aligned at their equality signs, as TeX."""
    rows = []
    for line in lines:
        left, sign, right = re.match(r"(.*?)([=←∈]|$)(.*)", line, flags=re.DOTALL).groups()  # type: ignore[union-attr]
        rows.append(f"{tex(left.strip())} &{tex(sign)} {tex(right.strip())}" if sign else rf"& {tex(line)}")
    return r"\begin{aligned}" + r"\\".join(rows) + r"\end{aligned}"


# a drawing -----------------------------------------------------------------------------------------------------------

SYMBOL = re.compile(rf"((?:(?![ᵀ²₂]){LETTER})+)(_{INDEX})?(\^{INDEX})?('?)(_{INDEX})?")


PAST = "\u208b"  # ends the name of a box that is a state before the step
STREAM = {"x", "x\u0302", "u", "q", "k", "v"}


class Node(NamedTuple):
    """A box of the drawing: the function around it, the boxes that it reads, and whether it reads its own past."""

    name: str
    how: str
    reads: list[str]
    again: bool


def graph(equation: str) -> list[Node]:
    """The boxes of one step: inputs first, then whatever is defined, in the order of the text. Parameters are left out."""
    parts = [re.split(r"\s*([=←])\s*", s, maxsplit=1) for s in statements(equation) if s[0] != "|"]
    defined = [(_names(left), right, "'" in left, sign) for left, sign, right in (p for p in parts if len(p) == 3)]
    own = {name for names, *_ in defined for name in names}
    dashes = any(primed for _, _, primed, _ in defined)  # S' is the new state, not the old one
    nodes: dict[str, Node] = {}
    for names, right, primed, sign in defined:
        reads, again = [], False
        for m in SYMBOL.finditer(right):
            name, index, dash = m[1], m[2] or "", bool(m[4])
            if name in FUNCTIONS or not (name in own or index.startswith("_t") or (name in STREAM and not index)):
                continue
            past = "-1" in index or (dash and not dashes) or (name in names and (sign == "←" or (primed and not dash)))
            if past and name in names:
                again = True
            elif name not in names:
                reads.append(name + PAST * past)
        for name in names:
            nodes[name] = Node(name, _around(right), list(dict.fromkeys(reads)), again)
    inputs = dict.fromkeys(r for n in nodes.values() for r in n.reads if r not in nodes)
    return [*(Node(name, "", [], False) for name in inputs), *nodes.values()]


def _around(right: str) -> str:
    """The function whose argument is all of an expression."""
    first, depth = re.match(r"(\w+)\(", right), 0
    for i, c in enumerate(right if first and first[1] in FUNCTIONS else ""):
        depth += (c == "(") - (c == ")")
        if c == ")" and depth == 0:
            return first[1] if i == len(right) - 1 else ""  # type: ignore[index]
    return ""


def _names(left: str) -> list[str]:
    return list(dict.fromkeys(m[1] for m in SYMBOL.finditer(left) if m[1] not in FUNCTIONS and m[1] != "of"))


def drawing(equation: str, matrix: bool, title: str) -> str:
    """One step as SVG: a box for each quantity of `equation`, arrows from those that it reads, a loop for its own past."""
    nodes = {n.name: n for n in graph(equation)}
    column: dict[str, int] = {}

    def depth(name: str, seen: tuple[str, ...] = ()) -> int:
        if name not in column:
            column[name] = max((depth(r, (*seen, name)) + 1 for r in nodes[name].reads if r not in seen), default=0)
        return column[name]

    for name in nodes:
        depth(name)
    for name, node in nodes.items():  # an input stands in front of its first reader
        if not node.reads and not node.again:
            column[name] = max(0, min((column[n.name] for n in nodes.values() if name in n.reads), default=1) - 1)
    last = max(column.values(), default=0)
    columns = [sorted((n for n in nodes if column[n] == i), key=lambda n: not nodes[n].again) for i in range(last + 1)]
    tall = max(len(c) for c in columns)
    w, h, dx, dy, top = 64, 40, 118, 58, 34
    at = {
        name: (10 + i * dx, top + (tall - len(c)) * dy / 2 + j * dy)
        for i, c in enumerate(columns)
        for j, name in enumerate(c)
    }
    parts = []
    for name, (x, y) in at.items():
        for read in nodes[name].reads:
            a, b = at[read]
            x0, y0, x1, y1 = a + w, b + h / 2, x - 3, y + h / 2
            if column[read] >= column[name]:
                continue
            bend = (x1 - x0) / 2
            parts.append(
                f'<path class="arrow" d="M{x0:g} {y0:g}C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g} {x1:g} {y1:g}"/>'
            )
    for name, (x, y) in at.items():
        node = nodes[name]
        kind = "state" if node.again else "input" if not node.reads else "box"
        if node.again:
            parts.append(f'<path class="arrow again" d="M{x + w - 12:g} {y:g}c14 -30 -54 -30 -40 -3"/>')
            parts.append(f'<text class="past" x="{x + w / 2:g}" y="{y - 25:g}">t − 1</text>')
            if matrix:
                parts.append(
                    f'<rect class="state behind" x="{x + 4:g}" y="{y + 4:g}" width="{w}" height="{h}" rx="6"/>'
                )
        parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w}" height="{h}" rx="{20 if kind == "input" else 6}"/>'
        )
        middle = y + (17 if node.how else 25)
        parts.append(f'<text class="name" x="{x + w / 2:g}" y="{middle:g}">{_label(name)}</text>')
        if node.how:
            parts.append(f'<text class="how" x="{x + w / 2:g}" y="{y + 33:g}">{node.how}</text>')
    width, height = 20 + last * dx + w, top + tall * dy
    return (
        f'<svg class="step" viewBox="0 0 {width} {height:g}" style="max-width:{width}px" role="img" '
        f'aria-label="{html.escape(title)}"><defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z"/></marker></defs>{"".join(parts)}</svg>'
    )


def _label(name: str) -> str:
    if name.endswith(PAST):
        return f'{name[:-1]}<tspan class="index" dy="5">t−1</tspan>'
    return html.escape(name)
