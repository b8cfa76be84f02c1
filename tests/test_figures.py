"""Pages are written by people, their numbers by runs: every number of a marked table is in the result file that the mark names.

A mark is a comment before a table. Its first lines (or parts of a line, with `; ` between) name records, `[ALIAS:] FILE
PATH[key=value, …]`, FILE in benchmarks/results; the other lines are what a row of the table looks like, with fields in braces:

    {key}       a number: the record's, rounded as it is shown; a key of a record within is `a.b`, another source's `ALIAS.a`
    {a/b}       a quotient of two numbers, or of a number and a unit: K, M, GiB
    {mean key}  over all records (of the first source, or of ALIAS for {mean ALIAS.key}) that the row names; also {min …},
                {max …}, and {n} or {n ALIAS}, how many they are
    {=key}      a name: only records with this value count, of all sources that have the key, or of one: {=ALIAS.key}
    {*}         words, and digits only inside backquotes

– stands for a number that no record has. Every row needs one line and one record (of each source) for which all of this holds.
"""

import itertools
import json
import re
import runpy
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
UNITS = {"K": 1e3, "M": 1e6, "GiB": 2**30}
OVER = {"mean": statistics.fmean, "min": min, "max": max}
MARK = re.compile(r"<!-- figures\s+([^\n][^>]*?)\s*-->\n+((?:\|[^\n]*\n)+)")
PAGES = ("*.md", "docs/**/*.md", "[cpe]*s/README.md", "[cpe]*s/*/README.md")
MARKED = [
    (page.relative_to(ROOT).as_posix(), number, *found.groups())
    for page in sorted(
        p for where in ("*.md", "docs/**/*.md", "[cpe]*s/README.md", "[cpe]*s/*/README.md") for p in ROOT.glob(where)
    )
    for number, found in enumerate(MARK.finditer(page.read_text()))
]
ALL_MARKED = ("README.md", "docs/results.md", "docs/speed.md")
"""Pages that have no other table with numbers."""

Records = list[dict[str, Any]]


def at(record: Any, path: str) -> Any:
    """The value at a.b.c, None where there is none."""
    for name in path.split("."):
        record = (
            record[int(name)] if isinstance(record, list) else record.get(name) if isinstance(record, dict) else None
        )
    return record


def records(line: str) -> tuple[str, Records]:
    """What a first line of a mark names: (alias, records). A record without a commit has the file's."""
    match = re.fullmatch(r"(?:(\w+): )?(\S+\.json) ([\w.]+)(?:\[(.*)\])?", line)
    assert match, f"no records: {line}"
    alias, file, path, only = match.groups()
    data = json.loads((RESULTS / file).read_text())
    found = at(data, path)
    if isinstance(found, dict):
        found = [{"key": key, **value} for key, value in found.items()]
    assert found, f"nothing is there: {line}"
    for record in found:
        if isinstance(record, dict):
            record["commit"] = str(record.get("commit", data.get("commit")))[:7]
    wanted = [pair.split("=", 1) for pair in only.split(", ")] if only else []
    return alias or "", [r for r in found if all(str(at(r, key)) == value for key, value in wanted)]


def agree(field: str, shown: str, chosen: dict[str, Any], first: str, named: dict[str, Records]) -> bool:
    """Whether a number of a row is that of the chosen records, or of every record (of one source) that the row names."""

    def value(path: str) -> Any:
        alias, _, rest = path.partition(".")
        return at(chosen[alias], rest) if alias in chosen and rest else at(chosen[first], path)

    over, _, path = field.partition(" ")
    if over == "n":
        figure: Any = len(named[path or first])
    elif over in OVER:
        path, _, unit = path.partition("/")
        alias, _, rest = path.partition(".")
        every = [at(record, rest) for record in named[alias]] if alias in named else [at(r, path) for r in named[first]]
        figure = OVER[over](every) / UNITS.get(unit, 1) if every else None
    else:
        top, _, bottom = field.partition("/")
        figure, by = value(top), UNITS.get(bottom) or (value(bottom) if bottom else 1)
        figure = figure / by if isinstance(figure, int | float) and isinstance(by, int | float) else None
    if shown == "–" or not isinstance(figure, int | float):
        return shown == "–" and not isinstance(figure, int | float)
    decimals = len(shown.partition(".")[2])
    return abs(float(shown.replace(",", "")) - figure) <= 0.5 * 10**-decimals * (1 + 1e-6)


def found(row: str, line: str, sources: dict[str, Records]) -> bool:
    """Whether a row looks like a line of the mark, and records have its numbers."""
    parts = re.split(r"\{(.*?)\}", line)
    words = {"*": r"(?:[^\d|`]|`[^`|]*`)*?"}
    pattern = "".join(
        re.escape(part)
        if i % 2 == 0
        else words.get(part) or (r"([^|]*?)" if part[0] == "=" else r"([+-]?\d[\d,]*(?:\.\d+)?|–)")
        for i, part in enumerate(parts)
    )
    match = re.fullmatch(pattern, row.strip())
    if not match:
        return False
    fields = list(zip((p for p in parts[1::2] if p != "*"), match.groups(), strict=True))
    names = [(field[1:], shown) for field, shown in fields if field[0] == "="]
    numbers = [(field, shown) for field, shown in fields if field[0] != "="]
    named: dict[str, Records] = {}
    for alias, some in sources.items():
        here = [(key.removeprefix(f"{alias}."), shown) for key, shown in names]
        known = [(key, shown) for key, shown in here if any(at(record, key) is not None for record in some)]
        named[alias] = [r for r in some if all(str(at(r, key)) == shown for key, shown in known)]
    first = next(iter(named))
    return any(named.values()) and any(
        all(agree(field, shown, dict(zip(named, chosen, strict=True)), first, named) for field, shown in numbers)
        for chosen in itertools.product(*(some or [{}] for some in named.values()))
    )


@pytest.mark.parametrize(("page", "number", "mark", "table"), MARKED, ids=[f"{page}-{n}" for page, n, *_ in MARKED])
def test_every_number_of_a_marked_table_is_in_the_result_file(page: str, number: int, mark: str, table: str) -> None:
    lines = mark.splitlines()
    sources = dict(records(one) for line in lines if not line.startswith("|") for one in line.split("; "))
    for row in table.splitlines()[2:]:
        assert any(found(row, line, sources) for line in lines if line.startswith("|")), f"{page}: {row}"


@pytest.mark.parametrize("page", ALL_MARKED)
def test_no_table_of_numbers_is_without_a_mark(page: str) -> None:
    rest = MARK.sub("", (ROOT / page).read_text())
    assert not re.findall(r"^\|.*\| [\d.,]+ .*\|$", rest, re.MULTILINE)


@pytest.mark.parametrize(("page", "picture"), [("README.md", "models"), ("docs/scoreboard.md", "tracking")])
def test_a_picture_is_that_of_its_table(page: str, picture: str) -> None:
    draw = runpy.run_path(str(ROOT / "docs/picture.py"))[picture]
    assert (ROOT / f"docs/{picture}.svg").read_text() == draw((ROOT / page).read_text()), "type: python docs/picture.py"
