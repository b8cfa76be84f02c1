"""The plan of a training, decided once before its first step: from settings, and from the manifest if a run is resumed."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.model.checkpoint import load_checkpoint
from elman_core.registry import CheckpointError, ConfigError

from . import begin
from .hooks import acting, hook_plugins
from .modes import Mode, choose_mode
from .objective import require_constant_state
from .optim import Schedule
from .parallel import kind_of
from .precision import has_bf16, pick_device
from .ranks.group import Ranks
from .ranks.launch import reached
from .run.display import backends
from .run.facts import hardware, versions
from .run.protocol import protocol
from .settings import Settings, resolve, with_length
from .text import Text

log = logging.getLogger("elman_core")


@dataclass(frozen=True)
class Plan:
    """A training as one rank holds it before its first step: everything but its folder and the state that steps change.

    Attributes:
        settings: resolved; of a new run with the text's full path and the model's presets and defaults written out.
        began: the same for the length with which the run began, for which its schedule and its protocol are made.
        parallel: how ranks share a step: `none`, `ddp` or `fsdp`.
        mode: how a step is launched.
        init: the model that the training began with, for the manifest; None for new weights.
        model: a `LadderForCausalLM` in training mode, on `device`; on the CPU if it is going to be sharded.
    """

    settings: Settings
    began: Settings
    text: Text
    ranks: Ranks
    device: torch.device
    parallel: str
    mode: Mode
    model: Any
    schedule: Schedule
    init: dict[str, str] | None = None

    @property
    def backend(self) -> str | None:
        """The library by which the ranks exchange tensors; None for a single process."""
        if self.ranks.size == 1:
            return None
        return "nccl" if self.device.type == "cuda" else "gloo"

    def protocol(self) -> dict[str, Any]:
        window = max((held.length for _, held in self.text.heldout), default=0)
        return protocol(self.began, self.text.fingerprint(), window)

    def facts(self) -> dict[str, Any]:
        """The facts that the manifest records at the start and at each resume."""
        facts: dict[str, Any] = {
            "settings": self.settings.to_dict(),
            "text_digests": self.text.digests(),
            "versions": versions(self.model.config.made_with or {}),
            "hardware": hardware(self.device),
            "backends": backends(self.model),
            "act_hooks": acting(),
            "step": self.mode.facts(),
            "parallel": {"kind": self.parallel, "ranks": self.ranks.size, "backend": self.backend},
        }
        if self.init:
            facts["init"] = self.init
        if self.settings.data.documents == "reset":
            facts["documents"] = "starts"  # not a cut, as before
        if self.text.windows.tokenizer:
            facts["bytes_per_token"] = self.text.windows.bytes_per_token
        return facts

    def require_same(self) -> None:
        """Compare the settings, versions, plugins and text of all ranks.
        Raises `ConfigError` if they differ; it names the rank and its value."""
        if self.ranks.size == 1:
            return
        text = self.text.fingerprint()
        data = dataclasses.replace(self.settings.data, path="", heldout_file="")  # may be mounted elsewhere
        facts = {
            **versions(self.model.config.made_with or {}),
            "settings": dataclasses.replace(self.settings, data=data).to_dict(),
            "hooks": hook_plugins(),
            "a text of size": text["size"],
            "a text with the fingerprint": text["blake2b"],
            "a model to begin with": self.init,
        }
        self.ranks.require_same(facts)
        kinds = self.ranks.gather(torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu")
        if self.ranks.main and len(set(kinds)) > 1:
            log.warning("elman: the ranks run on %s: the slowest sets the pace", ", ".join(sorted(set(kinds))))


def decide(
    settings: Settings,
    text: Text,
    ranks: Ranks,
    manifest: Mapping[str, Any] | None = None,
    checkpoint: Path | None = None,
) -> Plan:
    """Choose the device, resolve the settings and build the model, on this rank alone.

    Args:
        text: of these settings. manifest: of the run to resume, whose horizon and number of CPU threads are kept.
        checkpoint: the one to resume from, if there is one.

    Raises as `build_model`, `CheckpointError` for another model than the run began with, and `ConfigError` for settings that
    cannot be trained with here.
    """
    device = pick_device(settings.train.device, ranks)
    if manifest is None:
        settings = began = resolve(settings, device.type, has_bf16(device))
    else:
        began = resolve(with_length(settings, **manifest["horizon"]), device.type, has_bf16(device))
        settings = with_length(began, settings.train.steps, settings.train.minutes)
        threads = manifest["hardware"]["cpu_threads"]
        if device.type == "cpu" and threads <= (os.cpu_count() or 1):
            torch.set_num_threads(threads)  # the order of sums on a CPU depends on it
    train = settings.train
    parallel = kind_of(settings, ranks)
    # A model that is going to be sharded need not fit on one device.
    source = checkpoint or begin.source_of(settings.model, new=manifest is None)
    vocab_size = text.windows.vocab_size
    made_with = manifest["made_with"] if manifest and ranks.main else None  # one rank says what has changed
    model = build_model(settings, torch.device("cpu") if parallel == "fsdp" else device, source, vocab_size, made_with)
    init = manifest.get("init") if manifest else None
    if source and not checkpoint:
        found = begin.facts(model, source, settings.model)
        if init not in (None, found):
            raise CheckpointError(f"{source} is no longer the model that this run began with")
        init = found
    begin.take_tokens(model, text.windows, settings.model.init)
    reached("model")
    if settings.data.sampling == "tbptt":
        require_constant_state(model, "data.sampling='tbptt'")
    mode = choose_mode(settings, model, device, sharded=parallel == "fsdp")
    plugins = acting().get("elman_loss_terms")
    if train.loss_chunk and plugins:
        raise ConfigError(f"plugin {plugins[0]} adds loss terms and may need all logits: set train.loss_chunk=0")
    if manifest is None:
        names = {f.name for f in dataclasses.fields(settings.model)} & vars(model.config).keys()
        chosen = dataclasses.replace(settings.model, **{name: getattr(model.config, name) for name in names})
        chosen = dataclasses.replace(chosen, init=init["model"] if init else "")
        settings = began = dataclasses.replace(settings, model=chosen)
    held = text.heldout_file.value if text.heldout_file else ""
    data = dataclasses.replace(settings.data, path=text.path, heldout_file=held)
    settings = dataclasses.replace(settings, data=data)
    began = dataclasses.replace(began, data=data)
    schedule = Schedule(train.schedule, train.warmup or 0, began.train.steps, train.final_lr, train.decay)  # type: ignore[arg-type]
    return Plan(settings, began, text, ranks, device, parallel, mode, model, schedule, init)


def build_model(
    settings: Settings,
    device: torch.device,
    source: str | Path | None = None,
    vocab_size: int = 256,
    made_with: Mapping[str, str] | None = None,
) -> Any:
    """A `LadderForCausalLM` in float32 in training mode: the one of `source`, or a new one for tokens below `vocab_size`, drawn
    from `train.seed` on the CPU, so that it is the same on every device. made_with: the packages of a run that is resumed.
    Raises `CheckpointError` if `source` cannot be loaded, `ConfigError` or `PluginError` for a variant, option or size that
    cannot be built."""
    chosen = settings.model
    if not chosen.variant and not chosen.init:
        raise ConfigError("no variant to train: name one, or give --set model.variant=NAME or --init MODEL")
    torch.manual_seed(settings.train.seed)
    if chosen.init:
        model = load_checkpoint(source or chosen.init, dtype="float32")
        torch.manual_seed(settings.train.seed)
    else:
        tree = dataclasses.asdict(chosen) | {"options": chosen.options or None, "vocab_size": vocab_size}
        tree["made_with"] = made_with
        fields = {k: v for k, v in tree.items() if k not in ("init", "init_optimizer")}
        model = LadderForCausalLM(LadderConfig(**fields))
    return model.float().to(device).train()
