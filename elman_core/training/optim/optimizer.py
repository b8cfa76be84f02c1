"""AdamW, schedule-free AdamW, and Muon beside AdamW; their state is tensors by parameter name and plain numbers, not pickles.

Schedule-free: Defazio et al., The Road Less Scheduled, 2024. Training weights y and base weights z are kept, both exactly;
the evaluation weights x = y + (1 - 1/beta1) (z - y) are computed into new tensors, so looking at them changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from elman_core.registry import CheckpointError, Mixer
from elman_core.training.ranks.tensors import placed
from elman_core.training.settings import TrainSettings

from . import muon
from .schedule_free import ScheduleFree

_DECAY_RATES = ("A_log", "dt_bias", "decay")


def undecayed(model: nn.Module) -> set[str]:
    """Names of parameters without weight decay: vectors, decay rates, and those that mixers list in `no_decay`."""
    names = {n for n, p in model.named_parameters() if p.ndim < 2 or n.endswith(_DECAY_RATES)}
    for prefix, module in model.named_modules():
        if isinstance(module, Mixer):
            names |= {f"{prefix}.{n}" if prefix else n for n in module.no_decay}
    return names


def matrices(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The parameters that Muon updates, the matrices of mixers without those of `undecayed`: {name: rows of each map}. One of
    three dimensions stacks matrices, such as one of each head, unless they have one row, as a convolution's."""
    rows_of: dict[str, tuple[int, ...]] = {}
    left_alone = undecayed(model)
    for prefix, module in model.named_modules():
        if isinstance(module, Mixer):
            stacked = module.stacked()
            for n, p in module.named_parameters():
                is_matrix = p.ndim == 2 or (p.ndim == 3 and p.shape[1] > 1)
                if is_matrix and f"{prefix}.{n}" not in left_alone:
                    rows_of[f"{prefix}.{n}"] = stacked.get(n, (p.shape[-2],))
    return rows_of


class Optimizer:
    """The optimizer that the settings name, over the parameters of a model that want gradients."""

    def __init__(self, model: nn.Module, settings: TrainSettings) -> None:
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        rows_of = matrices(model) if settings.optimizer == "muon" else {}
        self.matrices = {n: rows for n, rows in rows_of.items() if n in self.params}
        self.beta, self.decay = settings.beta1, settings.weight_decay
        left_alone = undecayed(model)
        others = {n: p for n, p in self.params.items() if n not in self.matrices}
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in others.items() if n not in left_alone], "weight_decay": settings.weight_decay},
            {"params": [p for n, p in others.items() if n in left_alone], "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        betas = (settings.beta1, settings.beta2)
        self.averages = settings.optimizer == "schedulefree"
        if self.averages:
            self.inner: torch.optim.Optimizer = ScheduleFree(groups, lr=settings.lr, betas=betas)
            self.inner.train()  # type: ignore[attr-defined]
        else:
            device = next(iter(self.params.values())).device
            # The learning rate lies on the device, where a recorded step finds it. The fused kernel reads it in float32.
            dtype = torch.float64 if device.type == "cpu" else torch.float32
            lr = torch.tensor(settings.lr, device=device, dtype=dtype)
            capturable = device.type == "cuda"
            self.inner = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True, capturable=capturable)

    def set_lr(self, lr: float) -> None:
        for group in self.inner.param_groups:
            group["lr"].fill_(lr)

    def step(self, failed: Tensor | None = None) -> None:
        """One update. The gradients stay. failed: a scalar on the device of the parameters; if it is 1.0, nothing changes."""
        self.inner.found_inf = failed  # type: ignore[attr-defined]  # as torch.amp.GradScaler hands it over
        self.inner.step()
        alike: dict[Any, list[Tensor]] = {}
        for name, rows in self.matrices.items():
            p = self.params[name]
            if p.grad is None:
                continue
            if not self.inner.state[p]:
                self.inner.state[p]["momentum"] = torch.zeros_like(p)
            alike.setdefault((p.shape, rows), []).append(p)
        lr_now = self.inner.param_groups[0]["lr"]
        for (_, rows), params in alike.items():
            momenta = [self.inner.state[p]["momentum"] for p in params]
            muon.update(params, rows, momenta, lr_now, self.beta, self.decay, failed)

    def zero_grad(self) -> None:
        for p in self.params.values():
            p.grad = None

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Inside, the model holds the weights to evaluate and to publish; afterwards, the same tensors as before."""
        if not self.averages:
            yield
            return
        kept: list[tuple[nn.Parameter, Tensor]] = []
        try:
            for group in self.inner.param_groups:
                for p in group["params"]:
                    if "z" in self.inner.state[p]:
                        kept.append((p, p.data))
                        p.data = torch.lerp(p.data, self.inner.state[p]["z"], 1 - 1 / group["betas"][0])
            yield
        finally:
            for p, data in kept:
                p.data = data

    # what a checkpoint holds

    def tensors(self) -> dict[str, Tensor]:
        """`{"exp_avg/<parameter>": tensor}` and so on."""
        return {
            f"{key}/{name}": value
            for name, p in self.params.items()
            for key, value in self.inner.state.get(p, {}).items()
            if isinstance(value, Tensor)
        }

    def numbers(self) -> list[dict[str, Any]]:
        """The numbers of each group that change: learning rate, and counts of a schedule-free average."""
        return [{k: v.item() for k, v in group.items() if isinstance(v, Tensor)} for group in self.inner.param_groups]

    @property
    def untouched(self) -> list[str]:
        """The parameters without a state: no gradient has reached them."""
        return [name for name, p in self.params.items() if not self.inner.state.get(p)]

    def _kept(self, name: str) -> set[str]:
        """The kinds of tensors in the state of a parameter."""
        if self.averages:
            return {"z", "exp_avg_sq"}
        return {"momentum"} if name in self.matrices else {"step", "exp_avg", "exp_avg_sq"}

    def load(self, tensors: dict[str, Tensor], numbers: list[dict[str, Any]], untouched: Sequence[str] = ()) -> None:
        """Restore the state that `tensors`, `numbers` and `untouched` returned.
        Raises `CheckpointError` for the state of other parameters than this model's."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            by_name.setdefault(name, {})[kind] = tensor
        known = {*by_name, *untouched}
        if (by_name and known != set(self.params)) or len(numbers) != len(self.inner.param_groups):
            odd = sorted(known ^ set(self.params))
            raise CheckpointError(f"the optimizer's state is of another model: {', '.join(odd[:3]) or 'other groups'}")
        kinds = {kind for values in by_name.values() for kind in values}
        keeps = {name: self._kept(name) for name in by_name}
        if kinds != set[str]().union(*keeps.values()):
            raise CheckpointError(f"the state belongs to another optimizer: it has {', '.join(sorted(kinds))}")
        lacking = sorted(f"{k}/{n}" for n, values in by_name.items() for k in keeps[n] - values.keys())
        if lacking:
            raise CheckpointError(f"the optimizer's state lacks {', '.join(lacking[:3])}")
        for name, values in by_name.items():
            p = self.params[name]
            for kind, v in values.items():
                if (v.ndim and v.shape != p.shape) or v.dtype != p.dtype or not v.isfinite().all():
                    want = f"finite {p.dtype} of the shape {tuple(p.shape)}"
                    raise CheckpointError(f"the optimizer's {kind} of {name} is not {want}")
            # `step` of the fused AdamW lives where the parameter does, as everything else.
            self.inner.state[p] = {k: placed(v, p) for k, v in values.items()}
        for group, stored in zip(self.inner.param_groups, numbers, strict=True):
            for key, value in group.items():
                if isinstance(value, Tensor):
                    value.fill_(stored[key])  # where it lies: a recorded step reads it there
