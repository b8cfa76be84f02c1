"""Time a whole training step of every installed variant on one GPU, beside the language models of the baselines' own libraries.

    python benchmarks/training_step.py [--out benchmarks/results/training_step_h200.json] [--sizes 100M] [--only mamba2,gdn]
    python benchmarks/training_step.py --targets [--profile]     the shapes that have a target, with their peers, in one run
    python benchmarks/training_step.py --merge A.json B.json …    one file of several runs on equal GPUs; of a row, the last

Ours: a run of `elman train`, with everything that it does in a step: batches read ahead, forward and backward under bfloat16
autocast with float32 weights, norm of the gradient, clipping, fused AdamW, metrics written and hooks called. The settings are
those of `train.launch`: eager, graph, compile, compile+graph. tok/s is the median over the run's own metrics.jsonl.

Peers, with weights, gradients and optimizer state in bfloat16 (less work and less memory than ours): mamba_ssm's
MambaLMHeadModel; fla's GatedDeltaNet layers between fla's fused norms; transformers' LLaMA. Eager, compiled, and as one CUDA
graph; the same batch, clipping and fused AdamW, and the loss read after every step.

Peak: the most that torch had allocated, in GiB, graphs included. What cannot run has its reason in its row. The file is
written after every row; --add keeps the rows that it already has. --profile writes, beside --out, a table of kernels by
time for every row of ours, and how much of a step the GPU stood still.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import commit, facts, under_load
from torch import Tensor, nn

from elman_core.model.graph import CudaRecorder

HERE = Path(__file__).parent
SIZES: dict[str, dict[str, str]] = {
    "50M": {
        "e1": "e1@1280x6", "e42": "e42@1664x6", "e88": "e88:h32n32@1536x8", "gru": "gru@1024x6", "lstm": "lstm@896x6",
        "transformer": "transformer@640x10", "mamba2": "mamba2@640x19", "gdn": "gdn@640x15",
    },
    "100M": {
        "e1": "e1@1024x19", "e42": "e42@1280x20", "e88": "e88:h32n32@1536x16", "gru": "gru@768x21", "lstm": "lstm@640x24",
        "transformer": "transformer:narrow_x20@640x20", "mamba2": "mamba2:x20@896x20", "gdn": "gdn@768x20",
    },
    "43M": {"e42": "e42@1536x6", "mamba2": "mamba2@640x16", "gdn": "gdn@640x13"},
    "49M": {"e1": "e1@1280x6", "mamba2": "mamba2@640x19", "gdn": "gdn@640x15"},
    "64M": {"e88": "e88:h32n16@1536x20", "mamba2": "mamba2@768x17", "gdn": "gdn@768x14"},
    "27M": {"e88": "e88:conv_h32n32@640x8", "gdn": "gdn@640x8"},
    "27M-n64": {"e88": "e88:conv_h16n64@640x8"},
    "27M-linear": {"e88": "e88:conv_linear@640x8"},
    "27M-64x256": {"e88": "e88:conv_h5v256@736x8"},
    "27M-128x256": {"e88": "e88:conv_h5n128v256@640x8"},
    "tiny": {"transformer": "transformer@64x1", "mamba2": "mamba2@32x1", "gdn": "gdn@128x1"},
}  # fmt: skip
TINY = "64x1"
PEERS = {
    "50M": {"mamba_ssm": (640, 19), "fla": (640, 15), "llama": (640, 10)},
    "100M": {"mamba_ssm": (896, 20), "fla": (768, 20), "llama": (640, 20)},
    "43M": {"mamba_ssm": (640, 16), "fla": (640, 13)},
    "49M": {"mamba_ssm": (640, 19), "fla": (640, 15)},
    "64M": {"mamba_ssm": (768, 17), "fla": (768, 14)},
    "tiny": {"llama": (64, 1)},
}
TARGETS = {"e1@1280x6": 750_000, "e42@1536x6": 700_000, "e88:h32n16@1536x20": 600_000}
"""tok/s on one H200 at B = 32, T = 512."""
SETTINGS = ("eager", "graph", "compile", "compile+graph")
CLIP, LR = 1.0, 1e-4
KEYS = ("kind", "name", "size", "B", "setting")
"""Of a row."""

Step = Callable[[], Any]


# ours ----------------------------------------------------------------------------------------------------------------


def shape(variant: str, size: str) -> str:
    """`NAME[:PRESET]@WIDTHxDEPTH` of a variant; one that this file does not know gets the nearest width of 6 or 20 layers."""
    if variant in SIZES[size]:
        return SIZES[size][variant]
    if size == "tiny":
        return f"{variant}@{TINY}"
    from elman_core.size import candidates

    target, depth = (50_000_000, 6) if size == "50M" else (100_000_000, 20)
    best = candidates(variant, None, target, depth=depth)[0]
    return f"{variant}@{best.width}x{best.depth}"


@contextmanager
def trainer(name: str, setting: str, batch: int, length: int, device: str, text: Path, **train: Any) -> Iterator[Any]:
    """The trainer of a run of this shape, in a folder that is gone afterwards. `train`: further settings."""
    from elman_core.registry import parse_size
    from elman_core.training.settings import from_dict
    from elman_core.training.start import start

    variant, width, depth = parse_size(name)
    settings = from_dict({
        "model": {"variant": variant, "hidden_size": width, "num_hidden_layers": depth},
        "data": {"path": str(text)},
        "train": {
            "batch_size": batch, "chunk_size": length, "steps": 1_000_000, "device": device, "lr": LR, "clip": CLIP,
            "schedule": "constant", "warmup": 0, "launch": setting, "save_every": 0, "eval_every": 0, **train,
        },
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        made = start(settings, Path(folder) / "run", quiet=True)
        try:
            yield made
        finally:
            made.feed.close()
            made.folder.close()


# peers ---------------------------------------------------------------------------------------------------------------


class FlaStack(nn.Module):
    """fla's GatedDeltaNet layers alone (its language model has an MLP in each layer), pre-norm, residual in float32, tied."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        from fla.layers import GatedDeltaNet
        from fla.modules import RMSNorm

        self.embedding = nn.Embedding(256, width)
        self.norms = nn.ModuleList(RMSNorm(width, eps=1e-5) for _ in range(depth + 1))
        self.layers = nn.ModuleList(
            GatedDeltaNet(hidden_size=width, expand_v=2, head_dim=128, num_heads=width // 128, layer_idx=i)
            for i in range(depth)
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD, residual_BTD = self.embedding(tokens_BT), None
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x_BTD, residual_BTD = norm(x_BTD, residual=residual_BTD, prenorm=True, residual_in_fp32=True)
            x_BTD = layer(x_BTD)[0]
        x_BTD = self.norms[-1](x_BTD, residual=residual_BTD, residual_in_fp32=True)
        return F.linear(x_BTD, self.embedding.weight)


class Logits(nn.Module):
    """A language model as tokens to logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.inner(tokens_BT).logits


def mamba_lm(width: int, depth: int) -> nn.Module:
    from elman_baselines.mamba2 import op

    found = op.load_library()  # copes with an installation without the extension of Mamba-1
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    layer: dict[str, Any] = {"layer": "Mamba2", "d_state": 128}
    if found.whole is None:
        layer["use_mem_eff_path"] = False
    return Logits(MambaLMHeadModel(MambaConfig(d_model=width, n_layer=depth, vocab_size=256, ssm_cfg=layer)))


def fla_stack(width: int, depth: int) -> nn.Module:
    from elman_baselines.gdn import op

    op.load_library()  # lifts the library's refusal on Hopper for keys of 128, where its gradients were checked
    return FlaStack(width, depth)


def llama(width: int, depth: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=depth, num_attention_heads=width // 64, num_key_value_heads=width // 64,
        intermediate_size=int(2.6 * width), vocab_size=256, tie_word_embeddings=True, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    return Logits(LlamaForCausalLM(config))


MAKERS: dict[str, Callable[[int, int], nn.Module]] = {"mamba_ssm": mamba_lm, "fla": fla_stack, "llama": llama}


def peer_step(model: nn.Module, batch: int, length: int, device: str, graph: bool = False) -> Step:
    """One step of a plain loop over one batch: forward, loss, backward, clip, fused AdamW, and the loss on the host.

    graph: all but the last as one CUDA graph, as our own steps are recorded.
    """
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=graph)
    tokens_BT = torch.randint(256, (batch, length + 1), device=device)

    def work() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        logits_BTV = model(tokens_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        return loss.detach()

    run: Callable[[], Tensor] = work
    if graph:
        recorder = CudaRecorder(torch.device(device))
        with recorder.work():
            for _ in range(3):  # libraries choose and allocate
                work()
        run = recorder.record(work)
    return lambda: run().item()


# measuring -----------------------------------------------------------------------------------------------------------


def measure(step: Step, tokens: int, warm: int, steps: int) -> dict[str, Any]:
    """Seconds of `steps` steps, one by one, after `warm` that do not count."""
    cuda = torch.cuda.is_available()
    for _ in range(warm):
        step()
    if cuda:
        torch.cuda.synchronize()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return figures([1e3 * seconds for seconds in times], tokens)


def figures(ms: list[float], tokens: int) -> dict[str, Any]:
    """Medians and tenths of the milliseconds of each step, and the peak of memory since it was last forgotten."""
    ms = sorted(ms)
    tenth = len(ms) // 10
    return {
        "tok_s": round(1e3 * tokens / statistics.median(ms)),
        "ms": round(statistics.median(ms), 3),
        "ms_p10": round(ms[tenth], 3),
        "ms_p90": round(ms[-1 - tenth], 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None,
    }


def random_text(folder: Path) -> Path:
    """Four megabytes, the same every time."""
    draw = torch.Generator().manual_seed(0)
    path = folder / "text"
    path.write_bytes(torch.randint(256, (2**22,), generator=draw, dtype=torch.uint8).numpy().tobytes())
    return path


def steady(made: Any, warm: int, steps: int) -> list[float]:
    """Milliseconds of each of so many steps of a trainer, once they run as they will, and `warm` more."""
    from elman_core.metrics import METRICS

    while not made.compute.ready:
        made.advance(1)
    made.advance(warm)
    before = made.step
    made.advance(steps)
    lines = [json.loads(line) for line in (made.path / METRICS).read_text().splitlines()]
    return [1e3 * made.settings.tokens_per_step / line["tok_s"] for line in lines if line["step"] > before]


def run_ours(name: str, setting: str, batch: int, given: argparse.Namespace, text: Path) -> dict[str, Any]:
    from step_profile import profile_steps

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with trainer(name, setting, batch, given.length, given.device, text) as made:
        ms = steady(made, given.warm, given.steps)
        found = {
            "model": name,
            "parameters": sum(p.numel() for p in made.model.parameters()),
            "backend": made.model.model.layers[0].mixer.backend(),
            "weights": "float32, bfloat16 autocast" if made.settings.train.precision == "bf16" else "float32",
            "ran": made._how()["mode"],
            "warm_up_s": round(made.warm_up, 1),
            **figures(ms, batch * given.length),
            "under_load": under_load(lambda: made.advance(1)),
            "target": TARGETS.get(name) if (batch, given.length) == (32, 512) else None,
        }
        if given.profile:
            found["profile"] = f"{given.out.stem}_{name.replace(':', '_').replace('@', '_')}_{setting}"
            taken = profile_steps(lambda: made.advance(5), 5, made.device)
            taken.write(given.out.parent / found["profile"])
            found["idle"] = round(taken.idle, 4)
        return found


def run_peer(name: str, size: str, setting: str, batch: int, given: argparse.Namespace) -> dict[str, Any]:
    width, depth = PEERS[size][name]
    torch.manual_seed(0)
    if (
        torch.cuda.is_available()
    ):  # a graph's replays take no memory: what its recording took counts, as it does in ours
        torch.cuda.reset_peak_memory_stats()
    model = MAKERS[name](width, depth).to(given.device, torch.bfloat16).train()
    if setting == "compile":
        model.compile(dynamic=False)
    about = {
        "model": f"{name} {width}x{depth}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": "bfloat16",
    }
    step = peer_step(model, batch, given.length, given.device, graph=setting == "graph")
    return about | measure(step, batch * given.length, given.warm, given.steps) | {"under_load": under_load(step)}


def row_of(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` measured, or why it could not."""
    try:
        return run()
    except Exception as error:  # a row of the table: any failure of any library is a result
        return {"reason": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    finally:
        gc.collect()
        torch.compiler.reset()
        if torch.cuda.is_available():
            # cuBLAS keeps 32 MiB for each stream and thread; the next row's peak would contain them.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def facts_of_run(given: argparse.Namespace) -> dict[str, Any]:
    what = "a whole training step; see the docstring of benchmarks/training_step.py"
    return {"what": what, "T": given.length, "steps": given.steps, **facts(given.commit)}


def jobs(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from elman_core.registry import list_variants

    variants = [n for n, entry in list_variants().items() if not entry.needs]
    for size, batch in itertools.product(given.sizes, given.batches):
        known = size in ("50M", "100M", "tiny")  # elsewhere, only the shapes that are named
        names = [("ours", v) for v in variants if known or v in SIZES[size]]
        names += [("peer", p) for p in PEERS.get(size, {})]
        for (kind, name), setting in itertools.product(names, given.settings):
            if (not given.only or name in given.only) and not (kind == "peer" and setting == "compile+graph"):
                yield {"kind": kind, "name": name, "size": size, "B": batch, "setting": setting}


def arguments(given: list[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [w for w in text.split(",") if w]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "training_step_h200.json")
    parser.add_argument("--add", action="store_true", help="keep the rows of --out, and run those that it lacks")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="join these into --out; measures nothing")
    parser.add_argument("--sizes", type=words, default=["100M", "50M"], help=f"of {', '.join(SIZES)}")
    parser.add_argument("--batches", type=lambda t: [int(b) for b in words(t)], default=[32, 64])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--settings", type=words, default=list(SETTINGS))
    parser.add_argument("--only", type=words, default=[], help="names of variants and peers")
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--targets", action="store_true", help="the shapes that have a target, B = 32, with their peers"
    )
    parser.add_argument("--profile", action="store_true", help="write a table of kernels for every row of ours")
    parser.add_argument("--commit", default=commit())
    found = parser.parse_args(given)
    if found.targets:
        found.sizes, found.batches = ["49M", "43M", "64M"], [32]
    return found


def save(out: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    order = {s: i for i, s in enumerate(SETTINGS)}
    rows.sort(key=lambda r: (r["size"], r["B"], r["kind"], r["name"], order.get(r["setting"], 9)))
    out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def agree(one: Any, other: Any) -> bool:
    """Whether they are equal; of versions, those of packages that both know."""
    if isinstance(one, dict):
        return all(one[name] == other[name] for name in one.keys() & other.keys())
    return bool(one == other)


def merge(files: list[Path], out: Path) -> list[dict[str, Any]]:
    """One file of several: the last of a row stands, and rows of another commit than the first file say which.

    Raises:
        SystemExit: they are of different GPUs or versions.
    """
    read = [json.loads(file.read_text()) for file in files]
    same = ("what", "T", "steps", "gpu", "driver", "python", "versions")
    for key in same:
        if any(not agree(one[key], read[0][key]) for one in read):
            raise SystemExit(f"{key} differs: {[one[key] for one in read]}")
    found = {}
    for one in read:
        about = {} if one["commit"] == read[0]["commit"] else {"commit": one["commit"]}
        found |= {tuple(row[k] for k in KEYS): {**about, **row} for row in one["rows"]}
    rows = list(found.values())
    save(out, read[0] | {"when": min(one["when"] for one in read)}, rows)
    return rows


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    given = arguments(argv)
    if given.merge:
        return merge(given.merge, given.out)
    if given.device.startswith("cuda"):
        os.environ.setdefault("ELMAN_KERNELS", "require")  # a kernel, or the reason why there is none
    kept = json.loads(given.out.read_text())["rows"] if given.add and given.out.exists() else []
    have = {tuple(r[k] for k in KEYS) for r in kept}
    rows: list[dict[str, Any]] = list(kept)
    about = facts_of_run(given)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        text = random_text(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        for job in jobs(given):
            if tuple(job[k] for k in KEYS) in have:
                continue
            name, size, setting, batch = job["name"], job["size"], job["setting"], job["B"]
            if job["kind"] == "ours":
                found = row_of(lambda: run_ours(shape(name, size), setting, batch, given, text))  # noqa: B023
            else:
                found = row_of(lambda: run_peer(name, size, setting, batch, given))  # noqa: B023
            rows.append(job | found)
            print(json.dumps(rows[-1]), flush=True)
            save(given.out, about, rows)
    return rows


if __name__ == "__main__":
    main()
