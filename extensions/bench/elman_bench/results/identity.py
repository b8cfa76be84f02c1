"""The labels of runs, which runs differ only in their seed, and the protocol of each run. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elman_core.extension import TUNABLE, protocol_hash

from .runs import Run

_MOST = 6  # settings in a name


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one table with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


# The settings that define a training: besides all of `model`, the protocol and what may be tuned.
_TRAINING = {
    *TUNABLE, "data.sampling", "data.documents", "data.heldout", "data.eval_bytes", "train.batch_size", "train.chunk_size",
    "train.steps", "train.minutes", "train.precision",
}  # fmt: skip
# Settings that never appear in a label, even if they differ.
_NOT_A_NAME = {
    "data.path", "train.seed", "train.save_every", "train.keep", "train.eval_every", "train.log_every", "train.loggers",
    "train.device", "train.tuned",
}  # fmt: skip


def _asked(run: Run) -> dict[str, Any]:
    """A run's settings; for a job of a suite those of the suite, which are known before it starts and are not resolved."""
    return flatten(run.job.get("settings") or run.settings)


def identity(run: Run) -> tuple[str, ...]:
    """Equal for runs that differ only in their seed, or in settings that change memory and speed but not the result."""
    flat = {k: v for k, v in _asked(run).items() if k.startswith("model.") or k in _TRAINING}
    return tuple(sorted(f"{k}={json.dumps(v, sort_keys=True, default=str)}" for k, v in flat.items()))


def label(run: Run) -> str:
    """The model's label in its suite, or `variant[:preset]@WIDTHxDEPTH` and the options that were set, as asked for."""
    if run.job.get("model"):
        return str(run.job["model"])
    model, asked = run.settings["model"], run.manifest.get("asked") or {}
    variant = asked.get("variant") or model.get("variant")
    mixed = variant if isinstance(variant, list) else []  # one for each layer
    name = variant if isinstance(variant, str) else "+".join(dict.fromkeys(map(str, mixed)))
    size = f"@{model['hidden_size']}x{model['num_hidden_layers']}" if "num_hidden_layers" in model else ""
    options = "".join(f" {k}={spelled(v)}" for k, v in (asked.get("options") or {}).items())
    return f"{name}{size}{options}" if name else run.path.name


def labels(runs: Sequence[Run], without: Iterable[str] = ()) -> list[str]:
    """A label for each run; runs with equal labels also get the settings in which they differ.

    Args:
        without: settings to leave out, such as tuned settings, which have their own column.
    """
    hidden = _NOT_A_NAME | set(without)
    names = [label(run) for run in runs]
    alike: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        alike.setdefault(name, []).append(i)
    for members in alike.values():
        trees = [{k: v for k, v in _asked(runs[i]).items() if k not in hidden} for i in members]
        keys = dict.fromkeys(k for tree in trees for k in tree)
        differ = [k for k in keys if len({json.dumps(t.get(k), default=str) for t in trees}) > 1]
        for i, tree in zip(members, trees, strict=True):
            more = " ".join(f"{k.rpartition('.')[2]}={spelled(tree.get(k))}" for k in differ[:_MOST])
            more += " …" if len(differ) > _MOST else ""
            names[i] += f" {more}" if more else ""
    return names


def spelled(value: Any) -> str:
    """A setting's value in a table."""
    if value is None:
        return "none"
    if isinstance(value, float):
        if not 0 < abs(value) < 0.01:
            return f"{value:g}"
        mantissa, _, power = f"{value:e}".replace("e-0", "e-").partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{power}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


# Entries of the protocol that are lists, and the settings in them.
_PARTS = {
    "schedule": ("train.schedule", "train.warmup", "train.final_lr", "train.decay"),
    "optimizer": ("train.optimizer", "train.weight_decay", "train.beta1", "train.beta2", "train.clip"),
    "evaluation": ("data.eval_bytes", "evaluation window"),
    "data": ("data.size", "data.blake2b"),
}


def effective_protocol(run: Run) -> dict[str, Any]:
    """The protocol that a run followed in the end: an extended run has more steps or minutes than at its start."""
    protocol = dict(run.manifest.get("protocol") or {})
    train = run.settings["train"]
    if protocol:
        asked = {k: protocol.get(k) for k in ("steps", "minutes")}
        now = {k: train.get(k, asked[k]) for k in asked}
        if now != asked:
            protocol |= now | {"extended from": asked}
    return protocol


def protocols_of(runs: Sequence[Run]) -> dict[int, dict[str, Any]]:
    """The protocol of each run by its `id`. Jobs that have not started get the protocol of their suite, if it has only one."""
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
    """A protocol as a table of settings."""
    flat: dict[str, Any] = {}
    for key, value in protocol.items():
        names = _PARTS.get(key)
        if key == "data" and isinstance(value, Mapping):
            flat |= {f"data.{k}": v for k, v in value.items()}
        elif names and isinstance(value, list) and len(value) == len(names):
            flat |= dict(zip(names, value, strict=True))
        else:
            table = "model." if key == "init" else "data." if key in ("sampling", "documents", "heldout") else "train."
            flat[key if " " in key or key in _PARTS else f"{table}{key}"] = value
    return flat


def differences(protocols: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """`{key: its value in each protocol}` for the keys that differ."""
    flat = [named(p) for p in protocols]
    keys = dict.fromkeys(k for f in flat for k in f)
    found = {k: tuple(f.get(k) for f in flat) for k in keys}
    return {k: v for k, v in found.items() if any(x != v[0] for x in v)}
