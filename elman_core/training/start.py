"""From settings to a trainer: a new run, or one that goes on exactly where it was."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch

from elman_core.data import ByteFile, split
from elman_core.data.split import Split
from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.registry import ConfigError, DataError

from .checkpoint import Progress, last_good, load_checkpoint, set_aside
from .display import Display, backends, first_lines
from .hooks import acting
from .loop import Trainer
from .optim import Optimizer
from .precision import has_bf16, pick_device
from .protocol import protocol, protocol_hash
from .run import RunFolder, git_commit, hardware, now, read_manifest, versions
from .schedule import Schedule
from .settings import Settings, from_dict, resolve
from .storage import remove_leftovers

log = logging.getLogger("elman_core")


def open_data(settings: Settings) -> tuple[ByteFile, Split]:
    """The file and its split. Raises `DataError`."""
    if not settings.data.path:
        raise DataError("no training text: give one with --data FILE")
    file = ByteFile(settings.data.path)
    return file, split(file.size, settings.data.heldout)


def build_model(settings: Settings, device: torch.device) -> Any:
    """A new `LadderForCausalLM` in float32, drawn from `train.seed` on the CPU, so that it is the same on every device.

    Raises:
        ConfigError, PluginError: a variant, option or size that cannot be built.
    """
    chosen = settings.model
    if not chosen.variant:
        raise ConfigError("no variant to train: name one, or give --set model.variant=NAME")
    torch.manual_seed(settings.train.seed)
    config = LadderConfig(
        variant=chosen.variant,
        options=chosen.options or None,
        hidden_size=chosen.hidden_size,
        num_hidden_layers=chosen.num_hidden_layers,
        norm_eps=chosen.norm_eps,
        initializer_range=chosen.initializer_range,
        tie_word_embeddings=chosen.tie_word_embeddings,
    )
    return LadderForCausalLM(config).float().to(device).train()


def start(settings: Settings, out: Path | None = None, quiet: bool = False) -> Trainer:
    """A new run in the folder `out` (or a new one under runs/). The data is looked at before the model is built.

    Raises:
        ConfigError, DataError, PluginError, StorageError.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("this version trains on one device: start it without torchrun")
    data = open_data(settings)
    device = pick_device(settings.train.device)
    settings = resolve(settings, device.type, has_bf16(device))
    model = build_model(settings, device)
    where = dataclasses.replace(settings.data, path=str(data[0].path.resolve()))
    settings = dataclasses.replace(settings, model=_expanded(settings, model), data=where)
    name = settings.model.variant if isinstance(settings.model.variant, str) else "mixed"
    folder = RunFolder.create(out, re.sub(r"[^A-Za-z0-9_.-]", "-", name))
    train = settings.train
    horizon = {"steps": train.steps, "minutes": train.minutes}
    try:
        trainer = _assemble(folder, settings, model, data, Progress(), horizon, quiet)
    except BaseException:
        folder.discard()
        raise
    comparable = protocol(settings, data[0].fingerprint(), trainer.heldout[1] if trainer.heldout else 0)
    folder.update(
        format=1,
        status="starting",
        started=now(),
        settings=settings.to_dict(),
        horizon=horizon,
        protocol=comparable,
        protocol_hash=protocol_hash(comparable),
        parameters=sum(p.numel() for p in model.parameters()),
        made_with=dict(model.config.made_with or {}),
        versions=versions(model.config.made_with or {}),
        hardware=hardware(device),
        backends=backends(model),
        act_hooks=acting(),
        step=trainer.mode.facts(),
        git_commit=git_commit(Path.cwd()),
        resumed=[],
    )
    for line in first_lines(trainer, resumed=False):
        trainer.display.say(line)
    return trainer


def resume(
    path: Path, steps: str | None = None, minutes: str | None = None, data: str | None = None, quiet: bool = False
) -> Trainer | None:
    """The trainer of a run, at its last good checkpoint; None if everything asked for has been done.

    The schedule keeps the horizon that it had when the run started; after it, the learning rate stays where it ended.

    Args:
        path: the run. steps: a new total, or `+20` for so many more. minutes: likewise.
        data: where the text is now, if it was moved.

    Raises:
        CheckpointError: not a run, or no checkpoint is intact. DataError: the text is not the one the run began with.
    """
    manifest = read_manifest(path)
    settings = from_dict(manifest["settings"])
    folder = RunFolder.open(path)
    try:
        return _resume(folder, settings, steps, minutes, data, quiet)
    except BaseException:
        folder.close()
        raise


def _resume(
    folder: RunFolder, settings: Settings, steps: str | None, minutes: str | None, data: str | None, quiet: bool
) -> Trainer | None:
    manifest = folder.manifest
    if data is not None:
        moved = dataclasses.replace(settings.data, path=str(Path(data).resolve()))
        settings = dataclasses.replace(settings, data=moved)
    remove_leftovers(folder.checkpoints)
    checkpoint = last_good(folder.checkpoints)
    opened = open_data(settings)
    found, expected = opened[0].fingerprint(), manifest["protocol"]["data"]
    if found != expected:
        raise DataError(
            f"{settings.data.path} is not the text of this run: {found['size']} bytes, fingerprint {found['blake2b']}, instead "
            f"of {expected['size']}, {expected['blake2b']}; give the right one with --data FILE"
        )
    device = pick_device(settings.train.device)
    _use_threads(manifest["hardware"]["cpu_threads"], device)
    model = build_model(settings, device)
    if (model.config.made_with or {}) != manifest["made_with"]:
        log.warning("elman: this run began with %s", ", ".join(manifest["made_with"].values()))
    trainer = _assemble(folder, settings, model, opened, Progress(), manifest["horizon"], quiet)
    if checkpoint is not None:
        trainer.progress = load_checkpoint(checkpoint, model, trainer.optimizer)
        trainer.saved = (trainer.step, checkpoint)
    trainer.settings = _extend(settings, trainer.progress, steps, minutes)
    if trainer.finished and checkpoint is not None:
        folder.close()
        return None
    if (trainer.schedule.factor(trainer.step, 1.0)) == 0 and _past(trainer):
        raise ConfigError("the schedule of this run ended at a learning rate of 0: more steps would change nothing")
    set_aside(folder.checkpoints, checkpoint)
    folder.cut_metrics(trainer.step)
    folder.update(
        settings=trainer.settings.to_dict(),
        hardware=hardware(device),
        backends=backends(model),
        act_hooks=acting(),
        step=trainer.mode.facts(),
        versions=versions(model.config.made_with or {}),
        resumed=[*manifest["resumed"], {"at_step": trainer.step, "time": now()}],
    )
    for line in first_lines(trainer, resumed=True):
        trainer.display.say(line)
    return trainer


def _assemble(
    folder: RunFolder,
    settings: Settings,
    model: Any,
    data: tuple[ByteFile, Split],
    progress: Progress,
    horizon: dict[str, Any],
    quiet: bool,
) -> Trainer:
    train = settings.train
    schedule = Schedule(train.schedule, train.warmup or 0, horizon["steps"], train.final_lr, train.decay)  # type: ignore[arg-type]
    optimizer = Optimizer(model, train)
    display = Display(folder.log, quiet=quiet)
    return Trainer(folder, settings, model, optimizer, schedule, data, display, progress, horizon["minutes"])


def _use_threads(count: int, device: torch.device) -> None:
    """As many threads as the run began with, if there are as many here: the order of sums on a CPU depends on it."""
    if device.type == "cpu" and count <= (os.cpu_count() or 1):
        torch.set_num_threads(count)


def _expanded(settings: Settings, model: Any) -> Any:
    """The model's table with presets and defaults written out, as its config has them."""
    return dataclasses.replace(settings.model, variant=model.config.variant, options=model.config.options)


def _extend(settings: Settings, progress: Progress, steps: str | None, minutes: str | None) -> Settings:
    if steps is not None and minutes is not None:
        raise ConfigError("give --steps or --minutes, not both")
    train = settings.train
    if steps is not None:
        more = _number("--steps", steps, int)
        total = progress.step + more if steps.startswith("+") else more
        train = dataclasses.replace(train, steps=int(total), minutes=None)
    if minutes is not None:
        more = _number("--minutes", minutes, float)
        total = progress.seconds / 60 + more if minutes.startswith("+") else more
        train = dataclasses.replace(train, steps=None, minutes=float(total))
    return dataclasses.replace(settings, train=train)


def _number(flag: str, text: str, kind: type) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if value <= 0:
        raise ConfigError(f"{flag} takes a total, or +N for so many more, not {text!r}")
    return value


def _past(trainer: Trainer) -> bool:
    """Whether the schedule's horizon lies behind."""
    if trainer.schedule.horizon is not None:
        return trainer.step >= trainer.schedule.horizon
    return trainer.progress.seconds >= 60 * (trainer.minutes_horizon or 0)
