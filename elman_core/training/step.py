"""The computation of one optimizer step: forward, loss, backward, norm, clipping, update. The trainer does everything else.

Nothing in a step waits for the device; the device decides whether the loss and the gradient are finite. After the first step in
which they are not, no more updates happen. So weights, optimizer and carried state stay as they were before that step,
however late its values are read.

Shapes: B rows, T time; a window is T + 1 tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from elman_core.data import Batch
from elman_core.kernels.runtime import without_autocast
from elman_core.model.graph import HostCopy
from elman_core.nn.cross_entropy import IGNORED

from .failures import first_bad
from .objective import Outputs, States, forward_loss, mapped
from .optim import Optimizer
from .precision import compute_in
from .settings import TrainSettings

Terms = Callable[[Outputs], dict[str, Tensor]]


@dataclass(frozen=True)
class Windows:
    """The input of a step: the arrays of a `Batch` as tensors of the same shapes, on the model's device.

    Attributes:
        starts: None: documents begin nowhere. fresh: None: all rows continue from `carry`, or `starts` says it.
        carry: the states after the previous step, all rows; None at the start.
    """

    tokens: Tensor
    targets: Tensor | None = None
    counts: Tensor | None = None
    starts: Tensor | None = None
    filled: Tensor | None = None
    fresh: Tensor | None = None
    carry: States | None = None

    @classmethod
    def of(cls, batch: Batch) -> Windows:
        """The arrays of a batch, on the CPU: uint8, bool and int32 (torch computes little in wider unsigned dtypes)."""
        tensors: dict[str, Any] = {}
        for name in FROM_BATCH:
            array = getattr(batch, name)
            if array is None:
                continue
            if array.dtype not in (np.uint8, np.bool_):
                array = array.astype(np.int32)
            tensors[name] = torch.from_numpy(np.ascontiguousarray(array))
        return cls(**tensors)

    def each(self, change: Callable[[Tensor], Tensor]) -> Windows:
        tensors = {}
        for name in FROM_BATCH:
            tensor = getattr(self, name)
            if tensor is not None:
                tensors[name] = change(tensor)
        return Windows(**tensors, carry=mapped(change, self.carry))

    def pair(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (B, T), int64; targets that do not count are -100."""
        inputs = self.tokens.long()
        if self.targets is None:
            inputs, targets = inputs[:, :-1], inputs[:, 1:]
        else:
            targets = self.targets.long()
        if self.counts is not None:
            targets = targets.masked_fill(~self.counts, IGNORED)
        return inputs, targets


FROM_BATCH = tuple(f.name for f in dataclasses.fields(Windows) if f.name != "carry")


@dataclass(frozen=True)
class Done:
    """The result of a step.

    Attributes:
        values: loss (nats per byte), norm of the gradient before clipping, then what `names` says: terms of the loss,
            `counted`, the share of the targets that count, and `fill`, the share of the rows that is no filling; on their way
            to the host.
        carry: the states for the next step, if states are carried.
    """

    values: HostCopy
    names: tuple[str, ...] = ()
    carry: States | None = None

    def read(self) -> StepValues:
        loss, norm, *terms = self.values.read()
        return StepValues(loss, norm, dict(zip(self.names, terms, strict=True)))


@dataclass(frozen=True)
class StepValues:
    """The numbers of a step on the host."""

    loss: float
    grad_norm: float
    terms: dict[str, float]

    @property
    def finite(self) -> bool:
        """Whether all values are finite: if not, the step updated nothing."""
        return all(map(math.isfinite, (self.loss, self.grad_norm, *self.terms.values())))


class OneProcess:
    """The interface of a step to the processes that share it; here there is only one. Data parallelism replaces this class.

    A step sees the rows of its own process; norm and values are the same in every process, so all decide alike.
    """

    heard: Tensor

    def tell(self, notes: Sequence[float]) -> None:
        """Before a step: numbers that `mean` sums over the processes; the sums are then in `heard`."""

    def refusal(self, own: str) -> str:
        """Return the reason why the step cannot be recorded on one of the processes, or "". `own`: the reason on this one."""
        return own

    def forward(self, model: Any, inputs_BT: Tensor, targets_BT: Tensor, **how: Any) -> Outputs:
        """`objective.forward_loss`, through whatever wraps the model."""
        return forward_loss(model, inputs_BT, targets_BT, **how)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of each micro-batch; gradients must be complete only after the `last`."""
        return nullcontext()

    def reduce_gradients(self, params: Sequence[Tensor]) -> None:
        """After the last backward: make `p.grad` the mean over the processes, where the backward has not."""

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """The norm of the whole gradient, a scalar on the device."""
        return get_total_norm(grads)

    def mean(self, values: Tensor) -> Tensor:
        """Means over the processes; each process computed its value from its own rows."""
        return values


class TrainStep:
    """One optimizer step of a model as a function of its windows.

    Args:
        model: a `LadderForCausalLM` in training mode. optimizer: over its parameters. train: resolved settings.
        carries: whether states go from step to step (tbptt).
        terms: called with the outputs of every micro-batch; further terms of the loss. before_update: called when gradients
            are accumulated and not yet clipped. Both are for hooks.
        logits: whether `terms` reads them.
        processes: the interface for data parallelism.

    Attributes:
        failed: a scalar on the device; 1.0 from the first step on with values that were not finite.
        compiled: whether the model's backbone is compiled.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        train: TrainSettings,
        *,
        carries: bool,
        terms: Terms,
        before_update: Callable[[], Any],
        logits: bool | None,
        processes: OneProcess,
    ) -> None:
        self.model, self.optimizer, self.train, self.carries = model, optimizer, train, carries
        self.terms, self.before_update = terms, before_update
        self.processes, self.logits = processes, logits
        self.device = next(model.parameters()).device
        self.failed = torch.zeros((), device=self.device)
        self.calls, self.compiled = 0, False

    @property
    def ready(self) -> bool:
        """Whether the next call runs at the final speed: the first builds and warms up, the second compiles."""
        return self.calls > self.compiled

    def __call__(self, windows: Windows, lr: float) -> Done:
        """Compute the step and, if everything is finite, update the model."""
        self.optimizer.set_lr(lr)
        # What a model finds in its first step, such as the vectors of its spectral norms, would be compiled anew after it.
        first = self.compiled and not self.calls
        with torch.compiler.set_stance("force_eager") if first else nullcontext():
            values, names, carry = self.gradients(windows)
        self.update()
        self.calls += 1
        return Done(HostCopy.of(values), names, carry)

    def gradients(self, windows: Windows) -> tuple[Tensor, tuple[str, ...], States | None]:
        """Values, names of the terms, and states as `Done` has them, on the device; the clipped gradient is in `p.grad`."""
        values, names, carry = self._backward(windows)
        params = [p for p in self.optimizer.params.values() if p.grad is not None]
        self.processes.reduce_gradients(params)
        self.before_update()
        norm = self.processes.norm([p.grad for p in params if p.grad is not None])
        loss, *terms = self.processes.mean(values).unbind()
        values = torch.stack([loss, norm.to(loss.dtype), *terms])
        self.failed.copy_(torch.maximum(self.failed, values.isfinite().all().logical_not()))
        if self.train.clip:
            # A failed gradient is left as it is, so that diverged.json can say where it failed.
            clip_grads_with_norm_(params, self.train.clip, norm.masked_fill(self.failed > 0, 0))
        return values, names, carry

    def update(self) -> None:
        """Move the weights along the gradient, unless this step or one before it failed."""
        self.optimizer.step(failed=self.failed)

    def _backward(self, windows: Windows) -> tuple[Tensor, tuple[str, ...], States | None]:
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        terms: dict[str, Tensor] = {}
        carry: list[Any] = []
        share = self.train.accumulate
        counted = None
        if windows.counts is not None:  # the loss is the mean over what counts in all rows, wherever they are computed
            counted = self.processes.mean(windows.counts.sum(dtype=torch.float32)[None])[0].clamp(min=1e-9) / share
        with self.autocast():  # one context: a weight is cast once for all micro-batches
            for i, some in enumerate(self.micro_batches(windows)):
                with self.processes.micro_batch(last=i + 1 == share):
                    outputs = self.forward(some, counted)
                    with without_autocast(outputs.loss):
                        added = self.terms(outputs)
                        torch.stack([outputs.loss, *added.values()]).sum().div(share).backward()
                total += outputs.loss.detach() / share
                for name, value in added.items():
                    terms[name] = terms.get(name, 0) + value.detach() / share
                carry.append(mapped(Tensor.detach, outputs.states))
        if windows.counts is not None:
            terms["counted"] = windows.counts.mean(dtype=torch.float32)
        if windows.filled is not None:
            terms["fill"] = windows.filled.mean(dtype=torch.float32) / windows.tokens.shape[1]
        return torch.stack([total, *terms.values()]), tuple(terms), _join_rows(carry) if self.carries else None

    def autocast(self) -> AbstractContextManager[Any]:
        return compute_in(self.train.precision, self.device)

    def micro_batches(self, windows: Windows) -> Iterator[Windows]:
        """The windows in `train.accumulate` equal parts."""
        rows = len(windows.tokens) // self.train.accumulate
        for first in range(0, len(windows.tokens), rows):
            yield windows.each(lambda t, some=slice(first, first + rows): t[some])  # type: ignore[misc]

    def forward(self, windows: Windows, counted: Tensor | None = None) -> Outputs:
        """Loss of some windows: the sum over their targets that count, divided by `counted`. Autocast is the caller's."""
        return self.processes.forward(
            self.model,
            *windows.pair(),
            counted=counted,
            loss_chunk=self.train.loss_chunk,
            states=windows.carry,
            fresh_B=windows.fresh,
            starts_BT=windows.starts,
            return_states=self.carries,
            logits=self.logits,
        )

    def release(self) -> None:
        """Does nothing: shared operations end with each call."""

    def where_it_failed(self, windows: Windows, again: bool) -> dict[str, str] | None:
        """The first tensor that is not finite in a step that failed, as `failures.first_bad`. `again`: compute its gradient
        again, because another step was under way when its values were read."""
        if again:
            self._backward(windows)

        def forward() -> None:
            with self.autocast():
                for some in self.micro_batches(windows):
                    self.forward(some)

        return first_bad(self.model, forward)


def _join_rows(carry: list[Any]) -> States:
    """The states of all micro-batches as one of the whole batch."""
    if len(carry) == 1:
        return carry[0]
    return [
        None if branch[0] is None else {n: torch.cat([s[n] for s in branch]) for n in branch[0]}
        for branch in zip(*carry, strict=True)
    ]
