"""What `benchmarks/four_gpus.py` brought back, as result files and as docs/results.md.

    python benchmarks/results_page.py collect FOLDER [FOLDER ...] --commit HASH     result files, then the page
    python benchmarks/results_page.py page                                          the page alone

`collect` reads, in each folder that has them: 100mb/ (a suite's folder), *.txt.json (what the text is), scaling.json,
gradient_sums.json, suite-50m/check.json. It writes benchmarks/results/100mb_h200.json, scaling_h200.json,
gradient_sums_h200.json (whose table readme.py makes) and suite_watch_h200.json, replacing only those that it found something
for; later folders win. Of 100mb/ also the pictures of `elman plot`, which need matplotlib. README.md and docs/README.md get a
link to the page. --results and --docs name other places. A test keeps the page equal to the files.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from readme import markdown

ROOT = Path(__file__).parents[1]
PICTURES = {
    "loss-tokens": "Bits per byte against bytes seen",
    "loss-minutes": "Bits per byte against minutes of training",
    "speed-quality": "Speed against held-out bits per byte",
}
FILES = {
    "comparison": "100mb_h200.json",
    "scaling": "scaling_h200.json",
    "sums": "gradient_sums_h200.json",
    "watch": "suite_watch_h200.json",
}
GIB = 2**30


# collecting --------------------------------------------------------------------------------------------------------------


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


def collect(folders: Sequence[Path], results: Path, commit: str) -> list[Path]:
    """Write the result files; returns those that were written.

    Raises:
        SystemExit: the folders hold nothing of it.
    """
    found: dict[str, Any] = {}
    for folder in folders:
        text = next((json.loads(p.read_text()) for p in sorted(folder.glob("*.txt.json"))), {})
        if (folder / "100mb" / "suite.json").exists():
            found["comparison"] = comparison(folder / "100mb", text, commit)
        for name, file in (
            ("scaling", "scaling.json"), ("sums", "gradient_sums.json"), ("watch", "suite-50m/check.json"),
        ):  # fmt: skip
            if (facts := _read(folder / file)) is not None:
                found[name] = {**facts, "commit": commit}
    if not found:
        raise SystemExit(f"nothing of it is in {', '.join(map(str, folders))}: unpack what four_gpus.py packed there")
    results.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, facts in found.items():
        paths.append(results / FILES[name])
        paths[-1].write_text(json.dumps(facts, indent=1) + "\n")
    suites = [folder / "100mb" for folder in folders if (folder / "100mb" / "suite.json").exists()]
    return paths + (pictures(suites[-1], results) if suites else [])


def pictures(suite: Path, results: Path) -> list[Path]:
    """Those of `elman plot`, as SVG; none, and why, where nothing can be drawn."""
    from elman_core.experiments.results.plots import plot
    from elman_core.experiments.results.runs import find_runs
    from elman_core.registry import ConfigError

    with tempfile.TemporaryDirectory() as folder:
        try:
            drawn = plot(find_runs([suite]), Path(folder))
        except ConfigError as error:
            print(f"no pictures: {error}", file=sys.stderr)
            return []
        made = []
        for path in (p for p in drawn if p.suffix == ".svg"):
            made.append(results / f"100mb_h200_{path.name}")
            shutil.copyfile(path, made[-1])
    return made


def link(root: Path) -> list[Path]:
    """Point to the page from README.md and docs/README.md, where nothing does yet; returns the files that were changed."""
    changed = []
    whole = "Whole models trained side by side, and one model on several GPUs: [results](docs/results.md).\n\n"
    row = "| see whole models compared, and speed on several GPUs | [results.md](results.md) |\n"
    for file, mark, before, line in (
        (root / "README.md", "(docs/results.md)", "## What you can rely on\n", whole),
        (root / "docs" / "README.md", "(results.md)", "| know why it is built so |", row),
    ):
        text = file.read_text()
        if mark not in text:
            if before not in text:
                raise SystemExit(f"{file} has no {before.strip()!r} to put the link before")
            file.write_text(text.replace(before, line + before, 1))
            changed.append(file)
    return changed


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


# the page ----------------------------------------------------------------------------------------------------------------


def page(results: Path) -> str:
    """docs/results.md from the result files that there are."""
    parts = [
        "# Results on whole models",
        "",
        "Written by `python benchmarks/results_page.py page` from `benchmarks/results/`.",
        "",
    ]
    for name, section in (("comparison", _comparison), ("scaling", _scaling), ("watch", _watch)):
        if (facts := _read(results / FILES[name])) is not None:
            parts += [*section(facts), ""]
        if name == "comparison":
            for picture, what in PICTURES.items():
                file = f"100mb_h200_{picture}.svg"
                parts += [f"![{what}](../benchmarks/results/{file})", ""] if (results / file).exists() else []
    return "\n".join(parts).rstrip("\n") + "\n"


def _comparison(facts: Mapping[str, Any]) -> list[str]:
    models = facts["models"]
    done = [m for m in models if m["status"] == "ok"]
    order = sorted(done, key=lambda m: m["result"].get("bits_per_byte", float("inf")))
    rows = [["model", "parameters", "lr", "held-out bits per byte", "loss, last 100 steps", "tok/s", "peak GiB"]]
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
        lines += ["", f"Not of one protocol and text with the others: {', '.join(others)}."]
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
        f"Held-out bits per byte of the trials on {length} bytes, of which the best went the whole length:",
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
    """Whose best learning rate was the largest or the smallest that was tried, so that a better one may lie beyond."""
    said = []
    for word, end in (("largest", max), ("smallest", min)):
        rates = {m["what"]: [t["lr"] for t in m["trials"]] for m in models}
        names = [f"`{m['what']}`" for m in models if len(rates[m["what"]]) > 1 and m["lr"] == end(rates[m["what"]])]
        said += [f"the {word} that was tried for {', '.join(names)}"] if names else []
    return ["", f"The best is {', and '.join(said)}: a better one may lie beyond."] if said else []


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
    """What each layer ran on, those that are alike together, as `elman_core.training.display.backends` says it now."""
    from elman_core.training.display import layers_in_words

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
    source = "a text that the folder does not describe"
    if text:
        made = f"SHA-256 `{text['sha256'][:16]}…`, `benchmarks/python_sources.py`"
        source = f"{text['bytes']:,} bytes of installed Python sources ({made})"
    return (
        f"One model on one GPU each ({', '.join(machines)}; torch {', '.join(torch)}), seed {', '.join(map(str, seeds))}, on "
        f"{source}. Recipe: `elman_core/recipes/suites/{facts['suite']}.toml` (`elman bench {facts['suite']}`), protocol "
        f"{', '.join(hashes) or 'unknown'}. Each model has the best of its learning rates, which short trials chose. tok/s: "
        f"median over the steps of its own run. `benchmarks/results/{FILES['comparison']}`."
    )


def _scaling(facts: Mapping[str, Any]) -> list[str]:
    rows = [["model", "GPUs", "how", "tok/s", "times one GPU", "GiB each"]]
    for r in sorted(facts["rows"], key=lambda r: r["gpus"]):
        how = r["kind"] if "reason" in r else f"{r['kind']}: {r['parallel']['kind']}, {r['launch']}"
        figures = [r["reason"], "", ""] if "reason" in r else [
            f"{r['tok_s']:,}", f"{r['times_one']:.2f}" if "times_one" in r else "–", f"{r['memory_gib']:.1f}"
        ]  # fmt: skip
        rows.append([f"`{r['model']}`", str(r["gpus"]), how, *figures])
    beside = any(r.get("beside") for r in facts["rows"])
    machines = sorted({str(r["hardware"].get("gpu", "?")) for r in facts["rows"] if "hardware" in r})
    note = " The rows of one GPU were measured at the same time, each on a GPU of its own." if beside else ""
    each = f"{facts['rows'][0]['rows_per_gpu']} rows of {facts['length']} bytes on each ({', '.join(machines)})"
    intro = (
        f"tok/s of all GPUs together, {each}, medians; four are to reach {facts['target_on_four']} times one.{note} Commit "
        f"{facts['commit']}; `benchmarks/scaling.py`, `benchmarks/results/{FILES['scaling']}`."
    )
    return ["## One model on several GPUs", "", intro, "", markdown(rows)]


def _watch(facts: Mapping[str, Any]) -> list[str]:
    rows = [["what", "held"]]
    rows += [[name, "yes" if check["holds"] else "**no**"] for name, check in facts["checks"].items()]
    intro = (
        "`elman bench 50m` with shortened runs, a planted process, company for one training and one training killed, watched "
        f"from outside each second. Commit {facts['commit']}; `benchmarks/suite_watch.py`, "
        f"`benchmarks/results/{FILES['watch']}`."
    )
    return ["## The scheduler on real GPUs", "", intro, "", markdown(rows)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("collect", "page"))
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--commit", help="of the tree that ran")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "results.md")
    given = parser.parse_args(argv)
    if given.what == "collect":
        if not given.folders or not given.commit:
            parser.error("collect takes at least one folder, and --commit")
        for path in collect(given.folders, given.results, given.commit):
            print(path)
        if given.docs == ROOT / "docs" / "results.md":
            for path in link(ROOT):
                print(path)
    given.docs.write_text(page(given.results))
    print(given.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
