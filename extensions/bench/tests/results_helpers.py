"""Run and suite folders made up for the tests: the files that a training leaves, without the training."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from elman_core.training.run.protocol import protocol, protocol_hash
from elman_core.training.settings import Settings, apply_sets, from_dict

DATA = {"size": 31_000_000, "blake2b": "00ff" * 8}
BASE = {
    "model": {"variant": "toy", "hidden_size": 256, "num_hidden_layers": 6},
    "data": {"path": "text.txt"},
    "train": {"batch_size": 8, "chunk_size": 64, "steps": 300, "warmup": 10, "schedule": "cosine", "precision": "fp32"},
}


def settings(*sets: str) -> Settings:
    return from_dict(apply_sets(copy.deepcopy(BASE), sets))


def losses(steps: int, level: float, seed: int, noise: float = 0.02, correlation: float = 0.3) -> np.ndarray:
    """Nats per byte: a fall towards `level`; what the seed's batches add to every model; and noise of the model's own."""
    t = np.arange(1, steps + 1)
    shared = 0.1 * np.random.default_rng(seed).standard_normal(steps)
    own = np.random.default_rng([seed, round(1e6 * level)]).standard_normal(steps)
    for i in range(1, steps):
        own[i] = correlation * own[i - 1] + math.sqrt(1 - correlation**2) * own[i]
    return level + 4.0 * (1 + t / (0.03 * steps)) ** -1.0 + shared + noise * own


def write_run(
    path: Path,
    *sets: str,
    level: float = 1.4,
    values: np.ndarray | None = None,
    status: str = "ok",
    steps: int | None = None,
    tok_s: float = 100_000.0,
    parameters: int = 1_000_000,
    heldout: float | None = None,
    evaluations: int = 4,
    bytes_per_token: float = 1.0,
    **manifest: Any,
) -> Path:
    """One run's folder.

    Args:
        sets: settings that differ from BASE. level: where the losses go; or values: the losses themselves.
        steps: done, if not all that the settings ask for. heldout: bits per byte of the last evaluation.
        manifest: entries to add; None removes one.
    """
    chosen = settings("data.eval_bytes=1048576", *sets)  # a run writes what its default means
    train = chosen.train
    per_step = round(chosen.tokens_per_step * bytes_per_token)
    asked = train.steps if train.steps is not None else 300
    done = asked if steps is None else steps
    found = losses(asked, level, train.seed)[:done] if values is None else np.asarray(values)
    done = len(found)
    heldout = (level + 0.05) / math.log(2) if heldout is None else heldout
    path.mkdir(parents=True)
    lines = []
    for i, loss in enumerate(found.tolist(), 1):
        lines.append(
            {"kind": "step", "step": i, "loss": loss, "bits_per_byte": loss / math.log(2), "lr": train.lr, "grad_norm": 1.0,
             "tok_s": tok_s * (1 + 0.05 * math.sin(i)), "memory": 2**30 + 1000 * i, "seconds": (i - 1) * per_step / tok_s,
             "bytes_seen": i * per_step}
        )  # fmt: skip
        if evaluations and (i % max(1, asked // evaluations) == 0 or (i == done and status == "ok")):
            bits = heldout + 2 * (1 - i / asked)
            nats = bits * math.log(2)
            lines.append({"kind": "evaluation", "step": i, "loss": nats, "bits_per_byte": bits, "bytes": 2**20})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    comparable = protocol(chosen, DATA, train.chunk_size)
    facts: dict[str, Any] = {
        "format": 1, "status": status, "started": "2026-11-21T10:00:00+00:00", "settings": chosen.to_dict(),
        "horizon": {"steps": train.steps, "minutes": train.minutes}, "protocol": comparable,
        "protocol_hash": protocol_hash(comparable), "parameters": parameters, "made_with": {},
        "versions": {"elman-core": "0.1.0", "torch": "2.13.0"}, "hardware": {"host": "one", "device": "cpu", "cpu_threads": 2},
        "backends": ["layers 0-5 ToyMixer: torch"], "act_hooks": {}, "git_commit": "0" * 40, "resumed": [],
    }  # fmt: skip
    if status == "ok":
        steps_done = [line for line in lines if line["kind"] == "step"]
        facts |= {"ended": "2026-11-21T11:00:00+00:00", "steps_done": done, "result": {
            "bits_per_byte": lines[-1]["bits_per_byte"] if evaluations else None, "evaluated_at": done,
            "loss_last_100_steps": float(np.mean(found[-100:])),
            "tok_s": float(np.median([line["tok_s"] for line in steps_done[len(steps_done) // 10 :]])),
            "peak_memory": steps_done[-1]["memory"], "bytes_seen": done * per_step,
        }}  # fmt: skip
    facts |= manifest
    (path / "manifest.json").write_text(json.dumps({k: v for k, v in facts.items() if v is not None}, indent=2))
    (path / ".lock").touch()
    return path


def write_suite(path: Path, jobs: list[dict[str, Any]], name: str = "toys") -> Path:
    """A suite's folder. Each job: `id`, `model`, `sets`, and what `write_run` takes; `state` for jobs/<id>.json; `begun`:
    whether there is a run."""
    entries = []
    for given in jobs:
        job = dict(given)
        ident, model, sets = job.pop("id"), job.pop("model"), job.pop("sets", ())
        state, tuned, target = job.pop("state", None), job.pop("tuned", {}), job.pop("target", None)
        chosen = settings(*sets)
        entries.append(
            {"id": ident, "model": model, "what": "toy@256x6", "seed": chosen.train.seed, "lr": chosen.train.lr, "tuned": tuned,
             "settings": chosen.to_dict(), "parameters": job.get("parameters", 1_000_000), "target": target}
        )  # fmt: skip
        if job.pop("begun", True):
            write_run(path / "runs" / ident, *sets, **job)
        (path / "jobs").mkdir(parents=True, exist_ok=True)
        said = {"id": ident, "status": job.get("status", "ok"), "contended": False, "attempts": []} | (state or {})
        (path / "jobs" / f"{ident}.json").write_text(json.dumps(said))
    (path / "suite.json").write_text(
        json.dumps({"format": 1, "name": name, "created": "2026-11-21T09:00:00+00:00", "jobs": entries})
    )
    return path


MODELS = {  # name: level in nats, tok/s, parameters
    "toy-a": (1.30, 210_000.0, 49_600_000),
    "toy-b": (1.315, 90_000.0, 50_100_000),
    "toy <c>": (1.36, 150_000.0, 49_900_000),
    "toy-d": (1.31, 400_000.0, 50_400_000),
}


def example_suite(path: Path, seeds: tuple[int, ...] = (1, 2, 3), steps: int = 300) -> Path:
    """Four models, three learning rates and some seeds; one run diverged, one shared its GPU, one goes on, one waits."""
    jobs: list[dict[str, Any]] = []
    for m, (model, (level, speed, parameters)) in enumerate(MODELS.items()):
        for lr, worse in ((3e-4, 0.06), (1e-3, 0.0), (3e-3, 0.03)):
            for seed in seeds:
                sets = (
                    f"train.lr={lr}",
                    f"train.seed={seed}",
                    f"train.steps={steps}",
                    f"model.hidden_size={256 + 8 * m}",
                )
                jitter = 0.002 * math.sin(7 * seed + 3 * m)
                jobs.append(
                    {"id": f"{model.replace(' ', '-').strip('<>')}-lr{lr:g}-s{seed}".replace("<", "").replace(">", ""),
                     "model": model, "sets": sets, "tuned": {"train.lr": lr}, "level": level + worse + jitter,
                     "tok_s": speed, "parameters": parameters, "state": {}}
                )  # fmt: skip
    jobs[-1] |= {"status": "diverged@60", "steps": 59, "error": "training diverged in step 60: loss nan & <worse>"}
    jobs[-1]["state"] = {"status": "diverged@60", "attempts": [{"cause": "diverged", "log": "logs/x.1.log"}]}
    jobs[3 * len(seeds) - 1]["state"] = {"contended": True, "status": "ok"}
    jobs[6 * len(seeds) - 1] |= {"status": "killed", "steps": steps // 2, "state": {"status": "timeout"}}
    jobs[9 * len(seeds) - 1] |= {"begun": False, "state": {"status": "waiting"}}
    return write_suite(path, jobs)
