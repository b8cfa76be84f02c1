"""From settings to a trainer: a new run, or one that goes on exactly where it was."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from elman_core.data import ByteFile, split
from elman_core.data.split import Split
from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.registry import CheckpointError, ConfigError, DataError

from .checkpoint import Progress, last_good, load_checkpoint, set_aside
from .display import Display, backends, first_lines
from .distributed import Ranks, join
from .hooks import acting
from .loop import Trainer
from .modes import choose_mode
from .optim import Optimizer
from .parallel import check_ranks, kind_of, make_processes, parallel_facts
from .phases import reached
from .precision import has_bf16, pick_device
from .protocol import protocol, protocol_hash
from .run import Elsewhere, RunFolder, git_commit, hardware, manifest_to_resume, now, read_metrics, versions
from .schedule import Schedule
from .settings import Settings, resolve, resumed_settings
from .storage import remove_leftovers, require_text

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

    Under `torchrun` every process calls it, and all of them train one model; the first writes and shows.

    Raises:
        ConfigError, DataError, PluginError, StorageError: on every rank, if it happened on any.
    """
    ranks = join()
    ranks.together(lambda: require_text(settings.data.path, out))
    data = ranks.together(lambda: open_data(settings))
    device = ranks.together(lambda: pick_device(settings.train.device, ranks))
    settings = ranks.together(lambda: resolve(settings, device.type, has_bf16(device)))
    kind = ranks.together(lambda: kind_of(settings, ranks))
    model = ranks.together(lambda: build_model(settings, _built_on(kind, device)))
    reached("model")
    check_ranks(ranks, settings, model, data[0], device)
    where = dataclasses.replace(settings.data, path=str(data[0].path.resolve()))
    settings = dataclasses.replace(settings, model=_expanded(settings, model), data=where)
    name = settings.model.variant if isinstance(settings.model.variant, str) else "mixed"
    folder = _folder(ranks, lambda: RunFolder.create(out, re.sub(r"[^A-Za-z0-9_.-]", "-", name)))
    train = settings.train
    horizon = {"steps": train.steps, "minutes": train.minutes}
    try:
        trainer = ranks.together(
            lambda: _assemble(folder, settings, model, data, Progress(), horizon, quiet, ranks, kind, device)
        )
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
            parallel=parallel_facts(ranks, kind, device),
            git_commit=git_commit(Path.cwd()) if ranks.main else None,
            resumed=[],
        )
    except BaseException:
        folder.discard()
        raise
    if ranks.rank:  # the ranks drop out different elements
        torch.manual_seed(train.seed * 4_099 + ranks.rank)
    for line in first_lines(trainer, resumed=False):
        trainer.display.say(line)
    return trainer


def resume(
    path: Path,
    steps: str | None = None,
    minutes: str | None = None,
    data: str | None = None,
    quiet: bool = False,
    sets: Sequence[str] = (),
) -> Trainer | None:
    """The trainer of a run, at its last good checkpoint; None if everything asked for has been done.

    The schedule keeps the horizon that it had when the run started; after it, the learning rate stays where it ended.

    Args:
        path: the run. steps: a new total, or `+20` for so many more. minutes: likewise.
        data: where the text is now, if it was moved.
        sets: further settings, of those that change no number that is compared: `RESUMABLE`.

    Raises:
        CheckpointError: not a run, or no checkpoint is intact. DataError: the text is not the one the run began with.
        ConfigError: a setting that a run keeps. All of them on every rank, if it happened on any.
    """
    ranks = join()
    manifest = ranks.together(lambda: manifest_to_resume(path))
    settings = ranks.together(lambda: resumed_settings(manifest["settings"], sets))
    folder = _folder(ranks, lambda: RunFolder.open(path))
    try:
        return _resume(folder, settings, steps, minutes, data, quiet, ranks)
    except BaseException:
        folder.close()
        raise


def _resume(
    folder: RunFolder,
    settings: Settings,
    steps: str | None,
    minutes: str | None,
    data: str | None,
    quiet: bool,
    ranks: Ranks,
) -> Trainer | None:
    manifest = folder.manifest
    if data is not None:
        moved = dataclasses.replace(settings.data, path=str(Path(data).resolve()))
        settings = dataclasses.replace(settings, data=moved)
    checkpoint = ranks.first(lambda: _last_checkpoint(folder))
    opened = ranks.together(lambda: _same_text(settings, manifest["protocol"]["data"]))
    device = ranks.together(lambda: pick_device(settings.train.device, ranks))
    _use_threads(manifest["hardware"]["cpu_threads"], device)
    kind = ranks.together(lambda: kind_of(settings, ranks))
    model = ranks.together(lambda: build_model(settings, _built_on(kind, device)))
    reached("model")
    check_ranks(ranks, settings, model, opened[0], device)
    if ranks.main and (model.config.made_with or {}) != manifest["made_with"]:
        log.warning("elman: this run began with %s", ", ".join(manifest["made_with"].values()))
    trainer = ranks.together(
        lambda: _assemble(folder, settings, model, opened, Progress(), manifest["horizon"], quiet, ranks, kind, device)
    )
    if checkpoint is not None:
        progress = ranks.together(lambda: load_checkpoint(checkpoint, model, trainer.optimizer, ranks))
        trainer.take_up(checkpoint, progress)
    trainer.settings = _extend(settings, trainer.progress, steps, minutes)
    done = trainer.finished and checkpoint is not None
    if done and manifest["status"] == "ok":
        folder.close()
        return None  # otherwise it was killed after its last step: what is left is to evaluate and to say how it ended
    if not done and (trainer.schedule.factor(trainer.step, 1.0)) == 0 and _past(trainer):
        raise ConfigError("the schedule of this run ended at a learning rate of 0: more steps would change nothing")
    ranks.first(lambda: set_aside(folder.checkpoints, checkpoint))
    folder.cut_metrics(trainer.step)
    trainer.evaluated, trainer.evaluation = ranks.first(lambda: _last_evaluation(folder.path))
    folder.forget_end()
    folder.update(
        settings=trainer.settings.to_dict(),
        hardware=hardware(device),
        backends=backends(model),
        act_hooks=acting(),
        step=trainer.mode.facts(),
        parallel=parallel_facts(ranks, kind, device),
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
    ranks: Ranks,
    kind: str,
    device: torch.device,
) -> Trainer:
    train = settings.train
    captured = choose_mode(settings, model, device, sharded=kind == "fsdp").captures
    processes = make_processes(kind, ranks, model, device, captured)
    schedule = Schedule(train.schedule, train.warmup or 0, horizon["steps"], train.final_lr, train.decay)  # type: ignore[arg-type]
    optimizer = Optimizer(model, train)
    display = Display(folder.log, quiet=quiet or not ranks.main)
    minutes = horizon["minutes"]
    return Trainer(folder, settings, model, optimizer, schedule, data, display, progress, minutes, ranks, processes)


def _folder(ranks: Ranks, take: Callable[[], RunFolder]) -> RunFolder:
    """The run's folder on the first rank, and on the others what stands for it."""
    taken: list[RunFolder] = []

    def tell() -> tuple[Path, dict[str, Any]]:
        taken.append(take())
        return taken[0].path, taken[0].manifest

    path, manifest = ranks.first(tell)
    return taken[0] if taken else Elsewhere(path, manifest)


def _built_on(kind: str, device: torch.device) -> torch.device:
    """A model that is going to be shared out need not fit on one device."""
    return torch.device("cpu") if kind == "fsdp" else device


def _last_checkpoint(folder: RunFolder) -> Path | None:
    """The checkpoint to go on from; None if the run was stopped before its first.

    Raises:
        CheckpointError: none is intact, or the run is finished and has none: beginning anew would cut its metrics to nothing.
    """
    remove_leftovers(folder.checkpoints)
    found = last_good(folder.checkpoints)
    if found is None and folder.manifest.get("status") == "ok":
        done = folder.manifest.get("steps_done", 0)
        raise CheckpointError(
            f"{folder.path} is finished, {done} steps, and has no checkpoint to go on from: put its checkpoints back, or train "
            "anew into another folder"
        )
    return found


def _last_evaluation(path: Path) -> tuple[int, dict[str, Any] | None]:
    """Its step and what it found; (-1, None) if there was none that found a number."""
    lines = [line for line in read_metrics(path) if line["kind"] == "evaluation" and math.isfinite(line["loss"])]
    return (lines[-1]["step"], {k: v for k, v in lines[-1].items() if k != "kind"}) if lines else (-1, None)


def _same_text(settings: Settings, expected: Mapping[str, Any]) -> tuple[ByteFile, Split]:
    opened = open_data(settings)
    found = opened[0].fingerprint()
    if found != expected:
        raise DataError(
            f"{settings.data.path} is not the text of this run: {found['size']} bytes, fingerprint {found['blake2b']}, instead "
            f"of {expected['size']}, {expected['blake2b']}; give the right one with --data FILE"
        )
    return opened


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
    if not 0 < value < math.inf:
        raise ConfigError(f"{flag} takes a total, or +N for so many more, not {text!r}")
    return value


def _past(trainer: Trainer) -> bool:
    """Whether the schedule's horizon lies behind."""
    if trainer.schedule.horizon is not None:
        return trainer.step >= trainer.schedule.horizon
    return trainer.progress.seconds >= 60 * (trainer.minutes_horizon or 0)
