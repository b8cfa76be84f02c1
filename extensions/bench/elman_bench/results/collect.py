"""From runs to a table: one row per run, or per model over its seeds, in groups that share a protocol. Needs no torch.

Runs of different protocols are never ranked together: each group is sorted by itself, and the settings that differ are named.
Rows that did not end well come last.
"""

from __future__ import annotations

import bisect
import json
import math
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from elman_bench.size import TOLERANCE, parse_parameters
from elman_core.extension import METRICS, WINDOW, ConfigError, Metrics, progress

from .identity import differences, hash_of, label, labels, protocols_of, spelled
from .rows import Figure, Group, Results, Row, merge_seeds, tuned_of, with_choices
from .runs import ENDED_WELL, Run

# For `--sort`: the figure (none: the model's name), and whether small (1) or large (-1) values come first.
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
        sort: one of `SORTS`. by_model: one row for all seeds of a model. everything: also values of a tuned setting that
            were not chosen.

    Raises:
        ConfigError: `sort` is unknown. StorageError: metrics cannot be read.
    """
    if sort not in SORTS:
        raise ConfigError(f"--sort takes one of {', '.join(SORTS)}, not {sort!r}")
    sections: dict[tuple[str, str | None], list[Run]] = {}
    protocols = protocols_of(runs)
    targets: dict[str, set[str]] = {}
    for run in runs:
        if target := run.job.get("target"):
            targets.setdefault(hash_of(protocols[id(run)]), set()).add(target)
    for run in runs:
        name = hash_of(protocols[id(run)])
        sections.setdefault((name, _target(run, targets.get(name, ()))), []).append(run)
    groups, hidden = [], 0
    for (name, target), members in sections.items():
        group, left_out = _group(name, protocols[id(members[0])], target, members, sort, by_model, everything)
        groups.append(group)
        hidden += left_out
    groups.sort(key=lambda g: (-len(g.rows), g.hash, g.target or ""))
    distinct = {g.hash: g.protocol for g in groups}
    return Results(tuple(groups), differences(list(distinct.values())), hidden)


def _target(run: Run, targets: Collection[str]) -> str | None:
    """Which of several sizes a run belongs to: that of its suite, or the nearest for a model sized by hand."""
    if len(targets) < 2:
        return None
    size = _parameters(run) or 1
    return run.job.get("target") or min(targets, key=lambda text: abs(math.log(parse_parameters(text) / size)))


def _parameters(run: Run) -> int | None:
    return run.manifest.get("parameters", run.job.get("parameters"))


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
    tuned = {key for run in runs for key in tuned_of(run)}
    rows = with_choices([_row(run, model, tokens) for run, model in zip(runs, labels(runs, tuned), strict=True)])
    kept = rows if everything else [row for row in rows if row.chosen]
    shown = merge_seeds(kept) if by_model else kept
    said = [*notes(runs, rows), *(f"{row.model}: {row.remark}" for row in shown if len(row.runs) > 1 and row.remark)]
    group = Group(name, protocol, target, tuple(sorted(shown, key=_order(sort))), tokens, tuple(said))
    return group, len(rows) - len(kept)


def _row(run: Run, model: str, tokens: int | None) -> Row:
    figures = {name: Figure(float(value)) for name, value in _figures(run, tokens).items()}
    status, remark = run.standing
    tuned = tuned_of(run)
    seeds = () if run.seed is None else (run.seed,)
    return Row(model, (run,), figures, status, remark, tuned, seeds=seeds)


def _figures(run: Run, tokens: int | None) -> dict[str, float]:
    """The figures of one run. A run that ended well has a summary in its manifest; for others the metrics are read."""
    result = dict(run.manifest.get("result") or {})
    if run.status not in ENDED_WELL or "bytes_seen" not in result:
        result = run.metrics.summary()
    figures: dict[str, float] = {}
    for name, value in {
        "parameters": _parameters(run),
        "bits_per_byte": result.get("bits_per_byte"),
        "last_100": result.get("loss_last_100_steps"),
        "tok_s": result.get("tok_s"),
        "peak_memory": result.get("peak_memory"),
        "bytes_seen": result.get("bytes_seen"),
    }.items():
        if isinstance(value, int | float) and math.isfinite(value):
            figures[name] = value
    last = progress(run.path, str(run.manifest.get("id", ""))) if "bytes_seen" in figures else None
    if last and math.isfinite(last.seconds) and last.step == run.manifest.get("steps_done", last.step):
        figures["minutes"] = last.seconds / 60
    if tokens and figures.get("bytes_seen") == tokens and "last_100" in figures:
        figures["loss"] = figures["last_100"]
    elif tokens and figures.get("bytes_seen", 0) > tokens:
        loss = run.metrics.mean_loss(_step_at(run.metrics, tokens))
        if loss is not None:
            figures["loss"] = loss
    return figures


def _step_at(metrics: Metrics, size: int) -> int:
    """The last step by which at most so many bytes were seen; 0 if that is unknown, or the last of the run."""
    steps = metrics.columns["step"]
    end = bisect.bisect_right(metrics.columns["bytes_seen"], size)
    known = 0 < end < len(steps) and steps[end] == steps[end - 1] + 1
    return int(steps[end - 1]) if known else 0


def chosen(runs: Sequence[Run]) -> list[Run]:
    """The runs with the best value of each tuned setting."""
    rows = with_choices([_row(run, "", None) for run in runs])
    return [run for run, row in zip(runs, rows, strict=True) if row.chosen]


def _common_tokens(runs: Iterable[Run]) -> int | None:
    """The fewest bytes that a finished run saw; if none has finished, that any run saw."""
    finished: list[int] = []
    begun: list[int] = []
    for run in runs:
        ended = run.status in ENDED_WELL
        seen = (run.manifest.get("result") or {}).get("bytes_seen") if ended else None
        seen = seen or run.metrics.summary().get("bytes_seen")
        if seen:
            of_its_kind = finished if ended else begun
            of_its_kind.append(int(seen))
    return min(finished or begun, default=None)


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


# notes: differences that the hash of a protocol does not cover, and what went wrong -----------------------------------


def notes(runs: Sequence[Run], rows: Sequence[Row]) -> list[str]:
    """The notes of one group."""
    begun = [run for run in runs if run.manifest]
    found = []
    places = {hardware(run) for run in begun if run.manifest.get("hardware")}
    if len(places) > 1:
        found.append(f"on different hardware ({'; '.join(sorted(places))}): tok/s and memory do not compare")
        if any(run.settings["train"].get("minutes") for run in begun):
            found.append("the length was given in minutes, so the losses do not compare either")
    hooks = {json.dumps(run.manifest.get("act_hooks") or {}, sort_keys=True) for run in begun}
    if len(hooks) > 1:
        found.append("plugins' hooks changed some of the trainings (act_hooks in the manifests)")
    sizes = [int(run.manifest["parameters"]) for run in begun if run.manifest.get("parameters")]
    if sizes and max(sizes) > min(sizes) * (1 + 2 * TOLERANCE):
        found.append(f"sizes from {min(sizes):,} to {max(sizes):,} parameters: not models of equal size")
    for run in begun:
        if fault := fault_of_metrics(run):
            found.append(f"{run.path.name}: {fault}")
    steps = {_steps(row.runs[0]) for row in rows if "last_100" in row.figures}
    short = sorted(count for count in steps if count and count < WINDOW)
    if short:
        found.append(f"'last 100' is the mean of all steps where a run has fewer: {', '.join(map(str, short))}")
    found += _kernels(begun)
    for run in runs:
        if run.standing[1] and run.standing[0] != "contended":
            remark = textwrap.shorten(run.standing[1], 200, placeholder="…")
            found.append(f"{run.path.name}: {run.standing[0]}: {remark}")
    return found + _edges(rows)


def fault_of_metrics(run: Run) -> str:
    """Return the faults in the metrics of a run, as far as they were read or its end tells; or an empty string."""
    read = run.__dict__.get("metrics")
    done = run.manifest.get("steps_done")
    if read and isinstance(done, int):  # the end may be lost, too
        lost: int | None = done - len(read)
    else:
        lost = read.lacking if read else (run.manifest.get("result") or {}).get("lacking_steps")
    found = []
    if read and read.broken:
        found.append(f"{read.broken} lines are damaged, repeated or misplaced")
    if lost and lost > 0:
        found.append(f"{lost} steps have no line, and no mean over them is shown")
    return f"in {METRICS} {', '.join(found)}" if found else ""


def _steps(run: Run) -> int | None:
    """The optimizer steps of a run, if it or its metrics tell."""
    done = run.manifest.get("steps_done")
    if isinstance(done, int):
        return done
    last = progress(run.path, str(run.manifest.get("id", "")))
    return last.step if last else None


def _kernels(runs: Sequence[Run]) -> list[str]:
    """GPU runs without a kernel, and kernels that were not verified."""
    plain: dict[str, None] = {}
    unverified: list[str] = []
    for run in runs:
        backends = [str(b) for b in run.manifest.get("backends") or []]
        on_gpu = str((run.manifest.get("hardware") or {}).get("device")).startswith("cuda")
        if on_gpu and any(re.search(r": (torch|reference)", b) for b in backends):
            plain[f"{label(run)} ({'; '.join(backends)})"] = None
        kernels = run.manifest.get("kernels") or {}
        if any(isinstance(use, dict) and use.get("skipped") for use in kernels.values()):
            unverified.append(run.path.name)
    found = []
    if plain:
        found.append(f"on the GPU as plain PyTorch, without a kernel: {', '.join(plain)}")
    if unverified:
        found.append(f"kernels were not verified (ELMAN_VERIFY=skip): {', '.join(unverified)}")
    return found


def hardware(run: Run) -> str:
    """The hardware of a run in a few words."""
    facts = run.manifest.get("hardware") or {}
    if facts.get("gpu"):
        return str(facts["gpu"])
    threads = facts.get("cpu_threads", "?")
    return f"{facts.get('device', 'unknown')}, {threads} thread{'' if threads == 1 else 's'}, {facts.get('host', '?')}"


def _edges(rows: Sequence[Row]) -> list[str]:
    """Tuned settings whose best value is the smallest or largest that was tried: a better value may lie beyond."""
    found = []
    for row in rows:
        if not row.chosen or row.status not in ENDED_WELL:
            continue
        for key, tried in row.tried.items():
            best = row.tuned.get(key)
            numbers = [v for v in tried if isinstance(v, int | float) and not isinstance(v, bool)]
            if len(numbers) == len(tried) and best in (numbers[0], numbers[-1]):
                end = "smallest" if best == numbers[0] else "largest"
                name = row.runs[0].job.get("model", row.model)
                found.append(f"{name}: the best {key}, {spelled(best)}, is the {end} value tried: try values beyond it")
    return list(dict.fromkeys(found))
