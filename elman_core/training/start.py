"""From settings to a trainer: a new run, or one that resumes exactly where it stopped."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from elman_core.metrics import read_metrics
from elman_core.model.checkpoint import newest_good
from elman_core.registry import CheckpointError, ConfigError, config_to_dict, resolve
from elman_core.storage import check_folder, now, remove_leftovers

from .checkpoint import Position, Progress, read_progress, set_aside
from .loop import Trainer
from .plan import Plan, decide
from .ranks.group import Ranks, join
from .run.display import backends
from .run.facts import git_commit
from .run.folder import NullRunFolder, RunFolder
from .run.protocol import protocol_hash
from .settings import RETUNABLE, Settings, TrainSettings, resumed_settings, with_length
from .text import Text, open_text


def start(settings: Settings, out: Path | None = None, quiet: bool = False, text: Text | None = None) -> Trainer:
    """A new run in the folder `out` (or a new one under runs/). The data is checked before the model is built.

    Under `torchrun` every process calls it, and all of them train one model; the first writes and shows.

    Args:
        text: of these settings, if it is already open.

    Raises:
        ConfigError, DataError, PluginError, StorageError: on every rank, if it happened on any.
    """
    ranks = join()
    plan = ranks.together(lambda: decide(settings, text or open_text(settings), ranks))
    plan.require_same()
    asked = settings.model
    variant = asked.variant or plan.settings.model.variant
    name = "mixed" if isinstance(variant, list) else str(variant)
    folder = _folder(ranks, lambda: RunFolder.create(out, re.sub(r"[^A-Za-z0-9_.-]", "-", name)))
    try:
        trainer = ranks.together(lambda: Trainer(plan, folder, Position(), quiet))
        protocol = plan.protocol()
        folder.update(
            format=1,
            id=uuid.uuid4().hex,
            status="starting",
            started=now(),
            horizon={"steps": plan.began.train.steps, "minutes": plan.began.train.minutes},
            protocol=protocol,
            protocol_hash=protocol_hash(protocol),
            asked={"variant": asked.variant, "options": asked.options},
            parameters=plan.model.num_parameters(),
            made_with=dict(plan.model.config.made_with or {}),
            git_commit=git_commit(Path.cwd()) if ranks.main else None,
            resumed=[],
            **plan.facts(),
        )
    except BaseException:
        folder.discard()
        raise
    if ranks.rank:  # each rank drops out different elements
        torch.manual_seed((plan.settings.train.seed * 4_099 + ranks.rank) % 2**64)
    for line in _first_lines(plan, folder.path):
        trainer.display.say(line, indent=12)
    return trainer


def resume(
    path: Path,
    steps: str | None = None,
    minutes: str | None = None,
    data: str | Sequence[str] | None = None,
    quiet: bool = False,
    sets: Sequence[str] = (),
) -> Trainer | None:
    """The trainer of a run, at its last intact checkpoint; None if the run has already reached the requested length.

    The schedule keeps its original length; after its end, the learning rate keeps its last value.

    Args:
        path: the run. steps: a new total, or `+20` for 20 more. minutes: likewise.
        data: where the text is now, if it was moved; of a mixture all values, in the order of the run.
        sets: settings to change: those in `RESUMABLE` do not affect results; those in `RETUNABLE` do, so the change is recorded
            and becomes part of the run's protocol.

    Raises:
        CheckpointError: not a run, an edited manifest, or no intact checkpoint.
        DataError: the text is not the one the run began with.
        ConfigError: a setting that cannot change in a run. If one rank fails, all ranks raise its error.
    """
    ranks = join()
    folder = _folder(ranks, lambda: RunFolder.open(path))
    try:
        manifest = folder.manifest
        settings = ranks.together(lambda: resumed_settings(manifest["settings"], sets))
        if data:
            values = [data] if isinstance(data, (str, Path)) else list(data)
            moved = dataclasses.replace(settings.data, path=values if len(values) > 1 else str(values[0]))
            settings = dataclasses.replace(settings, data=moved)
        position = ranks.first(lambda: _position(folder))
        settings = _extend(settings, position.progress, steps, minutes)
        done = position.checkpoint is not None and _is_done(settings, position)
        if done and manifest["status"] == "ok":
            folder.close()
            return None  # otherwise it was killed after its last step, and has yet to evaluate and to record its end
        fingerprint = manifest["protocol"]["data"]
        text = ranks.together(lambda: open_text(settings, fingerprint, manifest.get("text_digests")))
        plan = ranks.together(lambda: decide(settings, text, ranks, manifest, position.checkpoint))
        plan.require_same()
        if not done:
            _require_learning_rate(plan, position.progress)
        trainer = ranks.together(lambda: Trainer(plan, folder, position, quiet))
        cut = settings.data.documents == "reset" and "documents" not in manifest
        _continue(folder, plan, position, ranks)
    except BaseException:
        folder.close()
        raise
    for line in _first_lines(plan, folder.path, position):
        trainer.display.say(line, indent=12)
    if cut:
        trainer.display.say("windows are no longer cut where documents begin: the losses are the same but for rounding")
    return trainer


def _require_learning_rate(plan: Plan, progress: Progress) -> None:
    """Raise `ConfigError` for a run that goes on beyond its schedule, at a learning rate of 0."""
    train, began = plan.settings.train, plan.began.train
    last = max(progress.step, train.steps or 0)
    is_past = began.is_done(last, max(progress.seconds, 60 * (train.minutes or 0)))
    is_longer = (train.steps, train.minutes) != (began.steps, began.minutes)
    if is_past and is_longer and plan.schedule.factor(last, 1.0) < 1e-9:
        raise ConfigError("this run's schedule ends at a learning rate of 0: add --set train.final_lr=0.1")


def _continue(folder: RunFolder, plan: Plan, position: Position, ranks: Ranks) -> None:
    """Take back what was written after the checkpoint, and record in the manifest that the run continues."""
    manifest, step = folder.manifest, position.progress.step
    ranks.first(lambda: set_aside(folder.checkpoints, position.checkpoint))
    folder.cut_metrics(step)
    folder.forget_end()
    before = manifest["settings"]["train"]
    retuned: dict[str, list[Any]] = {}
    for name, value in vars(plan.settings.train).items():
        if f"train.{name}" in RETUNABLE and value != before.get(name):
            retuned[f"train.{name}"] = [before.get(name), value]
    entry: dict[str, Any] = {"at_step": step, "time": now()}
    if retuned:
        entry["set"] = retuned
    resumed = [*manifest["resumed"], entry]
    changes = [[entry["at_step"], entry["set"]] for entry in resumed if "set" in entry]
    if changes:
        protocol = plan.protocol() | {"changed on resume": changes}
        folder.update(protocol=protocol, protocol_hash=protocol_hash(protocol))
    folder.update(resumed=resumed, **plan.facts())


def _position(folder: RunFolder) -> Position:
    """The last intact checkpoint of a run, and its last evaluation with a finite loss up to there.
    Raises `CheckpointError` if none is intact, or the run is finished and has none: starting again would delete its metrics."""
    for place in (folder.path, folder.checkpoints):
        remove_leftovers(place)
    checkpoint = newest_good(folder.checkpoints, check_folder)
    if checkpoint is None and folder.manifest.get("status") == "ok":
        done = folder.manifest.get("steps_done", 0)
        raise CheckpointError(
            f"{folder.path} is finished, {done} steps, and has no checkpoint to continue from: restore its checkpoints, or "
            "train again into another folder"
        )
    progress = Progress() if checkpoint is None else read_progress(checkpoint, folder.id)
    evaluations = [
        {k: v for k, v in line.items() if k != "kind"}
        for line in read_metrics(folder.path, folder.id).evaluations
        if line["step"] <= progress.step and math.isfinite(line["loss"])
    ]
    return Position(progress, checkpoint, evaluations[-1] if evaluations else None)


def _is_done(settings: Settings, position: Position) -> bool:
    return settings.train.is_done(position.progress.step, position.progress.seconds)


def _first_lines(plan: Plan, path: Path, position: Position | None = None) -> Iterator[str]:
    """What is decided before the first step, in five lines; more lines only for what few runs have."""
    settings, text = plan.settings, plan.text
    model, train = settings.model, settings.train
    size = f"{model.hidden_size}x{model.num_hidden_layers}, {plan.model.num_parameters():,} parameters"
    name = model.variant if isinstance(model.variant, str) else "+".join(map(str, model.variant))
    resumed = f" (resumed at step {position.progress.step})" if position else ""
    yield f"run         {path}{resumed}: {name}@{size}"
    yield f"settings    {'  '.join(_changed(settings)) or 'the defaults'} (all are in manifest.json)"
    vocabulary = plan.model.config.vocab_size
    unit = "byte" if vocabulary == 256 else "token"
    expected = f"; expected at the start: {math.log(vocabulary):.4f} nats per {unit} (ln {vocabulary})"
    yield f"text        {text.windows.in_words}{'' if plan.init else expected}"
    if text.heldout_file:
        yield f"held out    {text.heldout_file.value}"
    mode = f"{plan.mode.name} steps ({plan.mode.why})"
    yield f"backend     {'; '.join(backends(plan.model)) or 'no recurrence'} on {plan.device}, {train.precision}; {mode}"
    if plan.ranks.size > 1:
        rows = train.batch_size // plan.ranks.size
        yield f"ranks       {plan.ranks.size}, {plan.parallel} over {plan.backend}: {rows} rows of the batch each"
    if plan.init is not None:
        yield f"begun with  {plan.init['model']}, its optimizer's state {plan.init['optimizer']}"
    if position and _is_done(plan.began, position) and train.schedule != "constant":
        rate = train.lr * plan.schedule.factor(position.progress.step, 1.0)
        yield f"schedule    has ended: the learning rate stays at {rate:.2e}"
    elif train.steps != 0:  # without steps there is no learning rate
        yield f"schedule    {_schedule_in_words(plan)}"


def _schedule_in_words(plan: Plan) -> str:
    train = plan.settings.train
    whole = train if train.schedule == "constant" else plan.began.train
    length, goal = _length(whole), _length(train)
    marks = ", ".join(f"{mark} {factor * train.lr:.2e}" for mark, factor in plan.schedule.at_landmarks().items())
    ends = "" if length == goal else f"; the run ends after {goal}"
    unit = "steps" if whole.minutes is None else "time"
    most = "" if whole.minutes is None else ", at most a tenth of the time"
    warm_up = f"warm-up {train.warmup} steps{most}"
    return f"{length}, {train.schedule}, {warm_up}; learning rate by share of the {unit}: {marks}{ends}"


def _length(train: TrainSettings) -> str:
    return f"{train.steps} steps" if train.minutes is None else f"{train.minutes:.4g} minutes"


def _changed(settings: Settings) -> Iterator[str]:
    """The settings that are not the defaults, as `--set` takes them. Those that the other lines give are left out, and what
    its default leaves to the run."""
    told = {
        "model.variant", "model.options", "model.hidden_size", "model.num_hidden_layers", "train.steps", "train.minutes",
        "train.warmup",
    }  # fmt: skip
    model = settings.model
    usual = Settings().to_dict()
    if isinstance(model.options, dict) and isinstance(model.variant, str):
        usual["model"]["options"] = config_to_dict(resolve(model.variant).config)
    if isinstance(model.options, list):  # a table for each layer
        defaults = (config_to_dict(resolve(name).config) for name in model.variant)
        layers = [
            ", ".join(f"{k} = {json.dumps(v)}" for k, v in options.items() if v != default[k])
            for options, default in zip(model.options, defaults, strict=True)
        ]
        if any(layers):
            yield "model.options=[{" + "}, {".join(layers) + "}]"
    for table, values in settings.to_dict().items():
        for key, value in values.items():
            before = usual[table][key]
            if isinstance(value, dict) and value != before:
                yield from (f"{table}.{key}.{k}={json.dumps(v)}" for k, v in value.items() if v != before.get(k))
            elif f"{table}.{key}" not in told and before not in (None, "auto", value):
                yield f"{table}.{key}={json.dumps(value)}"


def _folder(ranks: Ranks, take: Callable[[], RunFolder]) -> RunFolder:
    """The run's folder on the first rank; on other ranks a substitute that writes nothing."""
    taken: list[RunFolder] = []

    def tell() -> tuple[Path, dict[str, Any]]:
        taken.append(take())
        return taken[0].path, taken[0].manifest

    path, manifest = ranks.first(tell)
    return taken[0] if taken else NullRunFolder(path, manifest)


def _extend(settings: Settings, progress: Progress, steps: str | None, minutes: str | None) -> Settings:
    if steps is not None and minutes is not None:
        raise ConfigError("give --steps or --minutes, not both")
    if steps is not None:
        more = _number("--steps", steps, int)
        return with_length(settings, more + (progress.step if steps.startswith("+") else 0), None)
    if minutes is not None:
        more = _number("--minutes", minutes, float)
        return with_length(settings, None, more + (progress.seconds / 60 if minutes.startswith("+") else 0))
    return settings


def _number(flag: str, text: str, kind: type) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not 0 < value < math.inf:
        raise ConfigError(f"{flag} takes a total, or +N for N more, not {text!r}")
    return value
