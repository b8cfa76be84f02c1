"""Write docs/results.md from the result files; a test keeps it equal to them.

    python benchmarks/results_page.py
    python benchmarks/results_page.py --suite FOLDER --text FILE.json --commit HASH
    python benchmarks/results_page.py --runs FOLDER … --text FILE.json --commit HASH

With --runs it first adds runs of E88 and others, by the recipe of 100mb or a part of its steps, to e88_gdn_h200.json. With
--suite it first writes 100mb_h200.json and its pictures from the folder of an `elman bench 100mb`: --text is what
python_sources.py says of the text, --commit names the tree that ran. scaling.py writes the other file, scaling_h200.json.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import commit
from tables import RESULTS, ROOT, markdown

PICTURES = {
    "loss-tokens": "Bits per byte against bytes seen",
    "loss-minutes": "Bits per byte against minutes of training",
    "speed-quality": "Speed against held-out bits per byte",
}
COMPARISON, RECIPE, SCALING = "100mb_h200.json", "e88_gdn_h200.json", "scaling_h200.json"
WHOLE = 100_000_000  # bytes; a run on fewer is a trial
GIB = 2**30


# from a suite ------------------------------------------------------------------------------------------------------------


def comparison(suite: Path, text: Mapping[str, Any], commit: str) -> dict[str, Any]:
    """A suite's folder in short: each model with its run, the trials that chose its learning rate, and what made them."""
    facts = json.loads((suite / "suite.json").read_text())
    runs = {job["id"]: _run(suite, job) for job in facts["jobs"]}
    models = []
    for job in facts["jobs"]:
        if not job.get("trials"):
            continue
        trials = [{"id": id, **runs[id]} for id in job["trials"]]
        models.append(
            {"model": job["model"], "what": job["what"], "id": job["id"], **runs[job["id"]], "trials": trials}
        )
    return {
        "what": facts["summary"],
        "suite": facts["name"],
        "recipe": (suite / "suite.toml").read_text(),
        "text": dict(text),
        "commit": commit,
        "models": models,
    }


def _run(suite: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of one run."""
    state = _read(suite / "jobs" / f"{job['id']}.json") or {}
    manifest = _read(suite / "runs" / job["id"] / "manifest.json") or {}
    settings = manifest.get("settings") or job["settings"]
    hardware = manifest.get("hardware") or {}
    return {
        "status": "contended" if state.get("contended") else state.get("status", "waiting"),
        "parameters": job["parameters"],
        "seed": job["seed"],
        "lr": settings["train"]["lr"],
        "result": manifest.get("result") or {},
        "warm_up_seconds": manifest.get("warm_up_seconds"),
        "step": manifest.get("step"),
        "backends": manifest.get("backends"),
        "kernels": manifest.get("kernels"),
        "hardware": hardware,
        "commit": manifest.get("git_commit"),
        "versions": manifest.get("versions"),
        "protocol_hash": manifest.get("protocol_hash"),
    }


def pictures(suite: Path, results: Path) -> None:
    """Those of `elman plot`, as SVG."""
    from elman_bench.results.plots import plot
    from elman_bench.results.runs import find_runs

    with tempfile.TemporaryDirectory() as folder:
        for path in plot(find_runs([suite]), Path(folder)):
            if path.suffix == ".svg":
                shutil.copyfile(path, results / f"100mb_h200_{path.name}")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def recipe_runs(
    folders: Sequence[Path], text: Mapping[str, Any], commit: str, known: Mapping[str, Any]
) -> dict[str, Any]:
    """The runs `known` and those of folders, and the difference of the best two of a length and seed on the same batches.

    A row's options are those that differ from e88:conv_h16n64 with AdamW, or from the defaults of another variant.
    """
    from elman_bench.results.compare import compare, contenders, rank
    from elman_bench.results.runs import find_runs

    from elman_core.registry import resolve

    runs, rows = [run for run in find_runs(list(folders)) if run.ok], []
    for run in runs:
        m, model = run.manifest, run.manifest["settings"]["model"]
        base = "e88:conv_h16n64" if model["variant"] == "e88" else model["variant"]
        usual = vars(resolve(base).config) | {"mlp_ratio": 0.0, "optimizer": "adamw"}
        given = model["options"] | {k: m["settings"][t][k] for t, k in (("model", "mlp_ratio"), ("train", "optimizer"))}
        rows.append({
            "model": f"{base}@{model['hidden_size']}x{model['num_hidden_layers']}",
            "options": {k: v for k, v in given.items() if v != usual.get(k, False)}, "parameters": m["parameters"],
            "lr": m["settings"]["train"]["lr"], "seed": m["settings"]["train"]["seed"], **m["result"],
            "gpu": m["hardware"]["gpu"], "torch": m["versions"]["torch"], "protocol_hash": m["protocol_hash"], "commit": commit,
        })  # fmt: skip
    kinds, pairs = [(row["bytes_seen"], row["seed"]) for row in rows], []
    for kind in sorted({kind for kind in kinds if kind[0] >= WHOLE}):
        best = sorted(contenders([run for run, k in zip(runs, kinds, strict=True) if k == kind]), key=rank)[:2]
        if len(best) == 2:
            pair = compare(*best).pairs[0]
            assert pair.loss is not None
            model, train = ([each.runs[0].manifest["settings"][part] for each in best] for part in ("model", "train"))
            pairs.append({
                "models": [f"{m['variant']}@{m['hidden_size']}x{m['num_hidden_layers']}" for m in model],
                "optimizer": train[0]["optimizer"], "lr": [t["lr"] for t in train],
                "seed": kind[1], "steps": pair.steps, "heldout": pair.heldout, "loss": vars(pair.loss),
            })  # fmt: skip
    made = {"text": dict(text), "commit": commit, **known}
    return made | {"rows": [*made.get("rows", []), *rows], "pairs": [*made.get("pairs", []), *pairs]}


# the page ----------------------------------------------------------------------------------------------------------------


def page(results: Path) -> str:
    """docs/results.md from the result files that there are."""
    parts = [
        "# Results on whole models",
        "",
        "Written by `python benchmarks/results_page.py` from `benchmarks/results/`.",
        "",
    ]
    if (facts := _read(results / COMPARISON)) is not None:
        parts += [*_comparison(facts), ""]
        for picture, what in PICTURES.items():
            file = f"100mb_h200_{picture}.svg"
            parts += [f"![{what}](../benchmarks/results/{file})", ""] if (results / file).exists() else []
    if (facts := _read(results / RECIPE)) is not None:
        parts += [*_recipe(facts), ""]
    if (facts := _read(results / SCALING)) is not None:
        parts += [*_scaling(facts), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def _comparison(facts: Mapping[str, Any]) -> list[str]:
    models = facts["models"]
    done = [m for m in models if m["status"] == "ok"]
    order = sorted(done, key=lambda m: m["result"].get("bits_per_byte", float("inf")))
    rows = [
        [
            "model",
            "parameters",
            "lr",
            "held-out bits per byte",
            "training loss, last 100 steps (nats per byte)",
            "tok/s",
            "peak GiB",
        ]
    ]
    for m in order:
        r = m["result"]
        rows.append([
            f"`{m['what']}`", f"{m['parameters']:,}", f"{m['lr']:g}", f"{r['bits_per_byte']:.4f}",
            f"{r['loss_last_100_steps']:.4f}", f"{r['tok_s']:,.0f}", f"{r['peak_memory'] / GIB:.1f}",
        ])  # fmt: skip
    lines = ["## Six models on 100 million bytes", "", _conditions(facts), "", markdown(rows)]
    missing = [f"`{m['what']}` ({m['status']})" for m in models if m["status"] != "ok"]
    if missing:
        lines += ["", f"Without a result: {', '.join(missing)}."]
    usual = Counter(m["protocol_hash"] for m in done).most_common(1)
    if others := [f"`{m['what']}`" for m in done if m["protocol_hash"] != usual[0][0]]:
        lines += ["", f"With another protocol or text than the rest: {', '.join(others)}."]
    values = sorted({t["lr"] for m in models for t in m["trials"]})
    trials = [["model", *(f"lr {v:g}" for v in values)]]
    for m in models:
        by_rate, chosen = {t["lr"]: t for t in m["trials"]}, m["lr"] if m["status"] == "ok" else None
        trials.append([f"`{m['what']}`", *(_trial(by_rate.get(v), chosen) for v in values)])
    ended = [t["result"] for m in models for t in m["trials"] if t["status"] == "ok"]
    seen = {result["bytes_seen"] for result in ended if "bytes_seen" in result}
    length = " or ".join(f"{n:,}" for n in sorted(seen)) or "so many"
    lines += [
        "",
        f"Held-out bits per byte of the trials on {length} bytes; each model's best learning rate was used for its full run:",
        "",
        markdown(trials),
        *_at_the_edge(done),
    ]
    ways = [["model", "kernels", "step", "commit"]]
    for m in order:
        used, mode = "; ".join(_backends(m["backends"])) or "–", (m["step"] or {}).get("mode", "–")
        ways.append([f"`{m['what']}`", used, mode, _commit(m.get("commit"), facts["commit"])])
    return [*lines, "", "What ran:", "", markdown(ways)]


def _at_the_edge(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names the models whose best learning rate was the largest or the smallest value tried, so a better one may lie beyond."""
    said = []
    for word, end in (("largest", max), ("smallest", min)):
        rates = {m["what"]: [t["lr"] for t in m["trials"]] for m in models}
        names = [f"`{m['what']}`" for m in models if len(rates[m["what"]]) > 1 and m["lr"] == end(rates[m["what"]])]
        said += [f"the {word} value tried for {', '.join(names)}"] if names else []
    return ["", f"The best is {', and '.join(said)}, so a better one may lie beyond."] if said else []


def _trial(trial: Mapping[str, Any] | None, chosen: float | None) -> str:
    if trial is None:
        return "–"
    bits = trial["result"].get("bits_per_byte")
    word = trial["status"] if trial["status"] != "ok" or bits is None else f"{bits:.4f}"
    return f"**{word}**" if trial["lr"] == chosen and trial["status"] == "ok" else word


def _commit(own: str | None, told: str) -> str:
    """Of a run: its own, or where its tree was not that of a commit, what --commit said."""
    return told[:7] if own is None or own.endswith("+changes") else own[:7]


def _backends(backends: Any) -> list[str]:
    """What each layer ran on, those that are alike together, as `elman_core.training.run.display.backends` says it now."""
    from elman_core.training.run.display import layers_in_words

    listed = backends if isinstance(backends, list) else []
    by_kind: dict[str, list[int]] = {}
    for b in listed:
        if isinstance(b, str | dict):
            text = b if isinstance(b, str) else ", ".join(f"{k} {v}" for k, v in b.items())
            alone = re.match(r"layer (\d+) (.*)", text)
            by_kind.setdefault(alone[2] if alone else text, []).extend([int(alone[1])] if alone else [])
    return [f"{layers_in_words(layers)} {kind}" if layers else kind for kind, layers in by_kind.items()]


def _conditions(facts: Mapping[str, Any]) -> str:
    """Text, hardware, seeds and where the recipe is, in one paragraph."""
    text, ran = facts["text"], [m for m in facts["models"] if m["hardware"]]
    machines = sorted({str(m["hardware"].get("gpu") or m["hardware"].get("cpu") or "unknown") for m in ran})
    torch = sorted({str((m["versions"] or {}).get("torch", "?")) for m in ran})
    seeds = sorted({m["seed"] for m in facts["models"]})
    hashes = sorted({m["protocol_hash"] for m in ran if m["protocol_hash"]})
    source = "a text of unknown origin"
    if text:
        made = f"SHA-256 `{text['sha256'][:16]}…`, `benchmarks/python_sources.py`"
        source = f"{text['bytes']:,} bytes of installed Python sources ({made})"
    return (
        f"Each model was trained on one GPU ({', '.join(machines)}; torch {', '.join(torch)}) with seed "
        f"{', '.join(map(str, seeds))} on {source}. "
        f"Recipe: `extensions/bench/elman_bench/recipes/suites/{facts['suite']}.toml` (`elman bench {facts['suite']}`, "
        f"which also trains `e88:conv_linear` now), protocol "
        f"{', '.join(hashes) or 'unknown'}. Short trials chose each model's learning rate. tok/s: median over "
        f"the steps of its own run. `benchmarks/results/{COMPARISON}`."
    )


def _recipe(facts: Mapping[str, Any]) -> list[str]:
    head = ["model", "options", "lr", "seed", "held-out bits per byte", "nats, last 100 steps", "tok/s", "peak GiB"]
    tables: dict[int, list[list[str]]] = {}
    for r in sorted(facts["rows"], key=lambda r: r["bits_per_byte"]):
        options = ", ".join(f"{k}={json.dumps(v)}" for k, v in r["options"].items())
        marks = "*" * r.get("shared", False) + "†" * ("H100" in r["gpu"])
        tables.setdefault(r["bytes_seen"], [head]).append([
            f"`{r['model']}`", f"`{options}`" if options else "", f"{r['lr']:g}", str(r["seed"]), f"{r['bits_per_byte']:.4f}",
            f"{r['loss_last_100_steps']:.4f}", f"{r['tok_s']:,.0f}{marks}", f"{r['peak_memory'] / GIB:.1f}",
        ])  # fmt: skip
    short = sorted(n for n in tables if n < WHOLE)
    whole, *long = sorted(n for n in tables if n >= WHOLE)
    text = facts["text"]
    pairs = [["first", "second", "optimizer", "lr", "seed", "steps", "training loss", "95 % interval", "held out"]]
    for p in facts["pairs"]:
        (first, second), (begin, end), loss = p["models"], p["steps"], p["loss"]
        rates = ", ".join(f"{lr:g}" for lr in p["lr"])
        pairs.append([
            f"`{first}`", f"`{second}`", p["optimizer"], rates, str(p["seed"]), f"{begin:,} to {end:,}", f"{loss['mean']:+.4f}",
            f"{loss['low']:+.4f} to {loss['high']:+.4f}", f"{p['heldout']:+.4f}",
        ])  # fmt: skip
    lines = [
        "## E88's recipes beside Gated DeltaNet",
        "",
        f"The text (SHA-256 `{text['sha256'][:16]}…`), protocol and GPU of the comparison above, torch "
        f"{facts['rows'][0]['torch']}, commit {facts['commit'][:7]}, or the row's in the file. `e88:conv_h16n64` has 16 heads "
        "of 64, convolution, write gate, sigmoid output gate, no norm. Options are those that differ from it, or from another "
        "variant's defaults. `decayed_read` reads after the decay, as Gated DeltaNet does; it was not kept. "
        "* Other processes used the GPU too. † On an NVIDIA H100. `elman bench 100mb-muon` trains five of them and Mamba-2. "
        f"`benchmarks/results/{RECIPE}`.",
        "",
        markdown(tables[whole]),
        "",
        "Pairs on the same batches (`elman compare`): differences in bits per byte, first minus second. The 95 % interval "
        "reflects batch noise, not differences between seeds.",
        "",
        markdown(pairs),
        "",
        f"Trials on {short[0]:,} bytes, each with a schedule of its own length. E88 had more of them than Gated DeltaNet. They "
        "rank architectures poorly: Mamba-2 is 0.21 behind Gated DeltaNet after as many bytes, 0.04 after ten times as many.",
        "",
        markdown(tables[short[0]]),
    ]
    for n in short[1:]:
        lines += ["", f"Trials on {n:,} bytes:", "", markdown(tables[n])]
    for n in long:
        lines += ["", f"On {n:,} bytes:", "", markdown(tables[n])]
    return lines


def _scaling(facts: Mapping[str, Any]) -> list[str]:
    rows = [["model", "GPUs", "how", "tok/s", "times one GPU", "GiB each"]]
    for r in sorted(facts["rows"], key=lambda r: r["gpus"]):
        how = r["kind"] if "reason" in r else f"{r['parallel']['kind']}, {r['launch']}".removeprefix("none, ")
        figures = [r["reason"], "", ""] if "reason" in r else [
            f"{r['tok_s']:,}", f"{r['times_one']:.2f}" if "times_one" in r else "–", f"{r['memory_gib']:.1f}"
        ]  # fmt: skip
        rows.append([f"`{r['model']}`", str(r["gpus"]), how, *figures])
    beside = any(r.get("beside") for r in facts["rows"])
    machines = sorted({str(r["hardware"].get("gpu", "?")) for r in facts["rows"] if "hardware" in r})
    note = " The rows for one GPU were measured at the same time, each on its own GPU." if beside else ""
    each = f"{facts['rows'][0]['rows_per_gpu']} rows of {facts['length']} bytes on each ({', '.join(machines)})"
    intro = (
        f"tok/s of all GPUs together, {each}, medians; the target for four is {facts['target_on_four']} times one.{note} "
        f"Commit {facts['commit']}; `benchmarks/scaling.py`, `benchmarks/results/{SCALING}`."
    )
    return ["## One model on several GPUs", "", intro, "", markdown(rows)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, help="the folder of an `elman bench 100mb`")
    parser.add_argument("--text", type=Path, help="what python_sources.py says of its text")
    parser.add_argument("--commit", default=commit(), help="of the tree that ran")
    parser.add_argument("--runs", type=Path, nargs="+", help="folders of runs")
    given = parser.parse_args(argv)
    text = json.loads(given.text.read_text()) if given.text else {}
    if given.runs:
        made = recipe_runs(given.runs, text, given.commit, _read(RESULTS / RECIPE) or {})
        (RESULTS / RECIPE).write_text(json.dumps(made, indent=1) + "\n")
    if given.suite:
        made = comparison(given.suite, text, given.commit)
        (RESULTS / COMPARISON).write_text(json.dumps(made, indent=1) + "\n")
        pictures(given.suite, RESULTS)
    (ROOT / "docs" / "results.md").write_text(page(RESULTS))


if __name__ == "__main__":
    main()
