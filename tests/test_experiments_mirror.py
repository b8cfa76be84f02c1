"""Files of a run on their way: at every moment what has arrived can be resumed, and nothing is sent twice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elman_core.experiments import mirror
from elman_core.experiments.mirror import Receiver, Sender
from elman_core.training import checkpoint as checkpoints
from elman_core.training import run as run_module


class Run:
    """A run that grows, written as the trainer writes it: metrics, then a checkpoint under its final name."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / "runs/a"
        self.path.mkdir(parents=True)
        self.step = 0
        self.log = root / "logs/a.1.log"
        self.log.parent.mkdir()

    def manifest(self, status: str) -> None:
        partial = self.path / ".partial-manifest.json"
        partial.write_text(json.dumps({"status": status, "step": self.step}))
        os.replace(partial, self.path / "manifest.json")

    def train(self, steps: int) -> None:
        with (self.path / "metrics.jsonl").open("a") as out, self.log.open("a") as log:
            for _ in range(steps):
                self.step += 1
                out.write(json.dumps({"step": self.step}) + "\n")
                log.write(f"step {self.step}\n")

    def save(self, size: int = 10) -> Path:
        partial = self.path / "checkpoints/.partial-x"
        (partial / "state").mkdir(parents=True)
        (partial / "model").write_bytes(os.urandom(size))
        (partial / "state/trainer.json").write_text(str(self.step))
        final = self.path / f"checkpoints/step-{self.step:08d}"
        partial.rename(final)
        return final


def arrived(root: Path) -> tuple[int, int, str]:
    """Steps of the last checkpoint and of the metrics, and the status."""
    run = root / "runs/a"
    saved = [int(p.name[5:]) for p in run.glob("checkpoints/step-*")]
    for p in run.glob("checkpoints/step-*"):
        assert (p / "state/trainer.json").read_text() == str(int(p.name[5:]))  # what has the name is whole
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    status = json.loads((run / "manifest.json").read_text())["status"] if (run / "manifest.json").exists() else ""
    return max(saved, default=0), len(whole), status


def send_all(sender: Sender, root: Path, most: int = mirror.BATCH) -> int:
    """Send what there is now; the number of bytes."""
    size, whole = 0, False
    while not whole:
        pieces, whole = sender.batch(most)
        for piece in pieces:
            Receiver(root).put(piece)
            size += len(piece.data)
    return size


def same(one: Path, two: Path) -> bool:
    def files(root: Path) -> dict[str, bytes]:
        found = (p for p in root.rglob("*") if p.is_file())
        return {str(p.relative_to(root)): p.read_bytes() for p in found}

    return files(one) == files(two)


def test_the_names_are_those_of_a_run() -> None:
    assert (mirror.MANIFEST, mirror.CHECKPOINTS) == (run_module.MANIFEST, run_module.CHECKPOINTS)
    assert mirror._CHECKPOINT.fullmatch(checkpoints.checkpoint_name(7))


def test_what_has_arrived_can_be_resumed_after_every_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "PIECE", 7)  # so that every file comes in pieces
    run = Run(tmp_path / "far")
    sender, receiver = Sender(run.root, run.path, [run.log]), Receiver(tmp_path / "near")
    run.manifest("running")
    done = False
    for round in range(400):
        if round % 6 == 0 and run.step < 60:
            run.train(5)
            run.save()
            if run.step == 60:
                run.manifest("ok")
        pieces, whole = sender.batch(1)  # the run goes on in the middle of a sweep
        for piece in pieces:
            receiver.put(piece)
            saved, steps, status = arrived(tmp_path / "near")
            assert steps >= saved
            assert status or not saved
            assert status != "ok" or (saved, steps) == (60, 60)
        done = done or status == "ok"
    assert done
    assert whole
    assert same(run.root, tmp_path / "near")


def test_only_what_is_new_is_sent(tmp_path: Path) -> None:
    run = Run(tmp_path / "far")
    run.train(1000)
    sender = Sender(run.root, run.path, [run.log])
    assert send_all(sender, tmp_path / "near") == 0  # what is there at the start was brought by who started it
    sender = Sender.everything(run.root, run.path, [run.log])
    first = send_all(sender, tmp_path / "near")
    assert first == run.log.stat().st_size + (run.path / "metrics.jsonl").stat().st_size
    run.train(1)
    assert send_all(sender, tmp_path / "near") == len('{"step": 1001}\nstep 1001\n')
    assert send_all(sender, tmp_path / "near") == 0
    assert same(run.root, tmp_path / "near")


def test_metrics_that_were_cut_replace_the_longer_ones(tmp_path: Path) -> None:
    run = Run(tmp_path / "far")
    run.train(10)
    sender = Sender.everything(run.root, run.path)
    send_all(sender, tmp_path / "near")
    cut = run.path / ".partial-metrics.jsonl"
    cut.write_text('{"step": 1}\n{"step": 2}\n')
    os.replace(cut, run.path / "metrics.jsonl")
    run.step = 2
    run.train(40)  # longer than before: the new file is told from the old by more than its size
    send_all(sender, tmp_path / "near")
    assert arrived(tmp_path / "near")[1] == 42
    assert (tmp_path / "near/runs/a/metrics.jsonl").read_bytes() == (run.path / "metrics.jsonl").read_bytes()


def test_checkpoints_that_are_deleted_there_are_deleted_here(tmp_path: Path) -> None:
    run = Run(tmp_path / "far")
    for _ in range(3):
        run.train(5)
        run.save()
    sender = Sender.everything(run.root, run.path)
    send_all(sender, tmp_path / "near")
    kept = tmp_path / "near/runs/a/checkpoints"
    assert [p.name for p in kept.iterdir()] == ["step-00000015"]  # whoever goes on needs the last only
    old = kept / "step-00000003"
    old.mkdir()
    run.train(5)
    run.save()
    for step in (10, 15):
        (run.path / f"checkpoints/step-{step:08d}").rename(run.path / "checkpoints/.deleting-x")
        mirror.shutil.rmtree(run.path / "checkpoints/.deleting-x")
    send_all(sender, tmp_path / "near")
    assert sorted(p.name for p in kept.iterdir()) == ["step-00000003", "step-00000020"]  # of another time: left alone


def test_a_checkpoint_that_is_deleted_on_its_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PIECE", 100)
    run = Run(tmp_path / "far")
    run.manifest("running")
    sender, near = Sender(run.root, run.path), tmp_path / "near"
    run.train(1)
    folder = run.save(size=1000)
    seen = []
    while not any(p.kind == "checkpoint" for p in seen):
        seen = sender.batch(1)[0]
        for piece in seen:
            Receiver(near).put(piece)
    mirror.shutil.rmtree(folder)
    send_all(sender, near)
    send_all(sender, near)
    assert list((near / "runs/a/checkpoints").iterdir()) == []


def test_locks_and_unfinished_files_stay(tmp_path: Path) -> None:
    run = Run(tmp_path / "far")
    for name in (".lock", ".partial-manifest.json"):
        (run.path / name).write_text("x")
    (run.path / "extra").mkdir()
    (run.path / "extra/events.bin").write_bytes(b"\0" * 9)
    send_all(Sender.everything(run.root, run.path), tmp_path / "near")
    assert [str(p.relative_to(tmp_path / "near")) for p in (tmp_path / "near").rglob("*") if p.is_file()] == [
        "runs/a/extra/events.bin"
    ]
