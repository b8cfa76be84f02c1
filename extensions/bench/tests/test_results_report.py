"""The report is one file that needs nothing else, parses, escapes what it is given, and holds what a reader asks for."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from elman_bench.results import plots
from elman_bench.results.report import write_report
from results_helpers import example_suite, write_run, write_suite

from elman_core.cli import main

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


def test_it_parses_and_its_pictures_stand_inside(report):
    page = parsed(report)
    assert report.name == "report.html"
    pictures = [attrs for tag, attrs in page.tags if tag == "img"]
    assert [attrs["alt"].split()[0] for attrs in pictures] == ["Training", "Training", "Speed", "Paired"]
    for attrs in pictures:
        kind, _, data = attrs["src"].partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")


def test_it_refers_to_nothing_outside(report):
    text = report.read_text()
    page = parsed(report)
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form"), tag
        assert not {"href", "action", "srcset", "data", "xlink:href", "style"} & set(attrs), (tag, attrs)
        assert str(attrs.get("src", "data:")).startswith("data:")
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
        "train.weight_decay", "held out: up to 1,048,576 bytes", "stationary block bootstrap",
    ):  # fmt: skip
        assert wanted in text, wanted


def test_tuned_values_count_the_seeds_behind_their_means(tmp_path):
    jobs = [
        {"id": f"lr{lr}-s{s}", "model": "a", "sets": (f"train.lr={lr}", f"train.seed={s}"), "tuned": {"train.lr": lr}}
        for lr in (0.001, 0.003)
        for s in (1, 2)
    ]
    jobs[0] |= {"status": "killed", "steps": 50}
    text = " ".join(parsed(write_report(write_suite(tmp_path / "s", jobs))).text.split())
    assert re.search(r"a lr 3e-3 [\d.]+ 2 ok chosen a lr 1e-3 [\d.]+ 1 killed, ok", text), text


def test_tuned_values_of_one_label_in_two_sizes_are_two_lines(tmp_path):
    jobs = [
        {
            "id": f"{d}-lr{lr}",
            "model": "a",
            "sets": (f"train.lr={lr}", f"model.hidden_size={d}"),
            "tuned": {"train.lr": lr},
        }
        for lr in (0.001, 0.003)
        for d in (64, 96)
    ]
    text = " ".join(parsed(write_report(write_suite(tmp_path / "s", jobs))).text.split())
    assert len(re.findall(r"a hidden_size=\d+ lr [13]e-3 [\d.]+ 1 ok", text)) == 4, text


@pytest.mark.parametrize("what", ["run", "folder", "waiting", "damaged"])
def test_any_folder_with_runs_has_a_report(tmp_path, what, capsys, monkeypatch):
    monkeypatch.setattr(plots, "for_report", lambda *_: {})
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
