"""From settings to a trainer: a new run, or one that resumes exactly where it stopped."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elman_core.data import ByteFile, split
from elman_core.data.split import Split
from elman_core.metrics import read_metrics
from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.registry import CheckpointError, ConfigError, DataError
from elman_core.storage import now, remove_leftovers, require_text

from .checkpoint import Progress, last_good, load_checkpoint, set_aside
from .hooks import acting
from .loop import Trainer
from .modes import choose_mode
from .optim import Optimizer, Schedule
from .parallel import check_ranks, kind_of, make_processes, parallel_facts
from .precision import has_bf16, pick_device
from .ranks.group import Ranks, join
from .ranks.launch import reached
from .run.display import Display, backends
from .run.facts import git_commit, hardware, versions
from .run.folder import Elsewhere, RunFolder, manifest_to_resume
from .run.protocol import protocol, protocol_hash
from .settings import RETUNABLE, Settings, resolve, resumed_settings

log = logging.getLogger("elman_core")


def start(settings: Settings, out: Path | None = None, quiet: bool = False) -> Trainer:
    """A new run in the folder `out` (or a new one under runs/). The data is checked before the model is built.

    Under `torchrun` every process calls it, and all of them train one model; the first writes and shows.

    Raises:
        ConfigError, DataError, PluginError, StorageError: on every rank, if it happened on any.
    """
    ranks = join()
    made = ranks.together(lambda: _prepare(settings, ranks, out))
    check_ranks(ranks, made.settings, made.model, made.file, made.device)
    made = made.completed()
    train, asked = made.settings.train, settings.model
    name = "mixed" if isinstance(asked.variant, list) else str(asked.variant)
    folder = _folder(ranks, lambda: RunFolder.create(out, re.sub(r"[^A-Za-z0-9_.-]", "-", name)))
    horizon = {"steps": train.steps, "minutes": train.minutes}
    try:
        trainer = ranks.together(lambda: made.trainer(folder, horizon, quiet))
        comparable = _protocol(trainer, horizon)
        folder.update(
            format=1,
            id=uuid.uuid4().hex,
            status="starting",
            started=now(),
            horizon=horizon,
            protocol=comparable,
            protocol_hash=protocol_hash(comparable),
            asked={"variant": asked.variant, "options": asked.options},
            parameters=sum(p.numel() for p in made.model.parameters()),
            made_with=dict(made.model.config.made_with or {}),
            git_commit=git_commit(Path.cwd()) if ranks.main else None,
            resumed=[],
            **_facts(trainer, made),
        )
    except BaseException:
        folder.discard()
        raise
    if ranks.rank:  # each rank drops out different elements
        torch.manual_seed(train.seed * 4_099 + ranks.rank)
    for line in _first_lines(trainer):
        trainer.display.say(line, indent=12)
    return trainer


def resume(
    path: Path,
    steps: str | None = None,
    minutes: str | None = None,
    data: str | None = None,
    quiet: bool = False,
    sets: Sequence[str] = (),
) -> Trainer | None:
    """The trainer of a run, at its last intact checkpoint; None if the run has already reached the requested length.

    The schedule keeps its original length; after its end, the learning rate keeps its last value.

    Args:
        path: the run. steps: a new total, or `+20` for 20 more. minutes: likewise.
        data: where the text is now, if it was moved.
        sets: settings to change: those in `RESUMABLE` do not affect results; those in `RETUNABLE` do, so the change is recorded
            and becomes part of the run's protocol.

    Raises:
        CheckpointError: not a run, an edited manifest, or no intact checkpoint.
        DataError: the text is not the one the run began with.
        ConfigError: a setting that cannot change in a run. If one rank fails, all ranks raise its error.
    """
    ranks = join()
    settings = ranks.together(lambda: _stored_settings(path, data, sets))
    folder = _folder(ranks, lambda: RunFolder.open(path))
    try:
        return _resume(folder, settings, steps, minutes, quiet, ranks)
    except BaseException:
        folder.close()
        raise


def _resume(
    folder: RunFolder, settings: Settings, steps: str | None, minutes: str | None, quiet: bool, ranks: Ranks
) -> Trainer | None:
    manifest = folder.manifest
    checkpoint = ranks.first(lambda: _last_checkpoint(folder))
    made = ranks.together(lambda: _prepare(settings, ranks, manifest=manifest))
    check_ranks(ranks, settings, made.model, made.file, made.device)
    if ranks.main and (made.model.config.made_with or {}) != manifest["made_with"]:
        log.warning("elman: this run began with %s", ", ".join(manifest["made_with"].values()))
    trainer = ranks.together(lambda: made.trainer(folder, manifest["horizon"], quiet, checkpoint))
    settings = made.settings
    trainer.settings = _extend(settings, trainer.progress, steps, minutes)
    done = trainer.finished and checkpoint is not None
    if done and manifest["status"] == "ok":
        folder.close()
        return None  # otherwise it was killed after its last step, and has yet to evaluate and to record its end
    if not done and trainer.schedule.factor(trainer.step, 1.0) == 0 and _past_horizon(trainer):
        raise ConfigError("the schedule of this run ended at a learning rate of 0: more steps would change nothing")
    ranks.first(lambda: set_aside(folder.checkpoints, checkpoint))
    folder.cut_metrics(trainer.step)
    trainer.evaluated, trainer.evaluation = ranks.first(lambda: _last_evaluation(folder.path, folder.id))
    folder.forget_end()
    before = manifest["settings"]["train"]
    changed = {k: v for k, v in vars(settings.train).items() if v != before.get(k) and f"train.{k}" in RETUNABLE}
    entry: dict[str, Any] = {"at_step": trainer.step, "time": now()}
    if changed:
        entry["set"] = {f"train.{k}": [before.get(k), v] for k, v in changed.items()}
    again = [*manifest["resumed"], entry]
    if changes := [e for e in again if "set" in e]:
        comparable = _protocol(trainer, manifest["horizon"])
        comparable["changed on resume"] = [[e["at_step"], e["set"]] for e in changes]
        folder.update(protocol=comparable, protocol_hash=protocol_hash(comparable))
    folder.update(resumed=again, **_facts(trainer, made))
    for line in _first_lines(trainer, resumed=True):
        trainer.display.say(line, indent=12)
    return trainer


@dataclass(frozen=True)
class _Prepared:
    """What a training needs besides its folder, as one rank holds it.

    Attributes:
        settings: resolved. kind: how ranks share the work: `none`, `ddp` or `fsdp`.
    """

    settings: Settings
    file: ByteFile
    parts: Split
    device: torch.device
    kind: str
    model: Any
    ranks: Ranks

    def completed(self) -> _Prepared:
        """With the text's full path, and the model's presets and defaults written out as its config has them."""
        config, settings = self.model.config, self.settings
        model = dataclasses.replace(settings.model, variant=config.variant, options=config.options)
        data = dataclasses.replace(settings.data, path=str(self.file.path.resolve()))
        return dataclasses.replace(self, settings=dataclasses.replace(settings, model=model, data=data))

    def trainer(
        self, folder: RunFolder, horizon: Mapping[str, Any], quiet: bool, checkpoint: Path | None = None
    ) -> Trainer:
        """The trainer, at the start or at `checkpoint`."""
        train, ranks = self.settings.train, self.ranks
        captured = choose_mode(self.settings, self.model, self.device, sharded=self.kind == "fsdp").captures
        processes = make_processes(self.kind, ranks, self.model, self.device, captured)
        schedule = Schedule(train.schedule, train.warmup or 0, horizon["steps"], train.final_lr, train.decay)  # type: ignore[arg-type]
        optimizer = Optimizer(self.model, train)
        display = Display(folder.log, quiet=quiet or not ranks.main)
        data = (self.file, self.parts)
        made = Trainer(
            folder, self.settings, self.model, optimizer, schedule, data, display, horizon["minutes"], ranks, processes
        )
        if checkpoint is not None:
            made.continue_from(checkpoint, load_checkpoint(checkpoint, self.model, optimizer, ranks, folder.id))
        return made


def _prepare(
    settings: Settings, ranks: Ranks, out: Path | None = None, manifest: Mapping[str, Any] | None = None
) -> _Prepared:
    """Open the text, choose the device and build the model, on this rank alone.

    Args:
        manifest: of the run to resume, whose text and number of CPU threads it keeps.
    """
    require_text(settings.data.path, out)
    if not settings.data.path:
        raise DataError("no training text: give one with --data FILE")
    file = ByteFile(settings.data.path)
    parts = split(file.size, settings.data.heldout)
    if manifest is not None:
        _require_same_text(file, manifest["protocol"]["data"])
    device = pick_device(settings.train.device, ranks)
    if manifest is None:
        settings = resolve(settings, device.type, has_bf16(device))
    else:
        now_, horizon = settings.train, manifest["horizon"]
        asked = dataclasses.replace(now_, steps=horizon["steps"], minutes=horizon["minutes"])
        train = resolve(dataclasses.replace(settings, train=asked), device.type, has_bf16(device)).train
        settings = dataclasses.replace(
            settings, train=dataclasses.replace(train, steps=now_.steps, minutes=now_.minutes)
        )
        threads = manifest["hardware"]["cpu_threads"]
        if device.type == "cpu" and threads <= (os.cpu_count() or 1):
            torch.set_num_threads(threads)  # the order of sums on a CPU depends on it
    kind = kind_of(settings, ranks)
    # A model that is going to be sharded need not fit on one device.
    model = build_model(settings, torch.device("cpu") if kind == "fsdp" else device)
    reached("model")
    return _Prepared(settings, file, parts, device, kind, model, ranks)


def build_model(settings: Settings, device: torch.device) -> Any:
    """A new `LadderForCausalLM` in float32, drawn from `train.seed` on the CPU, so that it is the same on every device.

    Raises:
        ConfigError, PluginError: a variant, option or size that cannot be built.
    """
    chosen = settings.model
    if not chosen.variant:
        raise ConfigError("no variant to train: name one, or give --set model.variant=NAME")
    torch.manual_seed(settings.train.seed)
    config = LadderConfig(**dataclasses.asdict(chosen) | {"options": chosen.options or None})
    return LadderForCausalLM(config).float().to(device).train()


def _protocol(trainer: Trainer, horizon: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that must be equal before two runs are compared, for the length with which the run was started."""
    settings = trainer.settings
    train = dataclasses.replace(settings.train, steps=horizon["steps"], minutes=horizon["minutes"])
    window = trainer.heldout[1] if trainer.heldout else 0
    return protocol(dataclasses.replace(settings, train=train), trainer.file.fingerprint(), window)


def _facts(trainer: Trainer, made: _Prepared) -> dict[str, Any]:
    """The facts that the manifest records at the start and at each resume."""
    return {
        "settings": trainer.settings.to_dict(),
        "versions": versions(made.model.config.made_with or {}),
        "hardware": hardware(made.device),
        "backends": backends(made.model),
        "act_hooks": acting(),
        "step": trainer.mode.facts(),
        "parallel": parallel_facts(made.ranks, made.kind, made.device),
    }


def _first_lines(run: Trainer, resumed: bool = False) -> Iterator[str]:
    """The facts known before the first step: settings, size, back ends, data, the expected loss, the schedule."""
    settings, train, vocabulary = run.settings, run.settings.train, run.model.config.vocab_size
    yield f"run         {run.path}" + (f" (resumed at step {run.step})" if resumed else "")
    for table, values in settings.to_dict().items():
        shown = "  ".join(f"{k}={json.dumps(v)}" for k, v in values.items() if v is not None)
        yield f"{table:12}{shown}"
    yield f"text        {run.file.size:,} bytes, {run.split.in_words}"
    yield f"parameters  {sum(p.numel() for p in run.model.parameters()):,}"
    yield f"backend     {'; '.join(backends(run.model)) or 'no recurrence'} on {run.device}, {train.precision}"
    yield f"steps       {run.mode.name} ({run.mode.why})"
    if run.ranks.size > 1:
        shared = run.manifest["parallel"]
        rows = train.batch_size // run.ranks.size
        yield f"ranks       {run.ranks.size}, {shared['kind']} over {shared['backend']}: {rows} rows of the batch each"
    yield f"loss        expected at the start: {math.log(vocabulary):.4f} nats per byte (ln {vocabulary})"
    if resumed and _past_horizon(run):
        rate = train.lr * run.schedule.factor(run.step, 1.0)
        yield f"schedule    has ended: the learning rate stays at {rate:.2e}"
        return
    of, most = ("steps", "") if train.minutes is None else ("time", ", at most a tenth of the time")
    marks = ", ".join(f"{mark} {factor * train.lr:.2e}" for mark, factor in run.schedule.at_landmarks().items())
    yield f"schedule    {train.schedule}, warm-up {train.warmup} steps{most}; learning rate by share of the {of}: {marks}"


def _folder(ranks: Ranks, take: Callable[[], RunFolder]) -> RunFolder:
    """The run's folder on the first rank; on other ranks a substitute that writes nothing."""
    taken: list[RunFolder] = []

    def tell() -> tuple[Path, dict[str, Any]]:
        taken.append(take())
        return taken[0].path, taken[0].manifest

    path, manifest = ranks.first(tell)
    return taken[0] if taken else Elsewhere(path, manifest)


def _stored_settings(path: Path, data: str | None, sets: Sequence[str]) -> Settings:
    """The settings of the run at `path`, with some set again, and the text at `data` if it was moved."""
    settings = resumed_settings(manifest_to_resume(path)["settings"], sets)
    if data is None:
        return settings
    return dataclasses.replace(settings, data=dataclasses.replace(settings.data, path=str(Path(data).resolve())))


def _last_checkpoint(folder: RunFolder) -> Path | None:
    """The checkpoint to continue from; None if the run was stopped before its first.

    Raises:
        CheckpointError: none is intact, or the run is finished and has none: starting again would delete its metrics.
    """
    for place in (folder.path, folder.checkpoints):
        remove_leftovers(place)
    found = last_good(folder.checkpoints)
    if found is None and folder.manifest.get("status") == "ok":
        done = folder.manifest.get("steps_done", 0)
        raise CheckpointError(
            f"{folder.path} is finished, {done} steps, and has no checkpoint to continue from: restore its checkpoints, or "
            "train again into another folder"
        )
    return found


def _last_evaluation(path: Path, run: str) -> tuple[int, dict[str, Any] | None]:
    """Its step and result; (-1, None) if there was none with a finite loss."""
    lines = [line for line in read_metrics(path, run).evaluations if math.isfinite(line["loss"])]
    return (lines[-1]["step"], {k: v for k, v in lines[-1].items() if k != "kind"}) if lines else (-1, None)


def _require_same_text(file: ByteFile, expected: Mapping[str, Any]) -> None:
    found = file.fingerprint()
    if found != expected:
        raise DataError(
            f"{file.path} is not the text of this run: {found['size']} bytes, fingerprint {found['blake2b']}, instead "
            f"of {expected['size']}, {expected['blake2b']}; give the right one with --data FILE"
        )


def _extend(settings: Settings, progress: Progress, steps: str | None, minutes: str | None) -> Settings:
    if steps is not None and minutes is not None:
        raise ConfigError("give --steps or --minutes, not both")
    train = settings.train
    if steps is not None:
        more = _number("--steps", steps, int)
        train = dataclasses.replace(train, steps=more + progress.step * steps.startswith("+"), minutes=None)
    if minutes is not None:
        more = _number("--minutes", minutes, float)
        done = progress.seconds / 60 if minutes.startswith("+") else 0.0
        train = dataclasses.replace(train, steps=None, minutes=done + more)
    return dataclasses.replace(settings, train=train)


def _number(flag: str, text: str, kind: type) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not 0 < value < math.inf:
        raise ConfigError(f"{flag} takes a total, or +N for N more, not {text!r}")
    return value


def _past_horizon(trainer: Trainer) -> bool:
    if trainer.schedule.horizon is not None:
        return trainer.step >= trainer.schedule.horizon
    return trainer.progress.seconds >= 60 * (trainer.minutes_horizon or 0)
