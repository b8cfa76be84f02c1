"""Folders in which others may write, and what is no file: nothing of the user is overwritten, nothing hangs, one line."""

import contextlib
import itertools
import os
import shutil
import signal
from pathlib import Path

import pytest
from train_helpers import settings, train_words

from elman_core.cli import main
from elman_core.registry import ElmanError
from elman_core.storage import MOST_READ, read_bytes, write_folder
from elman_core.training.start import start

ENDINGS = ("manifest.json", "metrics.jsonl", "report.html", "suite.json", "suite.toml", "jobs.json", "a.json")


@contextlib.contextmanager
def within(seconds: float):
    """Raise `TimeoutError` from whatever waits longer."""

    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    start(settings(text, "train.steps=4", "train.warmup=1"), path, quiet=True).fit()
    return path


def plant(folder: Path, victim: Path) -> None:
    """Links to a file of the user under every name that can be guessed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in [*ENDINGS, "checkpoints", "step-00000002", "step-00000004"]:
        for number in (os.getpid(), ""):
            for link in (f".partial-{number}-{name}", f".partial-{name}-{number}"):
                (folder / link).symlink_to(victim)
    for name in ("metrics.jsonl.damaged", "console.log"):
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(victim)


def test_in_a_shared_folder_no_file_of_the_user_is_written_through_a_link(run, text, tmp_path, capsys):
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("precious")
    plant(shared / "new", victim)
    assert main(train_words(text, shared / "new", "train.steps=2")) == 2, "a folder with links is not an empty one"
    shutil.copytree(run, shared / "run")
    (shared / "run" / "console.log").unlink()
    plant(shared / "run" / "checkpoints", victim)
    plant(shared / "run", victim)
    (shared / "run" / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes() + b"damaged\n")
    assert main(["resume", str(shared / "run"), "--steps", "6"]) == 1, "console.log is a link"
    (shared / "run" / "console.log").unlink()
    assert main(["resume", str(shared / "run"), "--steps", "6"]) == 0
    assert main(["results", str(shared / "run"), "--html"]) == 0
    commands = tmp_path / "commands.txt"
    commands.write_text("true\n")
    plant(shared / "jobs", victim)
    assert main(["jobs", "run", str(commands), "--out", str(shared / "jobs")]) == 0
    assert victim.read_text() == "precious"
    assert not (shared / "run" / "metrics.jsonl.damaged").is_symlink()
    assert all(line.startswith("elman: ") for line in capsys.readouterr().err.splitlines())


def test_a_folder_that_is_exchanged_while_it_is_written_leads_nowhere_else(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()

    def fill(folder: Path) -> None:
        (partial,) = (p for p in (tmp_path / "shared").iterdir() if p.name.startswith("."))
        assert partial.stat().st_mode & 0o077 == 0, "others can put links into it"
        partial.rename(partial.with_name("taken"))
        partial.symlink_to(victim)
        (folder / "model.safetensors").write_text("weights")

    with contextlib.suppress(ElmanError):
        write_folder(tmp_path / "shared" / "x", fill)
    assert not list(victim.iterdir())


def endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


NO_FILES = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "folder": Path.mkdir,
    "endless": endless,
}


def test_what_is_no_file_is_refused_in_one_line_and_not_waited_for(run, tmp_path, capsys):
    """Each file of a run and of its checkpoint, by every command that reads them."""
    names = sorted(p.relative_to(run) for p in run.rglob("*") if p.is_file() and p.name != ".lock")
    for index, (name, what) in enumerate(itertools.product(names, NO_FILES)):
        if index % 3:
            continue  # five kinds and three are prime to each other: each file meets several kinds
        copy = shutil.copytree(run, tmp_path / str(index))
        (copy / name).unlink()
        NO_FILES[what](copy / name)
        (checkpoint,) = (copy / "checkpoints").iterdir()
        for words in (["results", copy], ["eval", copy], ["export", checkpoint, tmp_path / "out"], ["resume", copy]):
            with within(20):
                assert main([str(word) for word in words]) in (0, 1, 2), (name, what, words)
        said = capsys.readouterr().err.splitlines()
        assert all(line.startswith("elman: ") for line in said), said
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_a_file_is_read_up_to_a_bound(tmp_path):
    with (tmp_path / "long").open("wb") as file:
        file.truncate(MOST_READ + 1)
    with pytest.raises(OSError, match="longer than"):
        read_bytes(tmp_path / "long")
