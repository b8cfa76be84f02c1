"""The training loop: one step after another, with everything that may go wrong in between."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elman_core.data import SEPARATOR, Batch, ByteFile, TrainingWindows, heldout_offsets
from elman_core.data.split import Split
from elman_core.kernels import used
from elman_core.kernels.dense_native import check_errors
from elman_core.model.graph import Sent
from elman_core.registry import (
    ConfigError,
    DataError,
    ElmanError,
    LoaderError,
    PluginError,
)

from . import ending, evaluate, memory
from .agreement import Agreement
from .checkpoint import Progress, save_checkpoint
from .display import Display
from .distributed import Ranks
from .facts import training_facts
from .hooks import acting, call, loss_terms, watched
from .modes import choose_mode, make_step
from .objective import require_constant_state
from .optim import Optimizer
from .parallel import require_one_model
from .phases import reached
from .precision import compute_in
from .prefetch import Prefetcher, Ready
from .run import RunFolder, memory_in_use, now
from .schedule import Schedule
from .settings import Settings
from .sharding import is_sharded
from .signals import listening
from .step import Done, OneProcess, StepValues, TrainStep, Windows

log = logging.getLogger("elman_core")

HISTORY = 100  # steps whose loss and gradient norm a report of divergence shows


@dataclass(frozen=True)
class Result:
    """How a training ended: `status` as in the manifest, the signal that stopped it or 0, and the last checkpoint."""

    status: str
    step: int
    signal: int = 0
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Launched:
    """A step that the device has been given.

    Attributes:
        counts: whether its time is training time, and not that of building and warming up.
        notes: what the ranks tell each other with it.
    """

    windows: Windows
    lr: float
    done: Done
    started: float
    counts: bool
    notes: Sent | None


class Trainer:
    """One training. Made by `elman_core.training.start` or `resume`; `fit()` runs it. Hooks receive it as `run`.

    Attributes:
        folder: the run's files. settings: resolved. model: a `LadderForCausalLM`. optimizer, schedule.
        progress: the cursor; what a checkpoint holds of it.
        ranks: the processes that train together, of which the first writes, shows and calls observers. processes: how a step
            is shared among them.
    """

    def __init__(
        self,
        folder: RunFolder,
        settings: Settings,
        model: Any,
        optimizer: Optimizer,
        schedule: Schedule,
        data: tuple[ByteFile, Split],
        display: Display,
        progress: Progress,
        minutes_horizon: float | None = None,
        ranks: Ranks | None = None,
        processes: OneProcess | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.processes = processes or OneProcess()
        self.folder, self.settings, self.model, self.optimizer = folder, settings, model, optimizer
        self.schedule, self.display, self.progress = schedule, display, progress
        self.file, self.split = data
        self.minutes_horizon = minutes_horizon
        train = settings.train
        self.device = next(model.parameters()).device
        self.windows = TrainingWindows(
            self.file, self.split, train.chunk_size, train.batch_size, train.seed, settings.data.sampling
        )
        # On a CPU there is nothing to hide the reading behind: the threads that compute would wait for it all the same.
        self.reader = Prefetcher(self._read, self.device) if self.device.type == "cuda" else None
        self.heldout = None
        if settings.data.heldout:
            self.heldout = heldout_offsets(self.split, train.chunk_size, settings.data.eval_bytes)
        self.carries = settings.data.sampling == "tbptt"
        if self.carries:
            require_constant_state(model, "data.sampling='tbptt'")
        if train.gradient_checkpointing:
            drops = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.modules())
            how = {"use_reentrant": False, "preserve_rng_state": drops}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        self.mode = choose_mode(settings, model, self.device, is_sharded(model))
        step = TrainStep(
            model,
            optimizer,
            train,
            carries=self.carries,
            terms=lambda outputs: loss_terms(self, outputs),
            before_update=lambda: call("elman_before_optimizer_step", run=self),
            processes=self.processes,
            # Fused they round otherwise, which is worth it on a GPU.
            logits="elman_loss_terms" in acting() or self.device.type != "cuda",
        )
        self.compute = make_step(step, self.mode)
        self.ranks.hold(self.compute)
        # A step is launched while the one before it runs; but who watches steps finds the model as that step left it.
        self.ahead = 1 if self.device.type == "cuda" and not watched() else 0
        self.launched: deque[Launched] = deque()
        self.settled_at = 0.0  # when the values of the last step arrived
        self.agreement = Agreement(self.ranks, self.processes, progress.seconds)
        self.history: deque[dict[str, float]] = deque(maxlen=HISTORY)
        self.saved: tuple[int, Path | None] = (-1, None)  # step and path of the last checkpoint
        self.evaluated = -1
        self.evaluation: dict[str, Any] | None = None
        self.warm_up = 0.0  # seconds of the steps that build, compile and warm up: reported, not counted

    def take_up(self, checkpoint: Path, progress: Progress) -> None:
        """Go on from a checkpoint whose contents model and optimizer hold already."""
        self.progress, self.saved = progress, (progress.step, checkpoint)
        self.agreement = Agreement(self.ranks, self.processes, progress.seconds)

    # what hooks read

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def step(self) -> int:
        """Optimizer steps done so far."""
        return self.progress.step

    @property
    def manifest(self) -> dict[str, Any]:
        return self.folder.manifest

    # the whole

    def fit(self) -> Result:
        """Train to the end of the settings, or to a signal, which saves first.

        Raises:
            DivergedError, OutOfMemoryError, PluginError, StorageError: after the manifest says so. Earlier checkpoints stay.
        """
        alone = self.ranks.size == 1
        self.agreement = Agreement(self.ranks, self.processes, self.progress.seconds)
        # To the very end: launchers send SIGTERM to those who are still writing down why they stop.
        with (
            listening(alone, None if alone else lambda signum: ending.stuck(self, signum)) as self.agreement.received,
            self.agreement.beating(lambda seconds: ending.silent(self, seconds), first=self.device.type == "cuda"),
        ):
            return self._fit()

    def _fit(self) -> Result:
        error: BaseException | None = None
        try:
            with self.display.progress(self):
                self._observe("elman_run_start")
                self.agreement.settle()
                self.folder.update(status="running")
                while not self._enough and not self.agreement.ending:
                    self._one_step()
                    if self.agreement.saves():
                        self._settle()
                        self._save()
                self._settle()
                if self.finished and self.step > 0:
                    self._evaluate()
                self._save()
                self.agreement.settle()
            reached("trained")
            if self.finished:  # a signal that came during the last evaluation has stopped nothing
                return self._end("ok")
            signum = self.agreement.ending
            return self._end("incomplete" if signum == signal.SIGINT else "killed", signum)
        except BaseException as raised:
            error = memory.explain(raised, self) if memory.ran_out(raised) else self.ranks.lost(raised)
            self.ranks.leave_note(error)
            if isinstance(error, (PluginError, DataError, LoaderError)) and self.ranks.all_here(error):
                self._save_what_is_left(error)
            ending.write_down(self, error)
            if error is raised:
                raise
            raise error from raised
        finally:
            if self.reader is not None:
                self.reader.close()
            self._run_end(error)

    @property
    def finished(self) -> bool:
        """Whether the steps or the minutes asked for are done."""
        train = self.settings.train
        if train.steps is not None:
            return self.step >= train.steps
        return self.clock >= 60 * (train.minutes or 0)

    @property
    def clock(self) -> float:
        """Seconds of training by which a run of minutes ends and its schedule goes: the same on every rank."""
        return self.agreement.clock(self.progress.seconds)

    def _observe(self, hook: str, **arguments: Any) -> None:
        """Call the observers, on the first rank."""
        if self.ranks.main:
            with self.agreement.by_one():
                call(hook, run=self, **arguments)

    @property
    def _enough(self) -> bool:
        """Whether no further step is to be launched."""
        steps = self.settings.train.steps
        return self.finished or (steps is not None and self._next >= steps)

    @property
    def _next(self) -> int:
        """The step to launch, from 0."""
        return self.step + len(self.launched)

    def _one_step(self) -> None:
        self._launch()
        self._settle(self.ahead)
        train, step = self.settings.train, self._next
        evaluates = bool(train.eval_every) and step % train.eval_every == 0
        saves = bool(train.save_every) and step % train.save_every == 0
        if evaluates or saves:
            self._settle()
        if evaluates:
            self._evaluate()
        if saves:
            self._save()

    def advance(self, steps: int) -> None:
        """So many steps more, run, recorded and shown as `fit` does it, and waited for. For benchmarks and tests."""
        for _ in range(steps):
            self._one_step()
        self._settle()

    # one step

    def train_step(self) -> dict[str, float]:
        """One optimizer step, waited for; returns its metrics.

        Raises:
            DivergedError: the loss or the gradient is not finite; nothing was updated, and diverged.json says where it began.
        """
        self._launch()
        return self._finish()

    def _launch(self) -> None:
        """Hand the next step to the device."""
        started = time.perf_counter()
        step, train = self._next, self.settings.train
        ready = self._ready(step)
        windows = self._windows(ready)
        lr = train.lr * self.schedule.factor(step, self._time_fraction())
        counts = self.compute.ready
        self.agreement.tell(self.progress.seconds)
        done = self.compute(windows, lr)
        self.launched.append(Launched(windows, lr, done, started, counts, self.agreement.sent()))

    def _settle(self, ahead: int = 0) -> None:
        """Wait until no more than `ahead` steps are under way, and say what the others gave."""
        while len(self.launched) > ahead:
            notes = self.launched[0].notes
            metrics = self._finish()
            with self.agreement.by_one():
                self.folder.record(kind="step", **metrics)
                self.display.step(self, metrics)
            self._observe("elman_step_end", step=self.step, metrics=metrics)
            self.agreement.hear(notes)

    def _finish(self) -> dict[str, float]:
        """Wait for the earliest step under way; returns its metrics."""
        first = self.launched.popleft()
        values = first.done.read()
        now = time.perf_counter()
        seconds = now - max(first.started, self.settled_at)
        self.settled_at = now
        self.history.append({"step": self.step + 1, "loss": values.loss, "grad_norm": values.grad_norm})
        if not values.finite:
            check_errors(self.device)  # a kernel that gave up leaves no number, and in a replay says it to nobody
            raise ending.diverged(self, first.windows, values)
        if self.carries:
            self.progress.carry = first.done.carry
        return self._advance(first, values, seconds)

    def _advance(self, first: Launched, values: StepValues, seconds: float) -> dict[str, float]:
        tokens = self.settings.tokens_per_step
        self.progress.step += 1
        self.progress.bytes_seen += tokens
        if first.counts:
            self.progress.seconds += seconds
        else:
            facts: dict[str, Any] = {} if self.warm_up else {"first_step_seconds": round(seconds, 3)}
            self.warm_up += seconds
            phases = reached("first step" if facts else "warm")
            facts |= {
                "warm_up_seconds": round(self.warm_up, 3),
                "kernels": used(),
                "step": self._how(),
                "phases": phases,
            }
            self.folder.update(**facts)
        return {
            "step": self.step,
            "loss": values.loss,
            "bits_per_byte": values.loss / math.log(2),
            "lr": first.lr,
            "grad_norm": values.grad_norm,
            **values.terms,
            "tok_s": tokens / seconds,
            "memory": memory_in_use(self.device),
            "seconds": self.progress.seconds,
            "bytes_seen": self.progress.bytes_seen,
        }

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """For other shapes than a step's, which would be compiled anew, and where every module is to be watched."""
        return torch.compiler.set_stance("force_eager") if self.mode.compiles else nullcontext()

    def _how(self) -> dict[str, str]:
        """How steps are run, as it turned out."""
        refused = getattr(self.compute, "refused", "")
        return self.mode.facts() | ({"mode": "eager", "why": refused} if refused else {})

    def _read(self, step: int) -> Batch:
        """This rank's rows of a global batch."""
        if self.ranks.size == 1:
            return self.windows.batch(step)
        return self.windows.batch(step, self.ranks.rows(self.settings.train.batch_size))

    def _ready(self, step: int) -> Ready:
        if self.reader is not None:
            return self.reader.get(step)
        batch = self._read(step)
        return Ready(batch, torch.from_numpy(batch.tokens).to(self.device))

    def _windows(self, ready: Ready) -> Windows:
        fresh_BT = None
        if self.carries:
            tokens_BL = torch.from_numpy(ready.batch.tokens)
            fresh_BT = torch.zeros(tokens_BL[:, :-1].shape, dtype=torch.bool)
            if self.settings.data.documents == "reset":
                fresh_BT |= tokens_BL[:, :-1] == SEPARATOR
            fresh_BT[:, 0] |= torch.from_numpy(ready.batch.fresh)
        carry = self.launched[-1].done.carry if self.launched else self.progress.carry
        return Windows(ready.tokens, fresh_BT, carry)

    def _time_fraction(self) -> float | None:
        return None if self.minutes_horizon is None else self.clock / (60 * self.minutes_horizon)

    # evaluation, saving

    def evaluate(self) -> dict[str, Any]:
        """Loss and bits per byte on the held-out windows, with the weights that a checkpoint publishes. Changes nothing.

        Raises:
            ConfigError: nothing is held out.
        """
        if self.heldout is None:
            raise ConfigError("nothing is held out: evaluation needs data.heldout above 0")
        self.agreement.beat()
        offsets, length = self.heldout
        train = self.settings.train
        rows = train.batch_size // train.accumulate
        how: dict[str, Any] = {"ranks": self.ranks, "forward": self.processes.forward}
        with self._uncompiled(), self.optimizer.evaluation_weights(), compute_in(train.precision, self.device):
            found = evaluate.on_windows(
                self.model, self.file, offsets, length, rows, loss_chunk=train.loss_chunk, **how
            )
        return {"step": self.step, **found}

    def _evaluate(self) -> None:
        if self.heldout is None or self.evaluated == self.step:
            return
        result = self.evaluate()
        if not math.isfinite(result["loss"]):
            raise ending.bad_evaluation(self, result)  # before these weights become the last checkpoint
        self.evaluated, self.evaluation = self.step, result
        with self.agreement.by_one():
            self.folder.record(kind="evaluation", **result)
            self.display.evaluation(result)
        self._observe("elman_evaluation_end", result=result)

    def _save(self) -> None:
        if self.saved[0] == self.step:
            return
        self.agreement.beat()
        self.ranks.first(self.folder.sync_metrics)
        require_one_model(self.model, self.ranks)
        keep = self.settings.train.keep
        data = self.manifest["protocol"]["data"]
        self.model.training_facts = training_facts(self.settings, data, self.progress, self.evaluation)
        path = save_checkpoint(self.folder.checkpoints, self.model, self.optimizer, self.progress, keep, self.ranks)
        self.saved = (self.step, path)
        with self.agreement.by_one():
            self.display.saved(path)
        self._observe("elman_checkpoint_saved", path=path)

    # the end

    def _end(self, status: str, signum: int = 0) -> Result:
        result = self.ranks.first(lambda: ending.summary(self.folder.path))
        self.folder.update(status=status, ended=now(), steps_done=self.step, result=result, kernels=used())
        self.display.end(self, status, result)
        return Result(status, self.step, signum, self.saved[1])

    def _save_what_is_left(self, error: BaseException) -> None:
        """A hook or the loader failed between two updates: the steps done are sound, and worth keeping."""
        try:
            self._settle()
            self._save()
        except (ElmanError, OSError) as second:
            error.add_note(f"and saving failed: {second}")

    def _run_end(self, error: BaseException | None) -> None:
        try:
            if self.ranks.main:
                call("elman_run_end", run=self, error=error)
        except ElmanError as second:
            if error is None:
                raise
            error.add_note(str(second))
        finally:
            self.folder.close()
