"""By which protocol a run really went, and in what two protocols differ. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elman_core.training.protocol import protocol_hash

from .runs import Run

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


def protocols_of(runs: Sequence[Run]) -> dict[int, dict[str, Any]]:
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
