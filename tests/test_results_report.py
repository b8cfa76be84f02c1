"""The report is one file that needs nothing else, parses, escapes what it is given, and holds what a reader asks for."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from results_helpers import example_suite, write_run, write_suite

from elman_core.cli import main
from elman_core.experiments.charts import Axis, Line, axis, intervals, line_chart, scatter, tick_text
from elman_core.experiments.report import write_report

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that every element is closed in order; keeps tags, attributes and the text outside of style and script."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data + " "


def parsed(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    return page


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return write_report(example_suite(tmp_path_factory.mktemp("suite") / "toys", seeds=(1, 2), steps=240))


def test_it_parses_and_every_picture_is_well_formed(report):
    page = parsed(report)
    assert report.name == "report.html"
    pictures = re.findall(r"<svg.*?</svg>", report.read_text(), flags=re.DOTALL)
    assert len(pictures) == 4
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.get("aria-label")
        assert not [
            e for e in root.iter() for v in e.attrib.values() if "nan" in v.lower() or "inf" in v.lower().split()
        ]
    idents = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(idents) == len(set(idents))


def test_it_refers_to_nothing_outside(report):
    text = report.read_text()
    page = parsed(report)
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "img", "base", "form"), tag
        assert not {"src", "href", "action", "srcset", "data", "xlink:href", "style"} & set(attrs), (tag, attrs)
    assert "://" not in text
    assert not re.search(r"url\((?!#)|@import|@font-face|import\s*\(|fetch\(|XMLHttp", text)
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_what_it_is_given_is_escaped(report, tmp_path):
    text = report.read_text()
    assert "toy <c>" not in text
    assert "toy &lt;c&gt;" in text
    assert "loss nan &amp; &lt;worse&gt;" in text
    evil = "</script><script>alert(1)</script>\"'&<svg onload=x>"
    jobs = [
        {"id": f"j{i}", "model": evil + str(i), "sets": (f"model.hidden_size={64 + i}",), "level": 1.3 + i / 10, "error": evil,
         "status": "ok" if i < 2 else "crashed", "hardware": {"gpu": evil}, "git_commit": evil, "backends": [evil],
         "state": {"attempts": [{"cause": evil, "log": evil}]}}
        for i in range(3)
    ]  # fmt: skip
    page = parsed(write_report(write_suite(tmp_path / "evil", jobs, name=evil)))
    scripts = [tag for tag, _ in page.tags if tag == "script"]
    assert len(scripts) == 1
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert evil in page.text


def test_it_holds_what_a_reader_asks_for(report):
    text = " ".join(parsed(report).text.split())
    for wanted in (
        "toys", "24 runs:", "1 diverged", "1 timeout", "1 waiting", "1 contended", "created 2026-11-21",
        "toy-a is better than toy-b by", "95 % interval", "lr 1e-3 of 3e-4, 1e-3, 3e-3", "chosen", "Tuned settings",
        "Runs that did not end well", "training diverged in step 60", "x.1.log", "torch", "2.13.0", "ToyMixer: torch",
        "train.weight_decay", "held out: 1,048,576 bytes", "stationary block bootstrap", "Speed against quality",
    ):  # fmt: skip
        assert wanted in text, wanted


def test_tables_sort_and_numbers_carry_their_value(report):
    page = parsed(report)
    assert [attrs.get("class") for tag, attrs in page.tags if tag == "table"].count("sortable") == 4
    values = [attrs["data-v"] for tag, attrs in page.tags if tag == "td" and "data-v" in attrs]
    assert "49600000.0" in values
    assert all(re.fullmatch(r"-?[\d.e+-]*", v) for v in values)


@pytest.mark.parametrize("what", ["run", "folder", "waiting", "damaged"])
def test_any_folder_with_runs_has_a_report(tmp_path, what, capsys):
    folder = tmp_path / "here"
    if what == "run":
        write_run(folder)
    elif what == "folder":
        write_run(folder / "a")
        write_run(folder / "b", "train.precision='bf16'", "train.steps=12")
    elif what == "waiting":
        write_suite(folder, [{"id": "a", "model": "toy", "begun": False, "state": {"status": "waiting"}}])
    else:
        (write_run(folder / "a") / "manifest.json").write_text("{")
    assert main(["results", str(folder), "--html"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert parsed(folder / "report.html").text


def test_a_report_of_nothing_is_an_error(tmp_path, capsys):
    assert main(["results", str(tmp_path), "--html"]) == 2
    assert main(["results", str(tmp_path / "none"), "--html"]) == 2
    assert not list(tmp_path.iterdir())
    assert "a report needs a folder with runs" in capsys.readouterr().err


# charts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(0, 10, ["0", "2", "4", "6", "8", "10"]), (1.9, 2.05, ["1.90", "1.95", "2.00", "2.05"]),
     (0, 4.2e6, ["0", "1M", "2M", "3M", "4M"]),
     (-0.02, 0.011, ["-0.02", "-0.01", "0.00", "0.01"]), (0, 25_000, ["0", "5K", "10K", "15K", "20K", "25K"])],
)  # fmt: skip
def test_ticks_are_round_and_labelled_with_the_digits_they_need(low, high, wanted):
    ticks = Axis("x", low, high).ticks(6)
    assert [tick_text(t, ticks) for t in ticks] == wanted


def test_a_logarithmic_axis_puts_equal_ratios_at_equal_distances():
    scale = Axis("x", 1e3, 1e7, log=True)
    assert [round(scale.place(v), 6) for v in (1e3, 1e5, 1e7)] == [0, 0.5, 1]
    assert scale.ticks(7) == [1e3, 1e4, 1e5, 1e6, 1e7]
    assert axis("x", [5.0, float("nan"), 0.0, 50.0], log=True).low > 0


def test_points_stand_where_their_values_say():
    chart = line_chart([Line("a", [(0, 1), (10, 3)])], Axis("x", 0, 10), Axis("y", 1, 3), "t", "k")
    path = ElementTree.fromstring(chart).find(".//path[@class='line s0']").get("d")
    (x0, y0), (x1, y1) = [tuple(map(float, p.split())) for p in path[1:].split("L")]
    assert x0 < x1
    assert y0 > y1  # up is more
    frame = ElementTree.fromstring(chart).find(".//clipPath/rect")
    assert (x0, y1) == (float(frame.get("x")), float(frame.get("y")))
    assert x1 == x0 + float(frame.get("width"))
    assert y0 == y1 + float(frame.get("height"))


def test_names_at_the_ends_of_lines_do_not_overlap():
    lines = [Line(f"model {i}", [(0, 2), (1, 1 + i / 1000)]) for i in range(8)]
    chart = line_chart(lines, Axis("x", 0, 1), Axis("y", 1, 2), "t", "k")
    places = sorted(float(e.get("y")) for e in ElementTree.fromstring(chart).iter("text") if e.get("class") == "name")
    assert len(places) == 8
    assert min(b - a for a, b in pairwise(places)) >= 13.9
    assert all(0 < y < 360 for y in places)


def test_names_of_points_overlap_neither_each_other_nor_points():
    points = [(f"model {i}", 1e5 * (1 + i / 5), 2 + i / 40) for i in range(30)]
    x, y = axis("tok/s", [p[1] for p in points], log=True), axis("bits", [p[2] for p in points])
    root = ElementTree.fromstring(scatter(points, x, y, "t"))
    marks = [e for e in root.iter() if e.get("class", "").startswith("mark")]
    assert [e.find("title").text.partition(":")[0] for e in marks] == [p[0] for p in points]
    boxes = []
    for name in (e for e in root.iter("text") if e.get("class") == "name"):
        wide, at = 7.2 * len(name.text), float(name.get("x"))
        left = at if name.get("text-anchor") == "start" else at - wide
        boxes.append((left, float(name.get("y")) - 11, left + wide, float(name.get("y")) + 3))
    assert 10 < len(boxes) <= 30
    for i, one in enumerate(boxes):
        assert one[0] > 0
        assert one[2] < 640
        for two in boxes[:i]:
            assert not (one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3])


def test_charts_of_one_point_or_of_none_are_drawn():
    for points in ([("one", 1.0, 2.0)], []):
        x, y = axis("x", [p[1] for p in points], log=True), axis("y", [p[2] for p in points])
        ElementTree.fromstring(scatter(points, x, y, "t"))
    ElementTree.fromstring(line_chart([Line("empty", [])], axis("x", []), axis("y", []), "t", "k"))
    ElementTree.fromstring(intervals([("a", 0.0, 0.0, 0.0)], "x", "t"))
