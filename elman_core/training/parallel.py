"""Data parallelism over several processes: each holds all weights, or a part of them.

`ddp`: every rank holds the model; torch's DistributedDataParallel averages the gradients while the backward still runs; if
the whole step is one CUDA graph, the graph averages them after the backward (`ranks.tensors.average`). `fsdp`: FSDP2's
`fully_shard`; each rank holds a part of weights, gradients and optimizer state, and a block is gathered while it is used.
Either way, a rank computes its rows of the batch, and the mean over ranks is the mean over rows.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from elman_core.registry import ConfigError, RankError

from .objective import Outputs, forward_loss
from .ranks.group import Ranks, everywhere
from .ranks.tensors import average, checksum, is_sharded, whole
from .settings import Settings
from .step import OneProcess


def kind_of(settings: Settings, ranks: Ranks) -> str:
    """Return the kind of parallelism: `none`, `ddp` or `fsdp`.
    Raises `ConfigError` for a batch that does not divide, or a setting that cannot be sharded."""
    train = settings.train
    if ranks.size == 1:
        return "none"
    unit = ranks.size * train.accumulate
    if train.batch_size % unit:
        raise ConfigError(
            f"train.batch_size {train.batch_size} does not divide into {ranks.size} ranks"
            + (f" of {train.accumulate} micro-batches" if train.accumulate > 1 else "")
            + f": the nearest that does is {max(unit, round(train.batch_size / unit) * unit)}"
        )
    kind = "ddp" if train.parallel == "auto" else train.parallel
    if kind == "fsdp" and train.optimizer != "adamw":
        raise ConfigError(f"train.parallel='fsdp' needs train.optimizer='adamw', not {train.optimizer!r}: use 'ddp'")
    if kind == "fsdp" and settings.data.sampling == "tbptt":
        # Rows restart at different places on different ranks, which would gather the weights a different number of times.
        raise ConfigError("train.parallel='fsdp' does not work with data.sampling='tbptt': use 'ddp'")
    return kind


def make_processes(
    kind: str, ranks: Ranks, model: nn.Module, device: torch.device, captured: bool = False
) -> OneProcess:
    """The connection of a step to the other ranks. `fsdp` replaces the model's parameters: make the optimizer afterwards. A
    step that is `captured` as a CUDA graph cannot use torch's own wrapper."""
    if kind == "none":
        return OneProcess()
    if kind == "fsdp":
        return Sharded(ranks, model, device)
    return Summed(ranks, model) if captured else Replicated(ranks, model)


def require_one_model(model: nn.Module, ranks: Ranks) -> None:
    """Raise `RankError` on every rank unless all hold the same weights and buffers, to the bit."""
    if ranks.size == 1 or is_sharded(model):
        return
    sums = ranks.gather(checksum([*model.parameters(), *model.buffers()]))
    odd = [rank for rank, total in enumerate(sums) if total != sums[0]]
    if odd:
        what = f"rank {odd[0]} no longer holds the weights of rank 0: nothing was saved; check for a GPU that is wrong"
        raise everywhere(RankError(f"{what}, or a hook that acts on one rank alone"))


class _Loss(nn.Module):
    """The loss as a module, because torch's wrappers take modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor, **how: Any) -> Outputs:
        return forward_loss(self.model, inputs_BT, targets_BT, **how)


class Shared(OneProcess):
    """A step on several ranks. Beside the loss it sums notes, a few numbers of each rank: `tell` sets them before a step, and
    `heard` are their sums after it."""

    NOTES = 8

    def __init__(self, ranks: Ranks, model: nn.Module) -> None:
        self.ranks = ranks
        device = next(model.parameters()).device
        self.notes = torch.zeros(self.NOTES, dtype=torch.float64, device=device)
        self.heard = torch.zeros_like(self.notes)

    def tell(self, notes: Sequence[float]) -> None:
        self.notes[: len(notes)].copy_(torch.tensor(notes, dtype=torch.float64), non_blocking=True)

    def refusal(self, own: str) -> str:
        """All ranks record the step or none does: NCCL requires an operation to be in a graph on every rank or on none."""
        for rank, why in enumerate(self.ranks.gather(own)):
            if why:
                return why if why == own else f"rank {rank}: {why}"
        return ""

    def mean(self, values: Tensor) -> Tensor:
        packed = torch.cat([values.to(torch.float64), self.notes])
        dist.all_reduce(packed)
        self.heard.copy_(packed[len(values) :])
        return (packed[: len(values)] / self.ranks.size).to(values.dtype)


class Replicated(Shared):
    """Every rank holds the model; gradients are averaged while the backward runs."""

    def __init__(self, ranks: Ranks, model: nn.Module) -> None:
        super().__init__(ranks, model)
        # Buffers are functions of the weights, which are equal: nothing to send. Newer torch has a new name for the option.
        wrapper = nn.parallel.DistributedDataParallel
        is_new = "forward_sync_buffers" in inspect.signature(wrapper.__init__).parameters
        sends: dict[str, Any] = {"forward_sync_buffers" if is_new else "broadcast_buffers": False}
        self.wrapped = wrapper(_Loss(model), gradient_as_bucket_view=True, **sends)

    def forward(self, model: Any, inputs_BT: Tensor, targets_BT: Tensor, **how: Any) -> Outputs:
        try:
            return self.wrapped(inputs_BT, targets_BT, **how)
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
            idle = re.search(r"did not receive grad for rank \d+: (\d+)", str(error))
            names = [name for name, p in model.named_parameters() if p.requires_grad]
            name = names[int(idle[1])] if idle else "a parameter"
            wrong = ConfigError(f"{name} got no gradient: use train.parallel=fsdp, or one process")
            raise everywhere(wrong) from error

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.wrapped.no_sync()


class Summed(Shared):
    """Every rank holds the model; gradients are averaged after the backward. A CUDA graph can hold all of it."""

    def reduce_gradients(self, params: Sequence[Tensor]) -> None:
        average([p.grad for p in params if p.grad is not None], self.ranks.size)


class Sharded(Shared):
    """Each rank holds a part of the model; FSDP2 gathers a block while it is used."""

    def __init__(self, ranks: Ranks, model: nn.Module, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # Mixers return views; nothing here writes to them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        mesh = init_device_mesh(device.type, (ranks.size,))
        for block in model.model.layers:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        self.whole = _Loss(model)
        fully_shard(self.whole, mesh=mesh)  # what is in no block: embedding, last norm, head
        model.to(device)  # buffers
        super().__init__(ranks, model)
        # The norm and the flag of failure are plain scalars beside sharded gradients: they are the same everywhere.
        DTensor._op_dispatcher._allow_implicit_replication = True

    def forward(self, model: Any, inputs_BT: Tensor, targets_BT: Tensor, **how: Any) -> Outputs:
        return self.whole(inputs_BT, targets_BT, **how)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        torch.clear_autocast_cache()  # a weight that was gathered again has to be cast again
        return nullcontext()

    def norm(self, grads: Iterable[Tensor]) -> Tensor:
        return whole(get_total_norm(list(grads)))
