"""Everything that decides what a training does, as one tree of frozen dataclasses; recipes are this tree as TOML.

Three tables: `model` (what is trained), `data` (on what), `train` (how). On the command line each leaf is
`--set table.name=value`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from elman_core.registry import ConfigError, check_value, did_you_mean, get_variant, option


@dataclass(frozen=True)
class ModelSettings:
    """The model: the fields of `LadderConfig` that a recipe may choose, or a model to begin with, which decides them."""

    init: str = option(
        "", "a run, checkpoint, pretrained/NAME or hub id to begin with, which decides the rest of this table"
    )
    init_optimizer: Literal["drop", "keep"] = option(
        "drop", "init: begin with a new optimizer, or with the state of its optimizer, of a run or a checkpoint"
    )
    variant: str | list = option("", "name, name:preset, pattern such as a*3+b, or one for each layer")  # noqa: RUF009
    options: dict | list = field(default_factory=dict, metadata={"help": "options of the variant"})
    hidden_size: int = option(512, "width D", ge=1)
    num_hidden_layers: int = option(6, "depth L", ge=1)
    mlp_ratio: float = option(0.0, "width / D of a SwiGLU after each layer; 0: none", ge=0, le=16)
    norm_eps: float = option(1e-5, "epsilon of the backbone's norms", gt=0)
    initializer_range: float = option(
        0.02, "standard deviation of the embedding, of an untied head at most dim^-1/2", gt=0
    )
    tie_word_embeddings: bool = option(True, "the head is the embedding")


@dataclass(frozen=True)
class DataSettings:
    """The text and how it is read."""

    path: str | list = option("", "FILE, or several, each FILE[:WEIGHT] or, of an extension, NAME:OPTIONS")  # noqa: RUF009
    sampling: Literal["random", "stream", "tbptt"] = option(
        "random", "random offsets; contiguous streams; streams with the state carried from step to step"
    )
    documents: Literal["keep", "reset", "pack"] = option(
        "keep", "keep the state; tbptt: reset it before each 0x1e; fill rows with whole documents, each read alone"
    )
    heldout: float = option(0.01, "fraction held out, at least min(1 MiB, 10 %); 0: nothing", ge=0, le=0.5)
    heldout_file: str = option("", "evaluate on this file instead, and hold nothing out")
    eval_bytes: int | None = option(
        None,
        "most bytes (tokens) to score in one evaluation; by default, from 64 KiB to 1 MiB, a tenth of what the training reads, "
        "or 64 KiB a minute",
        ge=1,
    )


@dataclass(frozen=True)
class TrainSettings:
    """The training. None means: decided when the run starts, and written into its manifest."""

    batch_size: int = option(32, "rows of an optimizer step, over all micro-batches", ge=1)
    chunk_size: int = option(512, "bytes predicted in a row", ge=1)
    steps: int | None = option(None, "optimizer steps; 1000 if no length is given", ge=0)
    minutes: float | None = option(None, "minutes of training instead of steps, from the end of the first step", gt=0)
    lr: float = option(1e-3, "peak learning rate", gt=0)
    warmup: int | None = option(
        None,
        "steps of linear warm-up: by default 100, or a tenth of the steps if that is less; at most a tenth of the minutes",
        ge=0,
    )
    schedule: Literal["auto", "cosine", "wsd", "constant"] = option(
        "auto", "after warm-up: cosine; stable, then linear decay; constant. auto: cosine, or wsd under minutes"
    )
    decay: float = option(0.2, "wsd: the last fraction of the horizon, which decays", gt=0, le=1)
    final_lr: float = option(0.1, "the schedule's end, as a fraction of lr", ge=0, le=1)
    optimizer: Literal["adamw", "schedulefree", "muon"] = option(
        "adamw", "schedulefree: AdamW with averaging instead of a schedule; muon: Muon for the matrices of layers"
    )
    weight_decay: float = option(0.1, "decoupled; never on vectors and decay rates", ge=0)
    beta1: float = option(0.9, "momentum", gt=0, lt=1)
    beta2: float = option(0.95, "second moment", ge=0, lt=1)
    clip: float = option(1.0, "largest norm of the gradient; 0: no clipping", ge=0)
    accumulate: int = option(1, "micro-batches a step: less memory, same loss", ge=1)
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto", "compute dtype; weights are fp32. auto: bf16 on a GPU that supports it"
    )
    launch: Literal["auto", "eager", "graph", "compile", "compile+graph"] = option(
        "auto", "how a step runs: kernel by kernel; as one CUDA graph; compiled. auto: graph on a GPU if possible"
    )
    gradient_checkpointing: bool = option(False, "recompute each block in the backward: less memory")
    loss_chunk: int = option(0, "time steps whose logits exist at once; 0: all", ge=0)
    tuned: list = field(
        default_factory=list, metadata={"help": "settings besides train.lr that a suite tunes for each model"}
    )
    parallel: Literal["auto", "ddp", "fsdp"] = option(
        "auto", "several processes: the whole model on each (ddp), or sharded over them (fsdp). auto: ddp"
    )
    seed: int = option(42, "seed of the weights and of the batches", ge=0)
    device: str = option("auto", "auto, cpu, cuda, cuda:1")
    save_every: int = option(1000, "steps between checkpoints; the end is always saved; 0: only the end", ge=0)
    keep: int = option(3, "checkpoints kept; 0: all", ge=0)
    eval_every: int = option(1000, "steps between evaluations; the end is always evaluated; 0: only the end", ge=0)
    log_every: int = option(10, "steps between plain lines where there is no terminal", ge=1)
    loggers: str = option("", "installed loggers that also get the figures, separated by commas: tensorboard, wandb, …")

    def is_done(self, step: int, seconds: float) -> bool:
        """Whether so many steps, or so many seconds of training, reach the length of resolved settings."""
        return step >= self.steps if self.steps is not None else seconds >= 60 * (self.minutes or 0)


@dataclass(frozen=True)
class Settings:
    """The whole tree."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    train: TrainSettings = field(default_factory=TrainSettings)

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.train.chunk_size

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        return dataclasses.asdict(self)


def evaluation_bytes(settings: Settings) -> int:
    """`data.eval_bytes`, or what its default means for these settings."""
    if settings.data.eval_bytes is not None:
        return settings.data.eval_bytes
    train = settings.train
    steps = 1000 if train.steps is None else train.steps
    share = steps * settings.tokens_per_step // 10 if train.minutes is None else int(train.minutes * 2**16)
    return min(2**20, max(2**16, share))


TUNABLE = (
    "train.lr", "train.warmup", "train.schedule", "train.decay", "train.final_lr",
    "train.optimizer", "train.weight_decay", "train.beta1", "train.beta2", "train.clip",
)  # fmt: skip
"""Settings that may be tuned for each model: they change neither the text nor how much of it a step reads."""

TABLES: dict[str, type] = {"model": ModelSettings, "data": DataSettings, "train": TrainSettings}


def known_keys() -> list[str]:
    """Every `table.name` there is."""
    return [f"{table}.{f.name}" for table, kind in TABLES.items() for f in dataclasses.fields(kind)]


def from_dict(tree: Mapping[str, Any], where: str = "") -> Settings:
    """Settings from nested tables. Raises `ConfigError`, which begins with `where`, for an unknown key (with the nearest known
    one), a wrong type, and a value out of its range."""
    parts = {}
    for table, values in tree.items():
        if table not in TABLES:
            raise ConfigError(f"{where}no table {table!r}.{did_you_mean(table, TABLES)} Tables: {', '.join(TABLES)}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}{table} is a table of settings, not {values!r}")
        kind = TABLES[table]
        hints = typing.get_type_hints(kind)
        limits = {f.name: f.metadata for f in dataclasses.fields(kind)}
        for name in values:
            if name not in limits:
                raise _unknown(f"{table}.{name}", where, _options(tree))
        checked = {n: check_value(f"{where}{table}.{n}", v, hints[n], limits[n]) for n, v in values.items()}
        parts[table] = kind(**checked)
    return Settings(**parts)


RESUMABLE = (
    "train.accumulate", "train.loss_chunk", "train.gradient_checkpointing", "train.parallel", "train.device",
    "train.save_every", "train.keep", "train.eval_every", "train.log_every", "train.loggers",
)  # fmt: skip
"""Settings that may change on resume: they affect memory, speed and output, and nothing that is compared."""

RETUNABLE = tuple(key for key in TUNABLE if key != "train.optimizer")
"""Settings that may change on resume, too: the change becomes part of the run's protocol."""


def resumed_settings(stored: Mapping[str, Any], sets: Iterable[str]) -> Settings:
    """The settings of a run, with some changed. Raises `ConfigError` for one that a run keeps."""
    assignments = list(sets)
    may = (*RESUMABLE, *RETUNABLE)
    for text in assignments:
        key = text.partition("=")[0].strip()
        known = key in known_keys() or key.startswith("model.options.")
        if known and key not in (*may, "data.heldout_file"):  # the last: the same text elsewhere
            raise ConfigError(f"a run keeps its {key}; on resume you may set {', '.join(may)}")
    return from_dict(apply_sets(dict(stored), assignments))


def read_recipe(path: Path) -> dict[str, Any]:
    """The tables of a TOML recipe. Raises `ConfigError` if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"recipe {path} is not valid TOML: {error}") from error


def apply_sets(tree: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """`tree` with each `table.name=value` put in; values are TOML, and a bare word is a string.
    Raises `ConfigError` for what is no assignment, and for an unknown key."""
    result = {table: dict(values) if isinstance(values, Mapping) else values for table, values in tree.items()}
    for text in assignments:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"--set takes key=value, such as --set train.lr=1e-3, not {text!r}")
        put(result, key, _parse(key, value.strip()))
    return result


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Put `value` under `table.name`, `model.options.name` or, of several variants, `model.options.variant.name`.
    Raises `ConfigError` for a key that does not exist."""
    table, _, name = key.partition(".")
    if table == "model" and name.startswith("options."):
        model = tree.setdefault("model", {})
        options = _table("model.options", model.get("options", {}))
        variant, dot, own = name.removeprefix("options.").rpartition(".")
        if dot:
            options[variant] = _table(f"model.options.{variant}", options.get(variant, {}))
            options[variant][own] = value
        else:
            options[own] = value
        model["options"] = options
        return
    if key not in known_keys():
        raise _unknown(key, options=_options(tree))
    tree.setdefault(table, {})[name] = value


def _table(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is no table of options, but {value!r}: give the whole of it, --set {key}=…")
    return dict(value)


def resolve(settings: Settings, device_type: str, bf16: bool) -> Settings:
    """`settings` with every None and "auto" decided, so that the manifest records what ran. `bf16`: whether the device
    computes in bfloat16 well. Raises `ConfigError` for settings that contradict each other."""
    train, data = settings.train, settings.data
    if train.steps is not None and train.minutes is not None:
        raise ConfigError("give train.steps or train.minutes, not both")
    if train.batch_size % train.accumulate:
        raise ConfigError(
            f"train.batch_size {train.batch_size} does not divide into train.accumulate {train.accumulate} equal micro-batches"
        )
    for key in train.tuned:
        if key not in TUNABLE:
            raise ConfigError(
                f"train.tuned: {key!r} cannot be tuned without changing the protocol; these can: {', '.join(TUNABLE)}"
            )
    if data.documents == "reset" and data.sampling != "tbptt":
        raise ConfigError(
            "data.documents='reset' needs data.sampling='tbptt', which carries a state; rows of whole documents: 'pack'"
        )
    if data.documents == "pack" and data.sampling != "random":
        raise ConfigError(f"data.documents='pack' has an order of its own: leave out data.sampling={data.sampling!r}")
    steps = train.steps
    if steps is None and train.minutes is None:
        steps = 1000
    schedule = train.schedule
    if schedule == "auto" and train.optimizer == "schedulefree":
        schedule = "constant"
    elif schedule == "auto":
        schedule = "cosine" if train.minutes is None else "wsd"
    if train.optimizer == "schedulefree" and schedule != "constant":
        raise ConfigError(f"train.optimizer='schedulefree' needs train.schedule='constant', not {schedule!r}")
    if train.minutes is not None and schedule == "cosine":
        raise ConfigError("under train.minutes the number of steps is unknown: use train.schedule='wsd' or 'constant'")
    warmup = train.warmup
    if warmup is None:
        warmup = 100 if steps is None else min(100, steps // 10)
    precision = train.precision
    if precision == "auto":
        precision = "bf16" if device_type == "cuda" and bf16 else "fp32"
    resolved = dataclasses.replace(train, steps=steps, schedule=schedule, warmup=warmup, precision=precision)
    data = dataclasses.replace(data, eval_bytes=evaluation_bytes(settings))
    return dataclasses.replace(settings, data=data, train=resolved)


def with_length(settings: Settings, steps: int | None, minutes: float | None) -> Settings:
    return dataclasses.replace(settings, train=dataclasses.replace(settings.train, steps=steps, minutes=minutes))


def steps_for_tokens(tokens: int, settings: Settings) -> int:
    """Optimizer steps whose rows have room for at least `tokens` tokens; rows of whole documents are not quite full."""
    return math.ceil(tokens / settings.tokens_per_step)


def _parse(key: str, text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        if re.fullmatch(r"[^\s\"'\[\]{}=#]*", text):
            return text
        raise ConfigError(f"{key} is not TOML: {text!r}; write text as {key}='…', a table as {{a = 1}}") from None


# Names that other programs use.
_MEANT = {
    "learning_rate": "train.lr", "max_lr": "train.lr", "bs": "train.batch_size", "batch": "train.batch_size",
    "seq_len": "train.chunk_size", "block_size": "train.chunk_size", "max_steps": "train.steps", "wd": "train.weight_decay",
    "grad_clip": "train.clip", "dim": "model.hidden_size", "depth": "model.num_hidden_layers", "dtype": "train.precision",
}  # fmt: skip


def _options(tree: Mapping[str, Any]) -> list[str]:
    """The options of the variant that `tree` names, if it names one. Raises `PluginError` if there is none of that name."""
    model = tree.get("model")
    variant = model.get("variant") if isinstance(model, Mapping) else None
    if not isinstance(variant, str) or "+" in variant:
        return []
    return [f.name for f in dataclasses.fields(get_variant(variant).config)]


def _unknown(key: str, where: str = "", options: Iterable[str] = ()) -> ConfigError:
    """The error for an unknown setting; `options`: names under `model.options`."""
    known = known_keys()
    table, _, name = key.partition(".")
    last = name or table
    same = [k for k in known if k.partition(".")[2] == last]  # the right name in another table, or in none
    same += [f"model.options.{name}" for name in options if name == last]
    meant = _MEANT.get(last) or (same[0] if same else None)
    hint = f" Did you mean {meant!r}?" if meant else did_you_mean(key, known)
    listed = ", ".join(k for k in known if k.startswith(f"{table}.")) or ", ".join(known)
    return ConfigError(f"{where}there is no setting {key!r}.{hint}" + ("" if meant else f" Settings: {listed}"))
