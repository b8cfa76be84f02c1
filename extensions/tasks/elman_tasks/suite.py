"""A suite of tasks: models by tasks by seeds, as jobs of elman-bench; and what came of it. Needs no torch.

A suite's file is one of elman-bench with a further key: tasks = ["parity", "mqar:pairs=8", …].
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elman_bench.results import plots
from elman_bench.results.identity import differences, effective_protocol, identity, labels, spelled
from elman_bench.results.report import Extra, write_report
from elman_bench.results.runs import Run, find_runs
from elman_bench.results.statistics import student_mean
from elman_bench.suite.plan import Overrides, Plan, Planned, Skipped, plan
from elman_bench.suite.spec import Suite, parse_suite

from elman_core.extension import ConfigError, Settings, did_you_mean, folders, write_json

from .catalogue import find
from .score import mean, read

RESULT = "accuracy.json"


def shipped() -> dict[str, Path]:
    """The suites of tasks in recipes/tasks of installed packages, by name."""
    return {path.stem: path for folder in folders() for path in sorted((folder / "tasks").glob("*.toml"))}


def read_suite(what: str) -> tuple[Suite, list[str], dict[str, Any]]:
    """The suite of a shipped name or a TOML file, its tasks, and the file's content without them. Raises `ConfigError`."""
    known = shipped()
    path = known.get(what) or Path(what).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
        tree = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no suite {what!r}.{did_you_mean(what, known)} Shipped: {', '.join(known)}"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read suite {path}: {error}") from error
    tasks = tree.pop("tasks", None)
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, str) for task in tasks):
        raise ConfigError(f"suite {path.name} names no tasks: tasks = ['NAME', …]")
    return parse_suite(tree, f"tasks-{path.stem}", text), tasks, tree


def named(task: str, listed: Sequence[str]) -> list[str]:
    """The tasks of a suite that a name means, with their options there; a task of another name or with options is itself."""
    return [spec for spec in listed if spec.partition(":")[0] == task] or [task]


def plan_tasks(suite: Suite, tasks: Sequence[str], tree: Mapping[str, Any], changes: Overrides) -> Plan:
    """All runs, those of the first seed first. Raises as `elman_bench.suite.plan.plan`, and as `find`."""
    jobs: list[Planned] = []
    skipped: dict[str, Skipped] = {}
    trained = [_without(r"tests|until", spec) for spec in tasks]
    if twice := [task for task, count in Counter(trained).items() if count > 1]:
        raise ConfigError(
            f"suite {suite.name} has the task {twice[0]} twice: give all its tests at once, as in tests=40+256"
        )
    for spec, task in zip(tasks, trained, strict=True):
        protocol = {table: dict(values) for table, values in tree.get("protocol", {}).items()}
        protocol.setdefault("train", {}).update(chunk_size=find(spec).longest)
        one = parse_suite({**tree, "protocol": protocol}, suite.name)
        planned = plan(one, dataclasses.replace(changes, data=f"task:{spec}"))
        before = re.sub(r"[^A-Za-z0-9_.,=+-]+", "-", task) + "-"
        jobs += [
            dataclasses.replace(
                job,
                id=before + job.id,
                trials=tuple(before + id for id in job.trials),
                settings=_measured(job.settings),
            )
            for job in planned.jobs
        ]
        skipped |= {left_out.model: left_out for left_out in planned.skipped}
    seeds = list(dict.fromkeys(job.seed for job in jobs))
    return Plan(tuple(sorted(jobs, key=lambda job: seeds.index(job.seed))), tuple(skipped.values()))


def _measured(settings: Settings) -> Settings:
    """With the logger of accuracies beside those that were asked for."""
    loggers = ",".join(dict.fromkeys([*filter(None, settings.train.loggers.split(",")), "accuracy"]))
    return dataclasses.replace(settings, train=dataclasses.replace(settings.train, loggers=loggers))


def results(folder: Path) -> list[dict[str, Any]]:
    """The runs of a suite's folder that have ended well, trials apart, with what identifies each.

    `held_out` is in bits a target, on sequences as long as those of training, infinite if unknown; `tests` as `score.accuracy`
    returns them at the end; `accuracy` their mean over lengths, `best` the highest mean during the training; `end` and `whole`
    the means of theirs.
    """
    rows = []
    ended: dict[str, list[tuple[Run, Any]]] = {}
    for run in find_runs([folder]):
        lines = read(run.path)
        if run.manifest.get("status") == "ok" and not run.is_trial and lines:
            task = _without("until", str(run.settings["data"]["path"]).removeprefix("task:"))
            ended.setdefault(task, []).append((run, lines))
    for task, some in ended.items():
        names = _names([run for run, _ in some])
        for run, lines in some:
            settings, hardware = run.settings, run.manifest.get("hardware") or {}
            rows.append(
                {
                    "name": task.partition(":")[0],
                    "task": task,
                    "model": names[identity(run)],
                    "options": settings["model"]["options"],
                    "seed": settings["train"]["seed"],
                    "tuned": dict(run.job.get("tuned") or {}),
                    "parameters": run.manifest.get("parameters"),
                    "steps": run.manifest.get("steps_done"),
                    "protocol": effective_protocol(run),
                    "device": hardware.get("gpu") or "CPU",
                    "commit": run.manifest.get("git_commit"),
                    "held_out": (run.manifest.get("result") or {}).get("bits_per_byte", math.inf),
                    "accuracy": mean(lines[-1]["tests"], "places"),
                    "best": max(mean(line["tests"], "places") for line in lines),
                    "end": mean(lines[-1]["tests"], "end"),
                    "whole": mean(lines[-1]["tests"], "whole"),
                    "tests": lines[-1]["tests"],
                }
            )
    return rows


def _names(runs: Sequence[Run]) -> dict[tuple[str, ...], str]:
    """The name of each model of a task by its `identity`: where several have one label, such as a variant in two sizes, with
    the settings that differ."""
    tuned = {key for run in runs for key in run.job.get("tuned") or ()}
    firsts = {identity(run): run for run in reversed(runs)}
    return dict(zip(firsts, labels([*firsts.values()], tuned), strict=True))


def _without(options: str, spec: str) -> str:
    """A task without options that do not change what it trains on."""
    name, _, given = spec.partition(":")
    kept = [option for option in given.split(",") if not re.match(f"({options})=", option)]
    return ":".join(filter(None, (name, ",".join(kept))))


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Extra]:
    """For each task a table and a picture: the accuracy of each model over its seeds and by length, with the tuned values of
    the lowest held-out loss among those with the most seeds. `±` is half of Student's 95 % interval over seeds. `best` is the
    highest accuracy during the training, which some papers report; `end` is that of the last quarter of the places, `whole`
    that of whole sequences.
    """
    made = []
    for spec in dict.fromkeys(row["task"] for row in rows):
        task = find(spec)
        lengths = list(map(str, task.tests))
        models = _chosen([row for row in rows if row["task"] == spec])
        cells, lines = [], {}
        for model, runs in models.items():
            by_length = {length: [run["tests"][length]["places"] for run in runs] for length in lengths}
            lines[model] = {int(length): values for length, values in by_length.items()}
            spreads = [_spread([run[key] for run in runs]) for key in ("accuracy", "best", "end", "whole")]
            means = [f"{statistics.fmean(values):.3f}" for values in by_length.values()]
            cells.append([model, f"{runs[0]['parameters']:,}", str(len(runs)), *spreads, *means])
        windows = task.windows()
        chance = windows.pop(0)
        seen = ", ".join(f"{share:.3f} of {w}" for w, share in windows.items())
        heads = ("model", "parameters", "seeds", "accuracy", "best", "end", "whole", *lengths)
        caption = (
            f"Accuracy on {spec} by length; trained on {task.train[0]} to {task.train[1]}. Bands: range of the seeds."
        )
        picture = plots.by_length(lines, caption, "length of the sequence", "right answers", chance)
        summary = f"{task.definition} Chance is {chance:.3f}; a predictor of the last inputs reaches {seen}."
        if differ := differences([run["protocol"] for runs in models.values() for run in runs]):
            summary += f" Not one protocol: {', '.join(differ)} differ."
        made.append(Extra(spec, summary, heads, cells, {caption: picture}))
    return made


def _chosen(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The runs of each model with the tuned values of its lowest held-out loss, of those with the most seeds. Its name then has
    them."""
    values: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        tuned = "".join(f", {key.rpartition('.')[2]} {spelled(value)}" for key, value in row["tuned"].items())
        values.setdefault(row["model"], {}).setdefault(tuned, []).append(row)
    chosen = {}
    for model, each in values.items():
        best = min(each, key=lambda t: (-len(each[t]), statistics.fmean(run["held_out"] for run in each[t])))
        chosen[model + best] = each[best]
    return chosen


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}"
    return f"{statistics.fmean(values):.3f} ± {student_mean(list(values)).half_width:.3f}"


def finish(folder: Path) -> tuple[list[Extra], Path] | None:
    """Write accuracy.json and the report into a suite's folder; None if no run has ended well."""
    if not (rows := results(folder)):
        return None
    made = tables(rows)
    known = [row | {"held_out": row["held_out"] if math.isfinite(row["held_out"]) else None} for row in rows]
    write_json(folder / RESULT, {"format": 1, "runs": known})
    return made, write_report(folder, made)
