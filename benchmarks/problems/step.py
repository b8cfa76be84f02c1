"""A whole training step: tok/s, milliseconds, and the peak of memory allocated by torch, graphs included.

Ours: a run of `elman train` with everything in a step: batches read ahead, forward and backward under bfloat16 autocast with
float32 weights, norm of the gradient, clipping, fused AdamW, metrics written and hooks called; tok/s from its own metrics.
Peers, with weights, gradients and optimizer state in bfloat16 (less work and less memory than ours): mamba_ssm's
MambaLMHeadModel; fla's GatedDeltaNet layers between fla's fused norms; transformers' LLaMA; xlstm's blocks; the same clipping
and optimizer, the loss read after every step. Each runs eagerly and as a CUDA graph, some also compiled. --only names models
(`e88:conv_h5v256@736x8`), variants, settings or peers; a model that is not in the list is timed too. ELMAN_PROFILE=FOLDER
writes a table of kernels of each of our rows.

`packed`: a step whose rows hold whole documents, beside the same step without.

`optimizers`: tok/s of captured steps with AdamW and with schedule-free AdamW, and one update alone beside the package's own,
which waits for the host in every step; in the graph its counts are frozen, so only its passes over memory are timed.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import Row, Setting, captured
from torch import Tensor, nn

from elman_core.model.graph import CudaRecorder
from elman_core.registry import parse_size
from elman_core.training.settings import from_dict
from elman_core.training.start import start

from .step_profile import profile_steps

OURS: dict[str, tuple[str, ...]] = {
    "25M": ("slstm@768x6",),
    "27M": (
        "e88:conv_h32n32@640x8", "e88:conv_h16n64@640x8", "e88:conv_linear@640x8", "e88:conv_h5v256@736x8",
        "e88:conv_h5n128v256@640x8", "gdn@640x8", "mlstm@768x11",
    ),
    "49M": (
        "e1@1280x6", "e42@1664x6", "e88:h32n32@1536x8", "gru@1024x6", "lstm@896x6", "transformer@640x10", "mamba2@640x19",
        "gdn@640x15",
    ),
    "100M": (
        "e1@1024x19", "e42@1280x20", "e88:h32n32@1536x16", "gru@768x21", "lstm@640x24", "transformer:narrow_x20@640x20",
        "mamba2:x20@896x20", "gdn@768x20",
    ),
}  # fmt: skip
PEERS = {
    "25M": {"xlstm sLSTM": (768, 7)},
    "27M": {"xlstm mLSTM": (768, 7)},
    "49M": {"mamba_ssm": (640, 19), "fla": (640, 15), "llama": (640, 10)},
    "100M": {"mamba_ssm": (896, 20), "fla": (768, 20), "llama": (640, 20)},
    "tiny": {"llama": (64, 1)},
}
COMPILED = ("transformer", "mamba2", "gdn")
UNCAPTURED = ("xlstm sLSTM",)
"""Peers that cannot be captured. A capture that fails leaves torch's random numbers unusable for the rows behind it."""
PACKED = (
    "e1@1280x6", "e42@1664x6", "lstm@896x6", "gru@1024x6", "e65@1280x6", "e23@384x6", "e88:h32n32@1536x8",
    "e88:conv_h5n128v256@640x8", "e97:conv_h5v256@592x8",
)  # fmt: skip
CLIP, LR, STEPS = 1.0, 1e-4, 20


@contextmanager
def trainer(
    name: str, launch: str, batch: int, length: int, setting: Setting, documents: str = "keep", **train: Any
) -> Iterator[Any]:
    """The trainer of a run of this shape. documents: as in `data.documents`. `train`: further settings."""
    variant, width, depth = parse_size(name)
    text = setting.folder / "text"
    if not text.exists():
        draw = torch.Generator().manual_seed(0)
        text.write_bytes(torch.randint(256, (2**22,), generator=draw, dtype=torch.uint8).numpy().tobytes())
    settings = from_dict({
        "model": {"variant": variant, "hidden_size": width, "num_hidden_layers": depth},
        "data": {"path": str(text), "documents": documents},
        "train": {
            "batch_size": batch, "chunk_size": length, "steps": 1_000_000, "device": str(setting.device), "lr": LR,
            "clip": CLIP, "schedule": "constant", "warmup": 0, "launch": launch, "save_every": 0, "eval_every": 0, **train,
        },
    })  # fmt: skip
    made = start(settings, setting.folder / f"run{len(list(setting.folder.iterdir()))}", quiet=True)
    try:
        yield made
    finally:
        made.feed.close()
        made.folder.close()


def steady(made: Any, warm: int, steps: int) -> list[float]:
    """Milliseconds of each of `steps` steps of a trainer, after its first ones and `warm` more."""
    from elman_core.metrics import METRICS

    while not made.compute.ready:
        made.advance(1)
    made.advance(warm)
    before = made.step
    made.advance(steps)
    lines = [json.loads(line) for line in (made.path / METRICS).read_text().splitlines()]
    tokens = made.settings.tokens_per_step  # tok_s leaves out the filling of packed rows
    return [1e3 * tokens * line.get("fill", 1) / line["tok_s"] for line in lines if line["step"] > before]


def figures(ms: list[float], tokens: int) -> Row:
    """Medians and deciles, and the peak of memory since `forget_peak`."""
    ms = sorted(ms)
    tenth, middle = len(ms) // 10, statistics.median(ms)
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None
    return {
        "tok_s": round(1e3 * tokens / middle),
        "ms": {"median": round(middle, 3), "p10": round(ms[tenth], 3), "p90": round(ms[-1 - tenth], 3)},
        "peak_gib": peak,
    }  # fmt: skip


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def ours(setting: Setting, name: str, launch: str, batch: int, length: int, **train: Any) -> Row:
    forget_peak()
    warm, steps = (1, 2) if setting.tiny else (5, STEPS)
    with trainer(name, launch, batch, length, setting, **train) as made:
        ms = steady(made, warm, steps)
        row = {
            "parameters": sum(p.numel() for p in made.model.parameters()),
            "backend": made.model.model.layers[0].mixer.backend(),
            "weights": "float32, bfloat16 autocast" if made.settings.train.precision == "bf16" else "float32",
            "ran": made._how()["mode"],
            **figures(ms, batch * length),
        }
        if folder := os.environ.get("ELMAN_PROFILE"):
            taken = profile_steps(lambda: made.advance(5), 5, made.device)
            taken.write(Path(folder, f"{name.replace(':', '_').replace('@', '_')}_{launch}"))
            row["idle"] = round(taken.idle, 4)
        return row


# peers ---------------------------------------------------------------------------------------------------------------


class FlaStack(nn.Module):
    """fla's GatedDeltaNet layers alone (its language model has an MLP in each layer), pre-norm, residual in float32, tied."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        from elman_baselines.gdn import op

        op.library.functions()  # lifts the library's refusal on Hopper for keys of 128, where its gradients were checked
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

    found = op.library.functions()  # copes with an installation without the extension of Mamba-1
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    layer: dict[str, Any] = {"layer": "Mamba2", "d_state": 128} | (
        {"use_mem_eff_path": False} if found.whole is None else {}
    )
    return Logits(MambaLMHeadModel(MambaConfig(d_model=width, n_layer=depth, vocab_size=256, ssm_cfg=layer)))


def llama(width: int, depth: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=depth, num_attention_heads=width // 64, num_key_value_heads=width // 64,
        intermediate_size=int(2.6 * width), vocab_size=256, tie_word_embeddings=True, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    return Logits(LlamaForCausalLM(config))


def xlstm(width: int, depth: int, matrix: bool) -> nn.Module:
    """xlstm's blocks as in its README, all with sLSTM (and a gated feed-forward) or all with mLSTM."""
    import xlstm as package

    scalar = package.sLSTMLayerConfig(backend="cuda" if torch.cuda.is_available() else "vanilla", num_heads=4)
    after = package.FeedForwardConfig(proj_factor=1.3, act_fn="gelu")
    stack = package.xLSTMBlockStackConfig(
        mlstm_block=package.mLSTMBlockConfig(mlstm=package.mLSTMLayerConfig(num_heads=4)),
        slstm_block=package.sLSTMBlockConfig(slstm=scalar, feedforward=after),
        slstm_at=[] if matrix else "all", num_blocks=depth, embedding_dim=width, context_length=512,
    )  # fmt: skip
    return nn.Sequential(nn.Embedding(256, width), package.xLSTMBlockStack(stack), nn.Linear(width, 256, bias=False))


MAKERS: dict[str, Callable[[int, int], nn.Module]] = {
    "mamba_ssm": mamba_lm, "fla": FlaStack, "llama": llama, "xlstm sLSTM": partial(xlstm, matrix=False),
    "xlstm mLSTM": partial(xlstm, matrix=True),
}  # fmt: skip


def peer(setting: Setting, name: str, width: int, depth: int, launch: str, batch: int, length: int) -> Row:
    """A plain loop over one batch: forward, loss, backward, clip, fused AdamW, and reading the loss; a graph has all but the
    last.
    """
    forget_peak()
    model = MAKERS[name](width, depth).to(setting.device, setting.dtype).train()
    if launch == "compile":
        model.compile(dynamic=False)
    graph, params = launch == "graph", list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=graph)
    tokens_BT = torch.randint(256, (batch, length + 1), device=setting.device)

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
        recorder = CudaRecorder(setting.device)
        with recorder.work():
            for _ in range(3):  # libraries choose and allocate
                work()
        run = recorder.record(work)
    warm, steps = (1, 2) if setting.tiny else (5, STEPS)
    ms = []
    for _ in range(warm + steps):
        begin = time.perf_counter()
        run().item()
        ms.append(1e3 * (time.perf_counter() - begin))
    about = {"parameters": sum(p.numel() for p in params), "weights": str(setting.dtype).removeprefix("torch.")}
    return about | figures(ms[warm:], batch * length)


def rows(setting: Setting) -> Iterator[Row]:
    sizes = {"tiny": ("transformer@64x1", "lstm@16x1", "e42@16x1")} if setting.tiny else OURS
    named = tuple(word for word in setting.only if "@" in word and word not in {m for of in sizes.values() for m in of})
    batches, length = ((2,), 8) if setting.tiny else ((32, 64), 512)
    for size, models in {**sizes, **({"named": named} if named else {})}.items():
        for batch in batches:
            shape = {"size": size, "B": batch, "T": length}
            for model in models:
                variant = parse_size(model)[0].partition(":")[0]
                launches = (
                    ("eager",)
                    if setting.device.type == "cpu"
                    else ("eager", "graph", *(("compile+graph",) if variant in COMPILED else ()))
                )
                for launch in launches:
                    if setting.wants(model=model, variant=variant, size=size, launch=launch):
                        yield setting.row(
                            lambda m=model, h=launch, b=batch: ours(setting, m, h, b, length),  # type: ignore[misc]
                            **shape, who=model, kind="ours", launch=launch,
                        )  # fmt: skip
            for name, (width, depth) in PEERS.get(size, {}).items() if setting.peers else ():
                for launch in ("eager",) if setting.device.type == "cpu" else ("eager", "graph", "compile"):
                    if launch == "graph" and name in UNCAPTURED:
                        continue
                    if setting.wants(who=name, size=size, launch=launch):
                        yield setting.row(
                            lambda n=name, w=width, d=depth, h=launch, b=batch: peer(setting, n, w, d, h, b, length),  # type: ignore[misc]
                            **shape, who=name, kind="peer", width=width, depth=depth, launch=launch,
                        )  # fmt: skip


def packed(setting: Setting) -> Iterator[Row]:
    """A step with documents that begin inside its rows, beside the same step without: random bytes, a separator in 256."""
    launch, batch, length = ("eager", 2, 16) if setting.device.type == "cpu" else ("graph", 32, 512)
    for model in ("e42@16x1", "lstm@16x1") if setting.tiny else PACKED:
        for documents in ("keep", "pack"):
            if setting.wants(model=model, documents=documents):
                yield setting.row(
                    lambda m=model, d=documents: ours(setting, m, launch, batch, length, documents=d),  # type: ignore[misc]
                    model=model, who=documents, kind="ours", B=batch, T=length,
                )  # fmt: skip


def optimizers(setting: Setting) -> Iterator[Row]:
    from elman_core.training.optim.schedule_free import ScheduleFree

    launch, batch, length = ("eager", 2, 8) if setting.device.type == "cpu" else ("graph", 64, 512)
    for model in ("lstm@16x1",) if setting.tiny else ("e1@1280x6", "e42@1664x6", "e88:h32n32@1536x8"):
        for name in ("adamw", "schedulefree"):
            yield setting.row(
                lambda m=model, o=name: ours(setting, m, launch, batch, length, optimizer=o),  # type: ignore[misc]
                model=model, who=name, kind="ours", B=batch, T=length,
            )  # fmt: skip

        def update(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], model: str = model) -> Row:
            with trainer(model, "eager", batch, length, setting) as made:
                shapes = [p.shape for p in made.model.parameters()]
            params = [nn.Parameter(torch.randn(s, device=setting.device)) for s in shapes]
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer = make(params)
            step = captured(optimizer.step).replay if setting.device.type == "cuda" else optimizer.step
            return {"parameters": sum(p.numel() for p in params), "update": setting.us(step)}

        def theirs(params: list[nn.Parameter]) -> torch.optim.Optimizer:
            from schedulefree import AdamWScheduleFree

            made = AdamWScheduleFree(params, lr=LR)
            made.train()
            return made

        def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
            lr = torch.tensor(LR, device=setting.device)
            return torch.optim.AdamW(params, lr=lr, fused=True, capturable=setting.device.type == "cuda")

        updates: dict[str, tuple[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
            "adamw, an update": ("ours", adamw),
            "schedulefree, an update": ("ours", lambda params: ScheduleFree([{"params": params}], LR, (0.9, 0.95))),
            "schedulefree's own, an update": ("peer", theirs),
        }
        for name, (kind, make) in updates.items():
            if kind == "ours" or setting.peers:
                yield setting.row(lambda make=make: update(make), model=model, who=name, kind=kind)  # type: ignore[misc]
