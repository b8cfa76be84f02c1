"""The two ends of `--on ray` without Ray: what is sent, what is refused, and what ends with whom."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import train_helpers
from scheduler_helpers import shell_job, wait_for

from elman_core.data import ByteFile
from elman_core.experiments import on_ray, ray_attempt
from elman_core.experiments.job import LOST, Ending, Job, Slot
from elman_core.experiments.on_ray import RayExecutor, connect
from elman_core.experiments.ray_attempt import RayAttempt, text_of
from elman_core.experiments.ray_node import RayNode, Text, differences, sent_text, software
from elman_core.experiments.recipe import recipe
from elman_core.registry import ConfigError, DataError


class RayActorError(Exception):
    """As Ray's."""


class InlineRay:
    """Ray as far as an attempt uses it, in this process: `node.method.remote(…)` calls, and `get` returns or raises."""

    class exceptions:  # noqa: N801
        RayActorError = RayActorError
        ActorUnavailableError = type("ActorUnavailableError", (RayActorError,), {})
        RayTaskError = type("RayTaskError", (Exception,), {"cause": None})

    def __init__(self, node: RayNode) -> None:
        self._node = node
        self.calls: list[str] = []

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(method)
            return lambda: getattr(self._node, method)(*arguments)

        return types.SimpleNamespace(remote=call)

    def get(self, promise: Any) -> Any:
        try:
            return promise()
        except RayActorError:
            raise
        except Exception as error:
            wrapped = self.exceptions.RayTaskError(str(error))
            wrapped.cause = error
            raise wrapped from error


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _at_home() -> Any:
    before = Path.cwd()
    yield
    os.chdir(before)  # a node goes where its job is


def attempt(job: Job, node: RayNode, shared: bool | None = False) -> tuple[Ending, InlineRay]:
    place = node.take(0, "a test")
    assert not isinstance(place, str)
    ray = InlineRay(node)
    handle = RayAttempt(ray, ray, job, place, job.command, 1, shared)
    handle.run()
    assert handle.ending is not None
    return handle.ending, ray


def reader(folder: Path, text: Path) -> Job:
    """A job with a run whose command writes a manifest that names the text it was given."""
    file = folder / "jobs/a.toml"
    file.parent.mkdir(parents=True)
    file.write_text(recipe(train_helpers.settings(text)))
    code = (
        "import json, pathlib, sys; recipe, run, flag, text = sys.argv[1:]; run = pathlib.Path(run); "
        "run.mkdir(parents=True); print(pathlib.Path(recipe).read_text()[:7], len(open(text, 'rb').read())); "
        "(run / 'metrics.jsonl').write_text('{}\\n'); "
        "(run / 'manifest.json').write_text(json.dumps({'status': 'ok', 'settings': {'data': {'path': text}}}))"
    )
    run = folder / "runs/a"
    command = (sys.executable, "-c", code, str(file), str(run))
    return Job("a", command, run, folder / "logs/a.log", folder / "jobs/a.json")


def test_a_text_that_the_node_lacks_is_sent_once(tmp_path: Path, cache: Path) -> None:
    class Far(RayNode):
        """A machine on which the text is not where it is here."""

        def text(self, text: Text) -> str | None:
            return super().text(Text("/nowhere/text", text.fingerprint))

    text = train_helpers.write_text(tmp_path / "text")
    job = reader(tmp_path / "suite", text)
    ending, ray = attempt(job, Far())
    assert ending == Ending(0)
    assert job.attempt_log(1).read_text() == "[model] 200000\n"  # the recipe and the text were there
    assert json.loads((tmp_path / "suite/runs/a/manifest.json").read_text())["settings"]["data"]["path"] == str(text)
    assert ray.calls.count("take_text") == 1
    (kept,) = (cache / "ray/texts").iterdir()
    assert kept.read_bytes() == text.read_bytes()
    assert list((cache / "ray/jobs").iterdir()) == []

    (tmp_path / "suite/runs/a/manifest.json").unlink()  # lost before it came back: the attempt begins anew
    ending, ray = attempt(job, Far())
    assert ending == Ending(0)
    assert "take_text" not in ray.calls


def test_a_large_text_that_the_node_lacks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_attempt, "SENT_TEXT", 1 << 10)
    monkeypatch.setattr(RayNode, "text", lambda *_: None)
    job = reader(tmp_path / "suite", train_helpers.write_text(tmp_path / "text"))
    ending, _ = attempt(job, RayNode())
    assert ending.status == LOST
    assert "has no " in ending.cause
    assert "copy it there" in ending.cause
    assert job.attempt_log(1).read_text() == f"{ending.cause}\n"


def test_a_job_hears_what_its_scheduler_was_told(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELMAN_VERIFY", "skip")
    far = tmp_path / "far"

    class Far(RayNode):
        """A machine with places of its own."""

        def take(self, gpus: int, who: str) -> Slot | str:
            monkeypatch.delenv("ELMAN_VERIFY")
            return super().take(gpus, who)

        def begin(self, job: Job, *how: Any) -> None:
            monkeypatch.setenv("ELMAN_CACHE", str(far))
            super().begin(job, *how)

    job = shell_job(tmp_path, "b", 'echo "$ELMAN_VERIFY $ELMAN_KERNELS $ELMAN_CACHE"', env={"ELMAN_KERNELS": "require"})
    node = Far()
    place = node.take(0, "a test")
    assert isinstance(place, Slot)
    monkeypatch.setenv("ELMAN_VERIFY", "skip")
    ray = InlineRay(node)
    handle = RayAttempt(ray, ray, job, place, job.command, 1, False)
    handle.run()
    assert job.attempt_log(1).read_text() == f"skip require {far}\n"


def test_another_text_of_the_same_name_is_not_taken(tmp_path: Path) -> None:
    text = train_helpers.write_text(tmp_path / "text")
    known = Text(str(text), ByteFile(text).fingerprint())
    assert RayNode().text(known) == str(text)
    text.write_bytes(text.read_bytes()[:-1] + b"!")
    assert RayNode().text(known) is None
    assert sent_text(known).name == known.fingerprint["blake2b"]


def test_where_the_folder_is_shared_nothing_is_copied(tmp_path: Path, cache: Path) -> None:
    text = train_helpers.write_text(tmp_path / "text")
    job = reader(tmp_path / "suite", text)
    ending, ray = attempt(job, RayNode(), shared=None)
    assert ending == Ending(0)
    assert {"put", "take_text"}.isdisjoint(ray.calls)
    assert not (cache / "ray").exists()
    assert json.loads((tmp_path / "suite/runs/a/manifest.json").read_text())["settings"]["data"]["path"] == str(text)


def test_a_text_that_has_gone_from_here_is_said(tmp_path: Path) -> None:
    text = train_helpers.write_text(tmp_path / "text")
    job = reader(tmp_path / "suite", text)
    assert text_of(job) == Text(str(text), ByteFile(text).fingerprint())
    text.unlink()
    with pytest.raises(DataError, match="there is no file"):
        text_of(job)
    assert text_of(shell_job(tmp_path, "b", "true")) is None


def test_a_node_that_dies_is_lost_and_a_fault_of_ours_is_told_from_it(tmp_path: Path) -> None:
    class Dies(RayNode):
        def tell(self, question: int) -> Any:
            raise RayActorError("The actor died.\nIts node was terminated.")

    class Faulty(RayNode):
        def tell(self, question: int) -> Any:
            raise ZeroDivisionError("not a node's fault")

    job = shell_job(tmp_path, "b", "true")
    ending, _ = attempt(job, Dies())
    assert ending == Ending(None, f"lost node {platform.node()}", LOST)
    assert "Its node was terminated." in job.attempt_log(1).read_text()
    ending, _ = attempt(job, Faulty())
    assert "not a node's fault" in ending.cause
    assert "Traceback" in job.attempt_log(1).read_text()


def test_an_answer_that_was_lost_on_its_way_is_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_attempt.time, "sleep", lambda _: None)
    lost: list[int] = []

    class Far(RayNode):
        def tell(self, question: int) -> Any:
            told = super().tell(question)
            if question not in lost:
                lost.append(question)
                raise InlineRay.exceptions.ActorUnavailableError("The task may or may not have been executed.")
            return told

    text = train_helpers.write_text(tmp_path / "text")
    job = reader(tmp_path / "suite", text)
    ending, _ = attempt(job, Far())
    assert ending == Ending(0)
    assert lost
    assert (tmp_path / "suite/runs/a/metrics.jsonl").read_text() == "{}\n"
    assert job.attempt_log(1).read_text() == "[model] 200000\n"


def test_a_job_that_is_stopped_before_it_starts_does_not_start(tmp_path: Path) -> None:
    job = shell_job(tmp_path, "b", "touch started")
    node = RayNode()
    place = node.take(0, "a test")
    assert not isinstance(place, str)
    ray = InlineRay(node)
    handle = RayAttempt(ray, ray, job, place, job.command, 1, False)
    handle.stop()
    handle.run()
    assert handle.ending == Ending(128 + signal.SIGTERM)
    assert "begin" not in ray.calls


def test_copies_of_jobs_whose_node_died_are_removed(cache: Path) -> None:
    done = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True)
    old = cache / "ray/jobs" / f"a-{platform.node()}-{done.stdout.strip()}"
    other = cache / "ray/jobs" / f"a-another-host-{done.stdout.strip()}"
    for folder in (old, other):
        folder.mkdir(parents=True)
    RayNode().prepare("b", None)
    assert not old.exists()
    assert other.exists()


def test_a_gpu_that_a_stranger_uses_is_kept_and_another_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given back to Ray, it would be the next that Ray gives."""
    free = {"gpu 1"}

    class Actor:
        def __init__(self, name: str) -> None:
            self.name = name
            self.take = types.SimpleNamespace(remote=self._take)
            self.software = types.SimpleNamespace(remote=software)

        def _take(self, gpus: int, who: str) -> Slot | str:
            assert gpus == 1
            return Slot(self.name, "far") if self.name in free else f"{self.name}: used by pid 1 (game)"

    made: list[Actor] = []

    def actor(**resources: Any) -> Any:
        assert (resources["num_gpus"], resources["num_cpus"], resources["max_restarts"]) == (1, 0, 0)

        def remote() -> Actor:
            made.append(Actor(f"gpu {len(made)}"))
            return made[-1]

        return types.SimpleNamespace(remote=remote)

    killed: list[str] = []
    ray = types.SimpleNamespace(
        cluster_resources=lambda: {"GPU": 2.0},
        nodes=lambda: [{"Alive": True, "Resources": {"GPU": 2.0}}],
        remote=lambda _: types.SimpleNamespace(options=actor),
        wait=lambda promises, **_: (promises, []),
        get=lambda answer: answer,
        kill=lambda actor, **_: killed.append(actor.name),
        exceptions=types.SimpleNamespace(RayError=RayActorError),
    )
    monkeypatch.setattr(on_ray, "connect", lambda _: ray)
    monkeypatch.setattr(on_ray, "_LOOK", 0.0)
    executor = RayExecutor()
    job = shell_job(tmp_path, "b", "true")
    assert executor.slot(job) is None
    assert executor.why == "gpu 0: used by pid 1 (game)"
    second = executor.slot(job)
    assert second == Slot("gpu 1", "far")
    assert killed == []
    executor.release(second)
    free.add("gpu 0")  # the stranger has gone
    assert executor.slot(job) is None  # it is asked again now
    assert executor.slot(job) == Slot("gpu 0", "far")
    executor.close()
    assert sorted(killed) == [f"gpu {i}" for i in range(len(made))]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            RayActorError("The actor failed to import.\nModuleNotFoundError: No module named 'elman_core'"),
            "lacks this program",
        ),
        (RayActorError("The actor died.\nIts node was terminated."), ""),
    ],
)
def test_a_node_without_this_program_is_refused_and_a_lost_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    def fail(_: Any) -> None:
        raise error

    method = types.SimpleNamespace(remote=lambda *_: None)
    actor = types.SimpleNamespace(take=method, software=method)
    killed: list[Any] = []
    ray = types.SimpleNamespace(
        cluster_resources=lambda: {"CPU": 2.0},
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}],
        remote=lambda _: types.SimpleNamespace(options=lambda **_: types.SimpleNamespace(remote=lambda: actor)),
        wait=lambda promises, **_: (promises, []),
        get=fail,
        kill=lambda actor, **_: killed.append(actor),
        exceptions=types.SimpleNamespace(RayError=RayActorError),
    )
    monkeypatch.setattr(on_ray, "connect", lambda _: ray)
    executor = RayExecutor()
    job = shell_job(tmp_path, "b", "true")
    if says:
        with pytest.raises(ConfigError, match=f"{says}: ModuleNotFoundError: No module named 'elman_core'; install"):
            executor.slot(job)
    else:
        assert executor.slot(job) is None
        assert executor.why == "a node was lost: Its node was terminated."
    assert killed == [actor]


# versions


def test_software_names_what_must_be_the_same() -> None:
    found = software()
    assert {"python", "torch", "transformers", "elman-core", "elman-e42", "elman-baselines"} <= set(found)
    assert "+" not in found["torch"]  # builds for different devices compute the same function
    assert differences(found, found) == []
    there = {k: v for k, v in found.items() if k != "elman-e42"} | {"torch": "0.1"}
    assert differences(found, there) == [
        f"elman-e42 is not installed there and {found['elman-e42']} here",
        f"torch is 0.1 there and {found['torch']} here",
    ]


def test_software_sees_a_changed_source(tmp_path: Path) -> None:
    from elman_core.experiments.ray_node import _digest

    (tmp_path / "a.py").write_text("x = 1\n")
    before = _digest(tmp_path)
    (tmp_path / "notes.txt").write_text("no source")
    assert _digest(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert _digest(tmp_path) != before


def test_without_ray_or_a_cluster_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    fake = types.SimpleNamespace(is_initialized=lambda: False, init=fail)
    monkeypatch.setitem(sys.modules, "ray", fake)
    with pytest.raises(
        ConfigError, match=r"no Ray cluster answers at 10.0.0.1:6379: Could not find .* ray start --head"
    ):
        connect("10.0.0.1:6379")
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'elman-core\[ray\]'"):
        connect()


# the tether


def tether(pid: int, *command: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "elman_core.experiments.tether", str(pid), *command]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("shell", "code"), [("exit 3", 3), ("kill -9 $$", 137), ("exit 0", 0)])
def test_a_tethered_command_leaves_with_its_own_code(shell: str, code: int) -> None:
    process = tether(os.getpid(), "sh", "-c", shell)
    process.communicate()
    assert process.returncode == code


def test_a_tethered_command_saves_and_ends_when_its_holder_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as holder:
        note = tmp_path / "note"
        work = f'trap "echo saved; exit 143" TERM; touch {note}; while true; do sleep 0.1; done'
        process = tether(holder.pid, "sh", "-c", work)
        wait_for(note.exists)
        holder.kill()
    said, warned = process.communicate(timeout=30)
    assert said == "saved\n"
    assert process.returncode == 143
    assert "told to save and end" in warned
