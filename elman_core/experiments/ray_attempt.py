"""The near end of `--on ray`: a thread that sends a job what it needs, and brings back what it writes, as it writes it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import tomllib
import traceback
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from elman_core.data import ByteFile
from elman_core.registry.errors import DataError, ElmanError
from elman_core.storage import storage_errors, write_text

from .job import LOST, Ending, Job, Slot
from .mirror import CHECKPOINTS, MANIFEST, PIECE, Piece, Receiver, Sender
from .ray_node import PYTHON, Text, Told

SENT_TEXT = 256 << 20
"""Bytes of the largest training text that is sent to a node that does not have it."""
EVERY = 1.0  # seconds between two questions to a node whose job has nothing to send
_AGAIN = ("stop", "shares", "text", "tell")  # what may be asked twice
_PARTS = (".lock", "metrics.jsonl", "console.log", CHECKPOINTS)
_PATIENCE = 60.0  # seconds for which a node that does not answer may come back


class RayAttempt(threading.Thread):
    """One attempt of a job on a node. `ending` is there when the thread has ended.

    Attributes:
        ending: how it ended. strangers: who else is on its GPUs now.
    """

    def __init__(
        self, ray: Any, node: Any, job: Job, slot: Slot, command: tuple[str, ...], number: int, shared: bool | None
    ) -> None:
        super().__init__(name=f"elman {job.id}", daemon=True)
        self.ray, self.node, self.job, self.slot = ray, node, job, slot
        self.command, self.number, self.shared = command, number, shared
        self.root = job.state.parent.parent.absolute()
        self.ending: Ending | None = None
        self.strangers: list[str] = []
        self._told = threading.Event()
        self._wanted, self._done = 0, 0  # 1: told to save and end, 2: killed
        self._text: Text | None = None
        self._text_there = ""

    def stop(self, now: bool = False) -> None:
        """As `Executor.stop`."""
        self._wanted = 2 if now else max(1, self._wanted)
        self._told.set()

    def run(self) -> None:
        try:
            self.ending = self._follow() if self._prepare() else Ending(128 + signal.SIGTERM)
            self._rename_text()
            self._ask("clear")
        except ElmanError as error:
            self._log(str(error))
            self.ending = Ending(None, str(error), LOST)
        except self.ray.exceptions.RayActorError as error:
            self._log(f"{last_line(error)}\nnode {self.slot.host} was lost")
            self.ending = Ending(None, f"lost node {self.slot.host}", LOST)
        except Exception as error:  # a fault of this program: said in the log, and not swallowed by a thread
            self._log(traceback.format_exc())
            self.ending = Ending(None, f"{type(error).__name__}: {error}", LOST)

    # sending

    def _prepare(self) -> bool:
        """Send what the job needs and start it. Returns whether it was: not if it has been told to stop meanwhile."""
        job = self.job
        self._text = text_of(job)
        there = Path(self._ask("prepare", job.id, str(self.root) if self._is_shared() else None))
        if self._text is not None:
            self._text_there = self._send_text(self._text)
        if there != self.root:
            self._send_files()
        moved = _Moved(self.root, there)
        far = replace(
            job,
            command=(*moved.words(job.command),),
            run=None if job.run is None else moved.path(job.run),
            log=moved.path(job.log),
            state=moved.path(job.state),
            env={**_wishes(), **job.env},
        )
        command = moved.words(self.command)
        if self._text is not None:
            command += ("--data", self._text_there)
        if self._wanted:
            return False
        self._ask("begin", far, command, self.number, str(Path.cwd()))
        return True

    def _is_shared(self) -> bool:
        if self.shared is None:
            token = self.root / f".shared-{uuid.uuid4().hex}"
            with storage_errors(f"cannot write {self.root}"):
                token.touch()
            try:
                self.shared = self._ask("shares", str(token))
            finally:
                token.unlink()
        return self.shared

    def _send_text(self, text: Text) -> str:
        """Where the node has the text.

        Raises:
            DataError: it has none, and it is too large to send.
        """
        place = self._ask("text", text)
        if place is None:
            size = text.fingerprint["size"]
            if size > SENT_TEXT:
                raise DataError(
                    f"node {self.slot.host} has no {text.path} with the content that it has here: copy it there, or put it "
                    f"where all nodes see it (texts up to {SENT_TEXT >> 20} MiB are sent)"
                )
            with open(text.path, "rb") as opened:
                for offset in range(0, size, PIECE):
                    self._ask("take_text", text, opened.read(PIECE), offset, offset + PIECE >= size)
            place = self._ask("text", text)
        if place is None:
            raise DataError(f"{text.path} changed while it was sent to node {self.slot.host}")
        return place

    def _send_files(self) -> None:
        """The files that the command names, and of a run that goes on all but its older checkpoints."""
        run = self.job.run
        if run is not None and _is_debris(run):
            shutil.rmtree(run)
        named = (Path(word).absolute() for word in self.command)
        files = [path for path in named if self.root in path.parents and path.is_file()]
        going_on = None if run is None or not run.is_dir() else run.absolute()
        sender = Sender.everything(self.root, going_on, files)
        while True:
            pieces, whole = sender.batch()
            self._ask("put", pieces)
            if whole:
                return

    # receiving

    def _follow(self) -> Ending:
        """Bring back what the job writes until it has ended and all has come."""
        receiver = Receiver(self.root)
        question = 0
        while True:
            self._told.clear()
            if self._wanted > self._done:
                self._done = self._wanted
                self._ask("stop", self._done > 1)
            told: Told = self._ask("tell", question)
            self.strangers = told.strangers
            for piece in told.pieces:
                receiver.put(self._at_home(piece))
            if told.ending is not None and not told.more:
                return told.ending
            if not told.more:
                self._told.wait(EVERY)
            question += 1

    def _at_home(self, piece: Piece) -> Piece:
        """The manifest names the text by its place here, where the run will be looked at and resumed."""
        if not piece.path.endswith(f"/{MANIFEST}"):
            return piece
        return replace(piece, data=self._renamed(piece.data))

    def _rename_text(self) -> None:
        """Do the same for a manifest in a folder that the node shares."""
        path = None if self.job.run is None else self.job.run / MANIFEST
        if self.shared and path is not None and path.exists():
            write_text(path, self._renamed(path.read_bytes()).decode())

    def _renamed(self, text: bytes) -> bytes:
        manifest = json.loads(text)
        data = manifest.get("settings", {}).get("data")
        if self._text is None or data is None:
            return text
        data["path"] = self._text.path
        return (json.dumps(manifest, indent=2) + "\n").encode()

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call the node and wait. Its `ElmanError`s are raised as they are."""
        errors = self.ray.exceptions
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                return self.ray.get(getattr(self.node, method).remote(*arguments))
            except errors.ActorUnavailableError:
                # It may have happened or not.
                if method not in _AGAIN or time.monotonic() > end:
                    raise
                time.sleep(1.0)
            except errors.RayTaskError as error:
                if isinstance(error.cause, ElmanError):
                    raise error.cause from error
                raise

    def _log(self, text: str) -> None:
        path = self.job.attempt_log(self.number)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as out:
            out.write(f"{text}\n")


def _wishes() -> dict[str, str]:
    """The variables of this project that a job inherits on one machine, but those that name places there."""
    return {k: v for k, v in os.environ.items() if k.startswith("ELMAN_") and k not in ("ELMAN_CACHE", "ELMAN_LOCKS")}


def _is_debris(run: Path) -> bool:
    """Whether a folder has parts of a run that was lost before anything had come back that could be resumed, and only those."""
    if not run.is_dir() or (run / MANIFEST).exists():
        return False
    return all(path.name in _PARTS or path.name.startswith(".partial-") for path in run.iterdir())


class _Moved:
    """Paths below one root as they are below another."""

    def __init__(self, here: Path, there: Path) -> None:
        self.here, self.there = here, there

    def path(self, path: Path) -> Path:
        return self.there / path.absolute().relative_to(self.here)

    def words(self, words: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self._word(word) for word in words)

    def _word(self, word: str) -> str:
        if word == sys.executable:
            return PYTHON
        path = Path(word).absolute()
        return str(self.path(path)) if self.here in path.parents else word


def text_of(job: Job) -> Text | None:
    """The training text of a job: that of its run, or of the recipe that its command names; None if it trains nothing.

    Raises:
        DataError: it is not here.
    """
    if job.run is None:
        return None
    paths = []
    if (job.run / MANIFEST).exists():
        paths.append(json.loads((job.run / MANIFEST).read_text(encoding="utf-8"))["settings"]["data"]["path"])
    for recipe in (Path(word) for word in job.command if word.endswith(".toml")):
        paths.append(tomllib.loads(recipe.read_text(encoding="utf-8")).get("data", {}).get("path", ""))
    if not any(paths):
        return None
    file = ByteFile(next((path for path in paths if Path(path).is_file()), paths[-1]))  # or say which is missing
    return Text(str(file.path.resolve()), file.fingerprint())


def last_line(error: BaseException) -> str:
    """What an error of Ray's comes to."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
