"""Write the tables of READMEs and decisions from the result files: python benchmarks/readme.py. A test keeps them current."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from typing import Any

import step_budget
from tables import RESULTS, ROOT, markdown

DENSE_COLUMNS = {
    "e1 bf16": "E1 bf16",
    "e42 bf16": "E42 bf16",
    "e42 tied bf16": "E42 with its projection, bf16",
    "FlashRNN fused bf16": "FlashRNN fused bf16",
    "cuDNN RNN fp16": "cuDNN RNN fp16",
    "cuDNN LSTM fp16": "cuDNN LSTM fp16",
    "cuBLAS per step, CUDA graph, bf16": "cuBLAS per step in a CUDA graph",
}

SIZES = ("43M", "49M", "50M", "64M", "100M")
PEERS = {
    "mamba_ssm": "mamba_ssm's own model, bfloat16 weights,",
    "fla": "fla's own layers, bfloat16 weights,",
    "llama": "transformers' LLaMA, bfloat16 weights,",
}


EQUATIONS = {
    "e1": "h = tanh(W h' + V x + b), y = h silu(z)",
    "e42": "h = W (x + h') + b, y = h silu(h): one matrix, no tanh",
    "e88": "S = tanh(λ S' + k (v - S'ᵀ k)ᵀ), o = Sᵀ q, many heads",
    "gdn": "Gated DeltaNet: a delta rule with a decay",
    "mamba2": "Mamba-2: linear, one decay per head",
    "transformer": "causal attention, rotary positions, SwiGLU",
}


def muon(options: dict[str, Any]) -> bool:
    return options.get("optimizer") == "muon"


RECIPES: list[tuple[str, str, Callable[[str, dict[str, Any]], bool]]] = [
    (
        "`gdn@640x8` with `init=zero`, Muon",
        EQUATIONS["gdn"],
        lambda model, o: model == "gdn@640x8" and o == {"optimizer": "muon", "init": "zero"},
    ),
    (
        "`e88:conv_h5v256@736x8`, Muon",
        "E88 without tanh, 5 heads of 64 x 256, convolution, write gate, norm",
        lambda model, o: (
            model.endswith("@736x8") and muon(o) and not o.keys() & {"write_scale", "d_conv", "output_norm_eps"}
        ),
    ),
    (
        "`e88:conv_h5n128v256@640x8`, Muon",
        "E88 without tanh, 5 heads of 128 x 256, convolution, write gate, norm",
        lambda model, o: model == "e88:conv_h16n64@640x8" and muon(o) and "output_norm_eps" in o,
    ),
    (
        "`e42@704x6` with convolution, SwiGLU and `mamba2_init`, Muon",
        EQUATIONS["e42"],
        lambda model, o: model == "e42@704x6" and muon(o),
    ),
    (
        "`transformer@384x15`, Muon",
        EQUATIONS["transformer"],
        lambda model, o: model == "transformer@384x15" and muon(o),
    ),
    (
        "`e97:conv_h5v256@592x8`, Muon",
        "E97: tanh, gates for erasing and writing, 5 heads of 32 x 256, convolution, norm",
        lambda model, o: model == "e97@592x8" and muon(o) and "linear_state" not in o,
    ),
]
"""Rows of e88_gdn_h200.json over seeds: model, recurrence, which runs. Quality is the mean of the full runs at the best of the
learning rates with the most seeds; speed and memory are those of the newest run of full length, because code becomes faster."""


def _mean_bits(runs: list[dict[str, Any]]) -> float:
    return statistics.fmean(r["bits_per_byte"] for r in runs)


def models_table() -> str:
    """Quality and speed of whole models, the best first."""
    data = json.loads((RESULTS / "100mb_h200.json").read_text())
    newer = {label.split("`")[1] for label, *_ in RECIPES}  # Muon instead of AdamW, and better
    rows = [
        (run["result"], run["parameters"], f"`{run['what']}`", EQUATIONS[re.split("[:@]", run["what"])[0]])
        for run in data["models"] if run["what"] not in newer
    ]  # fmt: skip
    whole = data["models"][0]["result"]["bytes_seen"]
    beside = json.loads((RESULTS / "e88_gdn_h200.json").read_text())["rows"]
    for label, equation, belongs in RECIPES:
        found = [r for r in beside if belongs(r["model"], r["options"])]
        full = [r for r in found if r["bytes_seen"] == whole]
        # The newest run of each seed, for each rate; then the best of the rates with the most seeds.
        by_rate = [list({r["seed"]: r for r in full if r["lr"] == lr}.values()) for lr in {r["lr"] for r in full}]
        runs = min(by_rate, key=lambda runs: (-len(runs), _mean_bits(runs)))
        newest = [r for r in found if not r.get("shared") and r["bytes_seen"] >= whole][-1]
        of = {key: newest[key] for key in ("tok_s", "peak_memory")}
        of["bits_per_byte"] = _mean_bits(runs)
        label += f", {len(runs)} seed{'s' * (len(runs) > 1)}" + ", on an H100" * ("H100" in newest["gpu"])
        rows.append((of, runs[0]["parameters"], label, equation))
    lighter = json.loads((RESULTS / "matrix_blocked_h100.json").read_text())["every_second_state"]["training"]
    wider, _, belongs = RECIPES[1]
    longer = [r for r in beside if belongs(r["model"], r["options"]) and r["bytes_seen"] > whole]
    head = ["model", "recurrence", "parameters", "held-out bits per byte", "training, tok/s", "GiB"]
    cells = [
        [what, equation, f"{parameters / 1e6:.1f}M", f"{of['bits_per_byte']:.3f}", f"{of['tok_s']:,.0f}",
         f"{of['peak_memory'] / 2**30:.1f}"]
        for of, parameters, what, equation in sorted(rows, key=lambda row: row[0]["bits_per_byte"])
    ]  # fmt: skip
    caption = (
        "Each model read 100 million bytes of Python sources on one H200, with AdamW, at the best learning rate of its trials "
        "and with one seed, or as the row says: differences under 0.01 bits per byte mean little. h' and S' are the states of "
        "the previous step. With Muon, E88 with heads of 64 x 256 and Gated DeltaNet had eleven trials each, E88 with heads of "
        "128 x 256 took the learning rate of the other, the transformer had two full runs, E97 one learning rate; speed and "
        "memory are those of the newest full run. Since then, decision 39 has reduced the memory of "
        f"{' and of '.join(f'`{model}` to {gib:.1f} GiB' for model, _, gib in lighter['rows'][:2])}. "
        f"In the minutes of Gated DeltaNet's run {wider.split(',')[0]} reads {longer[0]['bytes_seen'] / 1e6:.0f} million bytes "
        f"and reaches {_mean_bits(longer):.3f} ({len(longer)} seeds). "
        "[Every run](docs/results.md), [recipes of E88, and which claims hold](docs/claims.md)."
    )
    return f"{caption}\n\n{markdown([head, *cells])}"


def peers_table() -> str:
    """Ours beside the usual implementation, in five rows."""
    dense = json.loads((RESULTS / "dense_h200.json").read_text())
    steps = json.loads((RESULTS / "training_step_h200.json").read_text())
    rows = [["what", "elman", "peer", "its speed", "elman is faster by"]]
    for name, peer in (("e42 bf16", "cuDNN RNN fp16"), ("e1 bf16", "FlashRNN fused bf16")):
        [row] = [row for row in dense["rows"] if (row["d"], row["B"]) == (1024, 32)]
        ours, theirs = (row[key]["forward_backward"]["median"] for key in (name, peer))
        what = f"{name.split()[0].upper()}'s recurrence, d = 1024, B = 32, forward and backward"
        rows.append([what, f"{ours:.2f} µs a time step", peer, f"{theirs:.2f} µs", f"{theirs / ours:.1f}×"])
    gates = json.loads((RESULTS / "gates_h200.json").read_text())["recurrences"]["lstm 1024"]
    ours, theirs = (gates[key]["forward_backward"]["median"] for key in ("ours", "cudnn"))
    what = "LSTM with its input product, d = 1024, B = 32, forward and backward"
    rows.append([what, f"{ours:.2f} µs a time step", "cuDNN LSTM fp16", f"{theirs:.2f} µs", f"{theirs / ours:.1f}×"])
    for size, name, peer in (("49M", "gdn", "fla"), ("49M", "mamba2", "mamba_ssm")):
        at = [row for row in steps["rows"] if (row["size"], row["B"]) == (size, 32) and "tok_s" in row]
        ours, theirs = (max(row["tok_s"] for row in at if row["name"] == n) for n in (name, peer))
        what, whose = f"`{name}`, {size} parameters, a training step, B = 32", PEERS[peer].split(",")[0]
        rows.append([what, f"{ours:,} tok/s", whose, f"{theirs:,} tok/s", f"{ours / theirs:.1f}×"])
    caption = (
        "All T steps of a recurrence run in one launch with the weights on chip, only the recurrent product is inside the "
        "loop, and a whole training step is one CUDA graph. One H200, T = 512, bfloat16. In training steps, our weights are "
        "float32 under autocast and the peers' are bfloat16. "
        "[More sizes and shapes, decoding, versions](docs/speed.md)."
    )
    return f"{caption}\n\n{markdown(rows)}"


def dense_table() -> str:
    """Microseconds per time step, forward / forward and backward, by width and batch."""
    data = json.loads((RESULTS / "dense_h200.json").read_text())
    shown = {k: v for k, v in DENSE_COLUMNS.items() if any(isinstance(r.get(k), dict) for r in data["rows"])}
    rows = [["d", "B", *shown.values()]]
    rows += [[str(r["d"]), str(r["B"]), *(_pair(r.get(name)) for name in shown)] for r in data["rows"]]
    caption = (
        "Microseconds per time step of one layer's recurrence, forward / forward + backward with all gradients, "
        f"T = {data['T']}, medians; {_machine(data)}.{of_two_runs(data)} `benchmarks/dense.py`, "
        "`benchmarks/results/dense_h200.json`."
    )
    return f"{caption}\n\n{markdown(rows)}"


def of_two_runs(data: dict[str, Any]) -> str:
    """What is said where cells come from another run (`dense.py --merge`)."""
    other = {
        (row["d"], cell["commit"][:7])
        for row in data["rows"]
        for cell in row.values()
        if isinstance(cell, dict) and "commit" in cell
    }
    said = [f"d = {width} ({commit})" for width, commit in sorted(other)]
    return f" From another run: {', '.join(said)}." if said else ""


def matrix_table() -> str:
    """Microseconds of E88's recurrence for a whole sequence, by shape."""
    data = json.loads((RESULTS / "matrix_state_h200.json").read_text())
    rows = [
        [
            "B",
            "T",
            "heads",
            "n",
            "forward",
            "backward",
            "fused with SiLU, L2 norm and decay",
            "these in PyTorch around it",
            "commit",
        ]
    ]
    rows += [
        [str(r["B"]), str(r["T"]), str(r["H"]), str(r["N"]), f"{r['forward']:.0f}", f"{r['backward']:.0f}",
         f"{r['fused_forward']:.0f} / {r['fused_backward']:.0f}", f"{r['pieces_forward']:.0f} / {r['pieces_backward']:.0f}",
         r.get("commit", data["commit"])[:7]]
        for r in data["recurrence"]
    ]  # fmt: skip
    caption = (
        "Microseconds of E88's recurrence for all T steps, bf16, medians; "
        f"one {data['gpu']}, torch {data['versions']['torch']}. "
        "`benchmarks/matrix_state.py`, `benchmarks/results/matrix_state_h200.json`."
    )
    return f"{caption}\n\n{markdown(rows)}"


def e88_table() -> str:
    """The same shapes for the README of E88, with what a layer saves and one step of decoding; and whole layers beside it."""
    data = json.loads((RESULTS / "matrix_state_h200.json").read_text())
    names = ("forward", "backward", "fused_forward", "fused_backward")
    rows = [["B, T, H, N", *(name.replace("_", " ") for name in names), "saved", "one step", "commit"]]
    rows += [
        [", ".join(str(r[k]) for k in "BTHN"), *(f"{r[name]:.0f}" for name in names), f"{r['saved_mb']:.0f} MB",
         f"{r['step']:.0f}", r.get("commit", data["commit"])[:7]]
        for r in data["recurrence"]
    ]  # fmt: skip
    caption = (
        f"The recurrence in bf16, microseconds per layer, medians; one {data['gpu']}, torch {data['versions']['torch']}. "
        '"Fused" includes SiLU, L2 norm and decay; the layer runs this form. "Saved" is what the plain form keeps for its '
        "backward, without its output. `benchmarks/matrix_state.py`."
    )
    layers = "; ".join(
        f"{r['layer']} ({r['parameters']:,} parameters, commit {r.get('commit', data['commit'])[:7]}) {r['forward']:.0f} and "
        f"{r['backward']:.0f} us"
        for r in data["layers"]
    )
    sizes = f"B = {data['layers'][0]['B']}, T = {data['layers'][0]['T']}"
    beside = f"Whole layers, {sizes}, bfloat16 weights, forward and backward; each commit is a run: {layers}."
    return f"{caption}\n\n{markdown(rows)}\n\n{beside}"


def step_table() -> str:
    """tok/s and memory of a whole training step: the best setting of each model, B = 32, models of about one size together."""
    data, gates = (json.loads((RESULTS / f"{name}_h200.json").read_text()) for name in ("training_step", "gates"))
    head = ["size", "model", "parameters", "tok/s", "ms per step", "peak GiB", "launched as", "commit", "eager tok/s"]
    rows = [[*head, "tok/s at B = 64"]]
    best: dict[tuple[str, str], dict[str, Any]] = {}
    eager: dict[tuple[str, str], dict[str, Any]] = {}
    wide: dict[tuple[str, str], dict[str, Any]] = {}

    def commit(row: dict[str, Any]) -> str:
        return str(row.get("commit", data["commit"])[:7])

    def beside(row: dict[str, Any] | None) -> str:
        return "–" if row is None else f"{row['tok_s']:,}" + (f" ({row['note']})" if "note" in row else "")

    for row in data["rows"]:
        key = row["size"], row["name"]
        if "tok_s" not in row:
            continue
        if row["B"] == 64:
            wide[key] = max(row, wide.get(key, row), key=lambda r: r["tok_s"])
            continue
        if row["setting"] == "eager":
            eager[key] = row
        if key not in best or row["tok_s"] > best[key]["tok_s"]:
            best[key] = row
    order = sorted(best.items(), key=lambda item: (SIZES.index(item[0][0]), item[1]["kind"], -item[1]["tok_s"]))
    for (size, name), row in order:
        named = f"{PEERS[name]} {row['model'].split()[-1]}" if name in PEERS else row["model"]
        rows.append([
            size, named, f"{row['parameters']:,}", f"{row['tok_s']:,}", f"{row['ms']:.1f}",
            f"{row['peak_gib']:.1f}" if row["peak_gib"] else "–",
            row["setting"] + (f" ({remarks(row)})" if remarks(row) else ""), commit(row),
            beside(eager.get((size, name))), beside(wide.get((size, name))),
        ])  # fmt: skip
    shown = [(size, name) for (size, name), _ in order]
    of = [", ".join(sorted({commit(r) for key, r in found.items() if key in shown})) for found in (eager, wide)]
    caption = (
        "A whole training step through `elman train` (reading, forward, backward, clipping, AdamW, metrics; float32 weights, "
        f"bfloat16 autocast), B = 32, T = {data['T']}, medians; one {data['gpu']}, torch {data['versions']['torch']}. "
        f"Rows with the same commit were measured within minutes on one machine; eager rows come from {of[0]}, B = 64 from "
        f"{of[1]}. `benchmarks/training_step.py`, `benchmarks/results/training_step_h200.json`. LSTM and GRU ran cuDNN here; "
        "with the kernels of decision 32 "
        + " and ".join(
            f"`{r['model']}` trains at {r['tok_s']:,} tok/s" for r in gates["steps"] if r["backend"] == "cuda"
        )
        + " (`benchmarks/results/gates_h200.json`)."
    )
    return f"{caption}\n\n{markdown(rows)}"


def remarks(row: dict[str, Any]) -> str:
    """Of a row: its note, and that its steps, all the same to the GPU, took different times (its clocks changed)."""
    words = [row["note"]] if "note" in row else []
    if row["setting"].endswith("graph") and row.get("ms_p90", 0) > 1.25 * row.get("ms_p10", 0):
        words.append(f"unsteady: {row['ms_p10']:.1f} to {row['ms_p90']:.1f} ms")
    return ", ".join(words)


def decoding_table() -> str:
    """Bytes per second of decoding, by model and number of samples."""
    data = json.loads((RESULTS / "decoding_h200.json").read_text())
    found = {(r["model"], r["samples"], r["how"]): r for r in data["rows"]}
    rows = [
        [
            "model",
            "parameters",
            "samples",
            "bytes/s",
            "µs per step",
            "`generate(custom_generate=in_bursts)`",
            "`generate()`",
        ]
    ]
    for (name, samples, how), r in found.items():
        if how == "graph":
            others = [found.get((name, samples, other)) for other in ("bursts", "generate")]
            words = [f"{o['bytes_s']:,}" if o else "–" for o in others]
            step = f"{1e6 * samples / r['bytes_s']:.0f}"
            rows.append(
                [name.replace("@", " "), f"{r['parameters']:,}", str(samples), f"{r['bytes_s']:,}", step, *words]
            )
    versions = f"torch {data['versions']['torch']}, transformers {data['versions']['transformers']}"
    caption = (
        "Decoding in bfloat16 with the sampling of `elman generate`, bytes per second over all samples, medians; `generate()` "
        f"includes prompt and recording; one {data['hardware']}, {versions}, {_commits(data)}. "
        "`benchmarks/generation.py`, `benchmarks/results/decoding_h200.json`."
    )
    return f"{caption}\n\n{markdown(rows)}\n\n{rules_table(data['recurrences'])}"


def rules_table(data: dict[str, Any]) -> str:
    """Microseconds of one step of the linear rules, ours and fla's."""
    samples = list(dict.fromkeys(r["samples"] for r in data["rows"]))
    found = {(r["rule"], r["samples"]): r for r in data["rows"]}
    rows = [["rule", *(f"{n} sample{'s' * (n > 1)}" for n in samples)]]
    for name in dict.fromkeys(r["rule"] for r in data["rows"]):
        cells = [found[name, n] for n in samples]
        rows.append([name.replace("_", " "), *(f"{r['us']} / {r['fla_us']}" for r in cells)])
    caption = (
        "µs of one step of the linear rules alone, our kernels with the cells of `tests/linear_cells.py` / fla-core "
        f"{data['fla-core']}'s fused_recurrent functions: {data['heads']} heads of {data['keys']} x {data['values']}, inputs "
        f"in bfloat16, states in float32, CUDA graphs of many steps, commit {data['commit']}."
    )
    return f"{caption}\n\n{markdown(rows)}"


def budget_table() -> str:
    """Where a step's time should go, and what was measured (`step_budget.py`)."""

    dense, matrix = (json.loads((RESULTS / f"{name}_h200.json").read_text()) for name in ("dense", "matrix_state"))
    caption = (
        "Calculated by `python benchmarks/step_budget.py` (B = 32, T = 512, one H200, bfloat16 autocast over float32 weights): "
        f"recurrences as timed alone (`benchmarks/results/dense_h200.json`, commit {dense['commit'][:7]}, and "
        f"`matrix_state_h200.json`, {matrix['commit'][:7]}), the rest from bytes and products. Below the sum: what "
        "`elman train` measured (`training_step_h200.json`, kernel tables beside it; `python benchmarks/training_step.py "
        "--targets --profile`)."
    )
    return f"{caption}\n\n{step_budget.table(RESULTS)}"


def checkpoints_table() -> str:
    """The trained models of `elman-checkpoints`."""
    data = json.loads((RESULTS / "checkpoints_h200.json").read_text())
    rows = [["model", "parameters", "held-out bits per byte", "trained for", "training, tok/s", "bytes of weights"]]
    for name, run in sorted(data["models"].items(), key=lambda item: item[1]["bits_per_byte_bf16"]):
        rows.append([
            f"[`pretrained/{name}`](elman_checkpoints/{name}/README.md)", f"{run['parameters']:,}",
            f"{run['bits_per_byte_bf16']:.4f}", f"{run['minutes']} minutes", f"{run['tok_s']:,}", f"{run['weights_bytes']:,}",
        ])  # fmt: skip
    return markdown(rows)


def sums_table() -> str:
    """Milliseconds of all gradients' sums, by model, number of GPUs and way."""
    data = json.loads((RESULTS / "gradient_sums_h200.json").read_text())
    ways = {
        "flat 25": "copied to buckets of 25 MB", "flat 256": "to buckets of 256 MB", "each": "one by one, in place",
        "grouped": "grouped, in place", "core": "as it is now",
    }  # fmt: skip
    found = {(r["model"], r["gpus"], r["way"]): r for r in data["rows"]}
    rows = [["", "gradients", "GPUs", *ways.values(), "GB/s through every link"]]
    for model, gpus in dict.fromkeys((m, n) for m, n, _ in sorted(found)):
        core = found[model, gpus, "core"]
        ms = (f"{found[model, gpus, way]['ms']:.2f}" for way in ways)
        rows.append([model, f"{core['megabytes']:.0f} MB", str(gpus), *ms, f"{core['bus_gb_s']:.0f}"])
    without = " without NVLink's multicast" if data["environment"].get("NCCL_NVLS_ENABLE") == "0" else ""
    caption = (
        f"Milliseconds to sum all gradients of a model, float32, in a CUDA graph; {data['gpu']}s, NCCL {data['nccl']}"
        f"{without}, commit {data['commit']}. `benchmarks/gradient_sums.py`, `benchmarks/results/gradient_sums_h200.json`."
    )
    return f"{caption}\n\n{markdown(rows)}"


def rendered(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """`text` with what stands between `<!-- name -->` and `<!-- /name -->` replaced by the table of that name."""
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"the page has no marks for the table {name!r}: <!-- {name} --> … <!-- /{name} -->")
        text = pattern.sub(lambda m, t=table: f"{m[1]}{t()}\n{m[2]}", text)
    return text


def _pair(cell: Any) -> str:
    return (
        f"{cell['forward']['median']:.2f} / {cell['forward_backward']['median']:.2f}" if isinstance(cell, dict) else "–"
    )


def _commits(data: dict[str, Any]) -> str:
    """Of the run, and of rows of other runs in its file."""
    others: dict[str, dict[str, None]] = {}
    for row in data["rows"]:
        if "commit" in row:
            others.setdefault(row["commit"], {})[row["model"].replace("@", " ")] = None
    return f"commit {data['commit']}" + "".join(f" ({', '.join(names)}: {at})" for at, names in others.items())


def _machine(data: dict[str, Any]) -> str:
    torch = data["torch"] if "torch" in data else data["versions"]["torch"]
    cuda = f", CUDA {data['cuda']}" if "cuda" in data else ""
    return f"one {data['gpu']}, torch {torch}{cuda}, commit {data['commit']}"


def tracking_table() -> str:
    """How well small models track the products of permutations: a row for each model, its seeds beside each other."""
    data = json.loads((RESULTS / "state_tracking.json").read_text())
    found: dict[str, dict[str, list[str]]] = {}
    later: dict[str, str] = {}  # rows of another commit
    for row in data["rows"]:
        sizes = ("n_heads", "n_state", "head_dim", "d_state", "headdim", "gate_activation")
        options = ", ".join(f"{k}={json.dumps(v)}" for k, v in row["options"].items() if k not in sizes)
        model = row["variant"] + (f", `{options}`" if options else "")
        later |= {model: row["commit"][:7]} if "commit" in row else {}
        for length, share in row["right"].items():
            cells = found.setdefault(model, {})
            cells.setdefault(f"{row['group']}, {length} steps", []).append(f"{share:.2f}")
    columns = list(next(iter(found.values())))
    rows = [(model, *(", ".join(cells[c]) for c in columns)) for model, cells in found.items()]
    commits = "; ".join((data["commit"][:7], *(f"{model}: {commit}" for model, commit in later.items())))
    return f"{markdown([('model', *columns), *rows])}\n\ntorch {data['torch']} on a CPU, commit {commits}."


PAGES = {
    "README.md": {"models": models_table, "peers": peers_table},
    "docs/claims.md": {"tracking": tracking_table},
    "docs/speed.md": {"step": step_table, "decoding": decoding_table, "dense": dense_table, "matrix": matrix_table},
    "checkpoints/README.md": {"checkpoints": checkpoints_table},
    "plugins/e88/README.md": {"recurrence": e88_table},
    "docs/decisions/0016-several-processes.md": {"sums": sums_table},
    "docs/decisions/0017-the-whole-step.md": {"budget": budget_table},
}

if __name__ == "__main__":
    for page, tables in PAGES.items():
        (ROOT / page).write_text(rendered((ROOT / page).read_text(), tables))
