"""From runs to a table: one row a run, or one a model over its seeds, in groups that share a protocol.

Runs of different protocols are never in one ranking: each group stands by itself, and the keys that differ are named. In a
group the rows are sorted, those that did not end well last. Needs no torch.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elman_core.registry import ConfigError
from elman_core.training.protocol import protocol_hash

from .metrics import last_steps
from .runs import Run, identity, labels, spelled

WINDOW = 100
"""Optimizer steps whose mean stands for the loss at a point of a training."""
TOLERANCE = 0.02
"""Models whose numbers of parameters differ by no more than this are of equal size."""


@dataclass(frozen=True)
class Figure:
    """A number of a row: a mean over `count` seeds with their standard deviation, which one seed does not have."""

    value: float
    spread: float | None = None
    count: int = 1


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Figures by name, absent where not known: `parameters`; `bits_per_byte` on the held-out text; `loss` at the tokens that all
    of the group saw, and `last_100`, in nats per byte, means of 100 steps; `tok_s`, median after warm-up; `peak_memory`, bytes;
    `minutes` in steps; `bytes_seen`.
    """

    model: str
    runs: tuple[Run, ...]
    figures: Mapping[str, Figure]
    status: str
    remark: str = ""
    tuned: Mapping[str, Any] = field(default_factory=dict)
    tried: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    chosen: bool = True

    def value(self, name: str) -> float:
        """A figure's value; nan if it is not known."""
        figure = self.figures.get(name)
        return math.nan if figure is None else figure.value


@dataclass(frozen=True)
class Group:
    """Rows that may be ranked.

    Attributes:
        protocol, hash: what they share. target: the size that a suite asked for, if it asked for several.
        tokens: bytes that every finished run saw. notes: what a reader must know besides.
    """

    hash: str
    protocol: Mapping[str, Any]
    target: str | None
    rows: tuple[Row, ...]
    tokens: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Results:
    """All groups, and what differs between their protocols: `{key: (value in each group)}`."""

    groups: tuple[Group, ...]
    differences: Mapping[str, tuple[Any, ...]]
    hidden: int = 0
    """Rows left out because another value of a tuned setting was chosen."""


# Of `--sort`: the figure (none: the model's name), and whether small or large comes first.
SORTS = {
    "bpb": ("bits_per_byte", 1),
    "loss": ("loss", 1),
    "last100": ("last_100", 1),
    "tok_s": ("tok_s", -1),
    "memory": ("peak_memory", 1),
    "minutes": ("minutes", 1),
    "parameters": ("parameters", 1),
    "model": ("", 1),
}


def collect(runs: Sequence[Run], sort: str = "bpb", by_model: bool = False, everything: bool = True) -> Results:
    """The table of some runs.

    Args:
        sort: one of `SORTS`. by_model: one row for the seeds of a model. everything: candidates of a tuned setting that were
            not chosen, too.

    Raises:
        ConfigError: `sort` is none of them. StorageError: metrics that cannot be read.
    """
    if sort not in SORTS:
        raise ConfigError(f"--sort takes one of {', '.join(SORTS)}, not {sort!r}")
    sections: dict[tuple[str, str | None], list[Run]] = {}
    protocols = _protocols(runs)
    targets = {run.job.get("target") for run in runs if run.job}
    for run in runs:
        target = run.job.get("target") if len(targets) > 1 else None
        sections.setdefault((hash_of(protocols[id(run)]), target), []).append(run)
    groups, hidden = [], 0
    for (name, target), members in sections.items():
        group, left_out = _group(name, protocols[id(members[0])], target, members, sort, by_model, everything)
        groups.append(group)
        hidden += left_out
    groups.sort(key=lambda g: (-len(g.rows), g.hash, g.target or ""))
    distinct = {g.hash: g.protocol for g in groups}
    return Results(tuple(groups), differences(list(distinct.values())), hidden)


def _group(
    name: str,
    protocol: Mapping[str, Any],
    target: str | None,
    runs: Sequence[Run],
    sort: str,
    by_model: bool,
    everything: bool,
) -> tuple[Group, int]:
    tokens = _common_tokens(runs)
    tuned = {key for run in runs for key in _tuned_of(run)}
    rows = _tuned([_row(run, model, tokens) for run, model in zip(runs, labels(runs, tuned), strict=True)])
    kept = rows if everything else [row for row in rows if row.chosen]
    shown = merge_seeds(kept) if by_model else kept
    group = Group(name, protocol, target, tuple(sorted(shown, key=_order(sort))), tokens, tuple(_notes(runs)))
    return group, len(rows) - len(kept)


def _row(run: Run, model: str, tokens: int | None) -> Row:
    figures = {name: Figure(float(value)) for name, value in _figures(run, tokens).items()}
    status, remark = run.standing
    tuned = _tuned_of(run)
    seeds = () if run.seed is None else (run.seed,)
    return Row(model, (run,), figures, status, remark, tuned, seeds=seeds)


def _figures(run: Run, tokens: int | None) -> dict[str, float]:
    """What is known of one run. A run that ended well has its summary in the manifest; of others the metrics are read."""
    result = dict(run.manifest.get("result") or {})
    if run.standing[0] not in ("ok", "contended") or "bytes_seen" not in result:
        result = summarise(run)
    figures: dict[str, float] = {}
    parameters = run.manifest.get("parameters", run.job.get("parameters"))
    for name, value in {
        "parameters": parameters,
        "bits_per_byte": result.get("bits_per_byte"),
        "last_100": result.get("loss_last_100_steps"),
        "tok_s": result.get("tok_s"),
        "peak_memory": result.get("peak_memory"),
        "bytes_seen": result.get("bytes_seen"),
    }.items():
        if isinstance(value, int | float):
            figures[name] = value
    if "bytes_seen" in figures:
        last = last_steps(run.path, 1)
        if last and "seconds" in last[-1]:
            figures["minutes"] = last[-1]["seconds"] / 60
    per_step = tokens_per_step(run)
    if tokens and per_step and figures.get("bytes_seen", 0) >= tokens:
        found = [line["loss"] for line in last_steps(run.path, WINDOW, tokens // per_step) if "loss" in line]
        if found:
            figures["loss"] = statistics.fmean(found)
    return figures


def summarise(run: Run) -> dict[str, float]:
    """The figures that a training's end puts into its manifest, from the metrics that are there so far."""
    steps, evaluations = run.metrics.steps, run.metrics.evaluations
    found: dict[str, float] = {}
    if evaluations and "bits_per_byte" in evaluations[-1]:
        found["bits_per_byte"] = evaluations[-1]["bits_per_byte"]
    if steps:
        losses = [line["loss"] for line in steps[-WINDOW:] if "loss" in line]
        speeds = [line["tok_s"] for line in steps[len(steps) // 10 :] if "tok_s" in line]
        memory = [line["memory"] for line in steps if "memory" in line]
        found |= {"loss_last_100_steps": statistics.fmean(losses)} if losses else {}
        found |= {"tok_s": statistics.median(speeds)} if speeds else {}
        found |= {"peak_memory": max(memory)} if memory else {}
        seen = steps[-1].get("bytes_seen") or (tokens_per_step(run) or 0) * steps[-1]["step"]
        found |= {"bytes_seen": seen} if seen else {}
    return found


def tokens_per_step(run: Run) -> int | None:
    """Bytes of an optimizer step; None if the settings do not say."""
    train = run.settings["train"]
    if not isinstance(train.get("batch_size"), int) or not isinstance(train.get("chunk_size"), int):
        return None
    return train["batch_size"] * train["chunk_size"]


def _common_tokens(runs: Iterable[Run]) -> int | None:
    """The least that a finished run saw; of what is there, if none has finished."""
    finished: list[int] = []
    begun: list[int] = []
    for run in runs:
        ended = run.standing[0] in ("ok", "contended")
        seen = (run.manifest.get("result") or {}).get("bytes_seen") if ended else None
        seen = seen or summarise(run).get("bytes_seen")
        if seen:
            (finished if ended else begun).append(int(seen))
    return min(finished or begun, default=None)


# tuned settings ------------------------------------------------------------------------------------------------------


def _tuned_of(run: Run) -> dict[str, Any]:
    """What a suite says was tuned, with the run's value; of a run by itself, the learning rate."""
    said = run.job.get("tuned") or {}
    rate = run.settings["train"].get("lr")
    return {k if "." in k else f"train.{k}": v for k, v in said.items()} or ({} if rate is None else {"train.lr": rate})


def _tuned(rows: Sequence[Row]) -> list[Row]:
    """Each row with the values tried of what was tuned, and whether its own were chosen: the lowest bits per byte, averaged
    over the seeds; the loss of the last 100 steps where nothing is held out."""
    families: dict[tuple[str, ...], list[int]] = {}
    for i, row in enumerate(rows):
        families.setdefault(_family(row), []).append(i)
    result = list(rows)
    for members in families.values():
        keys = {k for i in members for k in rows[i].tuned}
        values: dict[str, list[Any]] = {k: [] for k in keys}
        for i in members:
            for k, v in rows[i].tuned.items():
                if v not in values[k]:
                    values[k].append(v)
        tried = {k: tuple(sorted(v, key=_sortable)) for k, v in values.items() if len(v) > 1}
        best = _best([rows[i] for i in members])
        for i in members:
            own = _spelled_tuned(rows[i])
            result[i] = replace(rows[i], tried=tried, chosen=not tried or best is None or own == best)
    return result


def chosen(runs: Sequence[Run]) -> list[Run]:
    """The runs without those whose value of a tuned setting was not the best."""
    rows = _tuned([_row(run, "", None) for run in runs])
    return [run for run, row in zip(runs, rows, strict=True) if row.chosen]


def _family(row: Row) -> tuple[str, ...]:
    """What rows share that differ in a tuned setting or the seed alone. Only a suite says what was tuned."""
    run = row.runs[0]
    if not run.job.get("tuned"):
        return (str(run.path),)
    keys = tuple(f"{k}=" for k in row.tuned)
    return (row.runs[0].job["model"], *(part for part in identity(run) if not part.startswith(keys)))


def _spelled_tuned(row: Row) -> str:
    return json.dumps(row.tuned, sort_keys=True, default=str)


def _best(rows: Sequence[Row]) -> str | None:
    """The tuned values with the lowest mean; those with more finished seeds first. None if no run has ended well."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        value = row.value("bits_per_byte")
        value = row.value("last_100") if math.isnan(value) else value
        if row.status in ("ok", "contended") and not math.isnan(value):
            scores.setdefault(_spelled_tuned(row), []).append(value)
    if not scores:
        return None
    return min(scores, key=lambda k: (-len(scores[k]), statistics.fmean(scores[k])))


def _sortable(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


# seeds ---------------------------------------------------------------------------------------------------------------


def merge_seeds(rows: Sequence[Row]) -> list[Row]:
    """One row for the seeds of a model: means and standard deviations of those that ended well, and how many there are."""
    same: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        same.setdefault(identity(row.runs[0]), []).append(row)
    return [_merged(members) for members in same.values()]


def _merged(rows: Sequence[Row]) -> Row:
    good = [row for row in rows if row.status == "ok"]
    counted = good or list(rows)
    figures = {}
    for name in {name for row in counted for name in row.figures}:
        values = [row.figures[name].value for row in counted if name in row.figures]
        spread = statistics.stdev(values) if len(values) > 1 else None
        figures[name] = Figure(statistics.fmean(values), spread, len(values))
    bad = [f"{row.status}" + (f" (seed {row.seeds[0]})" if row.seeds else "") for row in rows if row.status != "ok"]
    remark = f"left out: {', '.join(bad)}" if good and bad else ", ".join(bad)
    status = "ok" if good else rows[0].status
    return replace(
        rows[0],
        runs=tuple(run for row in rows for run in row.runs),
        figures=figures,
        status=status,
        remark=remark if len(rows) > 1 else rows[0].remark,
        seeds=tuple(seed for row in counted for seed in row.seeds),
        chosen=any(row.chosen for row in rows),
    )


# protocols -----------------------------------------------------------------------------------------------------------

# Entries of the protocol that are lists, and the settings that they hold.
_PARTS = {
    "schedule": ("train.schedule", "train.warmup", "train.final_lr", "train.decay"),
    "optimizer": ("train.optimizer", "train.weight_decay", "train.beta1", "train.beta2", "train.clip"),
    "evaluation": ("data.eval_bytes", "evaluation window"),
    "data": ("data.size", "data.blake2b"),
}


def effective_protocol(run: Run) -> dict[str, Any]:
    """The protocol by which a run really went: a run that was extended had more steps or minutes than it began with."""
    protocol = dict(run.manifest.get("protocol") or {})
    train = run.settings["train"]
    if protocol:
        asked = {k: protocol.get(k) for k in ("steps", "minutes")}
        now = {k: train.get(k, asked[k]) for k in asked}
        if now != asked:
            protocol |= now | {"extended from": asked}
    return protocol


def _protocols(runs: Sequence[Run]) -> dict[int, dict[str, Any]]:
    """The protocol of each run by its `id`. Jobs that have not begun stand with the rest of their suite, if it has only one."""
    protocols = {id(run): effective_protocol(run) for run in runs}
    for run in runs:
        if not protocols[id(run)] and run.suite is not None:
            others = [protocols[id(r)] for r in runs if r.suite == run.suite and protocols[id(r)]]
            if len({hash_of(p) for p in others}) == 1:
                protocols[id(run)] = others[0]
    return protocols


def hash_of(protocol: Mapping[str, Any]) -> str:
    """The protocol's hash; "unknown" for a run that has none."""
    return protocol_hash(protocol) if protocol else "unknown"


def named(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """A protocol by the names of the settings that it holds."""
    flat: dict[str, Any] = {}
    for key, value in protocol.items():
        names = _PARTS.get(key)
        if key == "data" and isinstance(value, Mapping):
            flat |= {f"data.{k}": v for k, v in value.items()}
        elif names and isinstance(value, list) and len(value) == len(names):
            flat |= dict(zip(names, value, strict=True))
        else:
            table = "data." if key in ("sampling", "documents", "heldout") else "train."
            flat[key if " " in key or key in _PARTS else f"{table}{key}"] = value
    return flat


def differences(protocols: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """`{key: its value in each protocol}` for the keys that are not the same in all."""
    flat = [named(p) for p in protocols]
    keys = dict.fromkeys(k for f in flat for k in f)
    found = {k: tuple(f.get(k) for f in flat) for k in keys}
    return {k: v for k, v in found.items() if any(x != v[0] for x in v)}


# notes ---------------------------------------------------------------------------------------------------------------


def _notes(runs: Sequence[Run]) -> list[str]:
    """What a group's hash does not say and a reader must know."""
    begun = [run for run in runs if run.manifest]
    notes = []
    places = {hardware(run) for run in begun if run.manifest.get("hardware")}
    if len(places) > 1:
        notes.append(f"on different hardware ({'; '.join(sorted(places))}): tok/s and memory do not compare")
        if any(run.settings["train"].get("minutes") for run in begun):
            notes.append("and minutes decide how long each trained, so neither do the losses")
    hooks = {json.dumps(run.manifest.get("act_hooks") or {}, sort_keys=True) for run in begun}
    if len(hooks) > 1:
        notes.append("not all runs had the same hooks acting on the training (act_hooks in the manifests)")
    sizes = [int(run.manifest["parameters"]) for run in begun if run.manifest.get("parameters")]
    if sizes and max(sizes) > min(sizes) * (1 + 2 * TOLERANCE):
        notes.append(f"sizes from {min(sizes):,} to {max(sizes):,} parameters: not models of equal size")
    broken = [run.path.name for run in begun if "metrics" in run.__dict__ and run.metrics.broken]
    if broken:
        notes.append(f"lines of metrics.jsonl that are not whole were left out: {', '.join(broken)}")
    for run in runs:
        if run.standing[1] and run.standing[0] != "contended":
            notes.append(f"{run.path.name}: {run.standing[0]}: {_one_line(run.standing[1])}")
    return notes


def _one_line(text: str, most: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def hardware(run: Run) -> str:
    """What a run ran on, in a few words."""
    facts = run.manifest.get("hardware") or {}
    if facts.get("gpu"):
        return str(facts["gpu"])
    return f"{facts.get('device', 'unknown')}, {facts.get('cpu_threads', '?')} threads, {facts.get('host', '?')}"


def _order(sort: str) -> Any:
    name, sign = SORTS[sort]

    def key(row: Row) -> tuple[bool, str, bool, float, float, str]:
        value = sign * row.value(name) if name else 0.0
        second = row.value("last_100")
        missing = math.isnan(value)
        return (
            row.status != "ok",
            "" if name else row.model,
            missing,
            0.0 if missing else value,
            second if math.isfinite(second) else math.inf,
            row.model,
        )

    return key


def spelled_tuned(row: Row) -> str:
    """`lr 0.001 of 3e-4, 1e-3, 3e-3`."""
    parts = []
    for key, value in row.tuned.items():
        tried = row.tried.get(key)
        listed = f" of {', '.join(spelled(v) for v in tried)}" if tried else ""
        parts.append(f"{key.rpartition('.')[2]} {spelled(value)}{listed}")
    return "; ".join(parts)
