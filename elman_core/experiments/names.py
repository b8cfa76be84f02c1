"""What a run is called, and which runs are the same but for their seed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elman_core.training.settings import TUNABLE

from .runs import Run

_MOST = 6  # settings in a name


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


# What makes a model and its training what they are: besides all of `model`, the protocol and what may be tuned apart from it.
_TRAINING = {
    *TUNABLE, "data.sampling", "data.documents", "data.heldout", "data.eval_bytes", "train.batch_size", "train.chunk_size",
    "train.steps", "train.minutes", "train.precision",
}  # fmt: skip
# What names nobody, even where it differs: which text file, which draw, what is written when.
_NOT_A_NAME = {
    "data.path", "train.seed", "train.save_every", "train.keep", "train.eval_every", "train.log_every", "train.device",
    "train.tuned",
}  # fmt: skip


def _asked(run: Run) -> dict[str, Any]:
    """A run's settings; of a suite's job those that the suite asks for, which are known before it begins and not resolved."""
    return flatten(run.job.get("settings") or run.settings)


def identity(run: Run) -> tuple[str, ...]:
    """What two runs share that differ in their seed alone, or in what changes memory and speed and nothing that is learnt."""
    flat = {k: v for k, v in _asked(run).items() if k.startswith("model.") or k in _TRAINING}
    return tuple(sorted(f"{k}={json.dumps(v, sort_keys=True, default=str)}" for k, v in flat.items()))


def label(run: Run) -> str:
    """The model in short: as the suite calls it, else `variant@WIDTHxDEPTH`."""
    if run.job.get("model"):
        return str(run.job["model"])
    model = run.settings["model"]
    variant = model.get("variant")
    name = variant if isinstance(variant, str) else _mixed(variant)
    size = f"@{model['hidden_size']}x{model['num_hidden_layers']}" if "num_hidden_layers" in model else ""
    return f"{name}{size}" if name else run.path.name


def _mixed(variants: Any) -> str:
    return "+".join(dict.fromkeys(str(v) for v in variants)) if isinstance(variants, list) else ""


def labels(runs: Sequence[Run], without: Iterable[str] = ()) -> list[str]:
    """A label for each run; runs with the same one that are not the same also get the settings in which they differ.

    Args:
        without: settings that are shown elsewhere, such as tuned ones.
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
        text = f"{value:g}"
        short = f"{value:e}".replace("e-0", "e-")
        mantissa, _, power = short.partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{power}" if 0 < abs(value) < 0.01 else text
    return value if isinstance(value, str) else json.dumps(value, default=str)
