"""The training loop: steps, evaluations and checkpoints, and how a training ends."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elman_core.kernels import used
from elman_core.kernels.dense.native import check_errors
from elman_core.metrics import read_metrics
from elman_core.model.graph import HostCopy
from elman_core.model.tokenizer import token_bytes
from elman_core.registry import ConfigError, DataError, ElmanError, LoaderError, PluginError
from elman_core.registry.checks import ran_out
from elman_core.storage import now

from . import evaluate, failures, objective
from .checkpoint import Position, load_checkpoint, load_optimizer, save_checkpoint
from .estimate import SLOW, seconds_a_step
from .hooks import acting, call, listening_in, load_loggers, loss_terms, watched
from .modes import make_step
from .optim import Optimizer
from .parallel import make_processes, require_one_model
from .plan import Plan
from .precision import compute_in
from .prefetch import Feed
from .rank_signals import RankSignals, listening
from .ranks.launch import reached
from .run.display import Display, backends
from .run.facts import memory_in_use
from .run.folder import RunFolder
from .run.protocol import card_rows
from .settings import with_length
from .step import Done, StepValues, TrainStep, Windows

log = logging.getLogger("elman_core")

HISTORY = 100  # steps whose loss and gradient norm diverged.json shows


@dataclass(frozen=True)
class Result:
    """The end of a training: `status` as in the manifest, the signal that stopped it or 0, and the last checkpoint."""

    status: str
    step: int
    signal: int = 0
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Launched:
    """A step that was handed to the device, with what the ranks tell each other. `counts`: whether its time counts as training
    time, which building and warming up do not."""

    windows: Windows
    lr: float
    done: Done
    started: float
    counts: bool
    messages: HostCopy | None


class Trainer:
    """One training. Made by `elman_core.training.start` or `resume`; `fit()` runs it. Hooks receive it as `run`.

    Attributes:
        plan: what was decided; the next five are parts of it. settings: resolved. model: a `LadderForCausalLM`.
        ranks: the processes that train together; the first writes, shows and calls observers. processes: how they share a step.
        folder: the run's files. progress: the cursor that a checkpoint stores. evaluation: the last, or None.
    """

    def __init__(self, plan: Plan, folder: RunFolder, position: Position, quiet: bool = False) -> None:
        self.plan, self.folder = plan, folder
        self.settings, self.model, self.device, self.ranks = plan.settings, plan.model, plan.device, plan.ranks
        self.windows = plan.text.windows
        self.sizes = None if self.windows.tokenizer is None else token_bytes(plan.model.tokenizer)
        train = plan.settings.train
        self.display = Display(folder.log, quiet=quiet or not plan.ranks.main)
        self.processes = make_processes(plan.parallel, plan.ranks, plan.model, plan.device, plan.mode.captures)
        self.optimizer = Optimizer(plan.model, train)
        self.progress = position.progress
        self.evaluation = position.evaluation
        self.saved: tuple[int, Path | None] = (-1, None)  # step and path of the last checkpoint
        if position.checkpoint is not None:
            self.progress = load_checkpoint(position.checkpoint, plan.model, self.optimizer, plan.ranks, folder.id)
            self.saved = (self.step, position.checkpoint)
        elif plan.settings.model.init_optimizer == "keep" and plan.init:
            load_optimizer(Path(plan.init["model"]), plan.model, self.optimizer)
        self.feed = Feed(plan.text.windows, plan.settings, plan.device, plan.ranks)
        self.carries = plan.settings.data.sampling == "tbptt"
        if train.gradient_checkpointing:
            drops = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in plan.model.modules())
            how = {"use_reentrant": False, "preserve_rng_state": drops}
            plan.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        logits = None
        if "elman_loss_terms" in acting():
            logits = True
        elif plan.device.type == "cuda":
            logits = False  # head and loss in one operator round differently, which is worth it there
        step = TrainStep(
            plan.model,
            self.optimizer,
            train,
            carries=self.carries,
            terms=lambda outputs: loss_terms(self, outputs),
            before_update=lambda: call("elman_before_optimizer_step", run=self),
            processes=self.processes,
            logits=logits,
        )
        self.compute = make_step(step, plan.mode)
        plan.ranks.hold(self.compute)
        # A step is launched while the one before it runs, unless a plugin has to find the model as each step left it.
        self.ahead = 1 if plan.device.type == "cuda" and not watched() else 0
        self.launched: deque[Launched] = deque()
        self.settled_at = 0.0  # when the values of the last step arrived
        # Loggers get the figures of a step when they arrive; the model may be a step further.
        self.loggers = load_loggers(train.loggers) if plan.ranks.main else {}
        self.signals = RankSignals(plan.ranks, self.processes, self.progress.seconds)
        self.history: deque[dict[str, float]] = deque(maxlen=HISTORY)
        self._ends = False  # whether an observer ended the training
        self.warm_up = 0.0  # seconds of the steps that build, compile and warm up: reported, not counted

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

    def end_here(self) -> None:
        """For `elman_evaluation_end`: this step ends the training, as if `train.steps` were its number. The schedule keeps its
        length, and `elman resume --steps` continues the training."""
        self._ends = True

    def fit(self) -> Result:
        """Train to the end that the settings give, or to a signal, which saves first.

        Raises:
            DivergedError, KernelError, OutOfMemoryError, PluginError, StorageError: once the manifest records it.
                Earlier checkpoints stay.
        """
        # Until the very end: launchers send SIGTERM to processes that are still writing down why they stop.
        with (
            listening_in(self.loggers),
            listening(again_interrupts=self.signals.alone) as self.signals.received,
            self.signals.watched(lambda seconds: failures.stalled(self, seconds), early=self.device.type == "cuda"),
        ):
            return self._fit()

    def _fit(self) -> Result:
        error: BaseException | None = None
        try:
            with self.display.progress(*self._length, self.step):
                self._observe("elman_run_start")
                self.signals.settle()
                self.folder.update(status="running")
                if self.step and self._due(self.settings.train.eval_every):
                    self._evaluate()  # unless it is done: a signal may have ended it
                self._warn_if_slow()
                while not self._enough and not self.signals.ending:
                    self._one_step()
                    if self.signals.saves():
                        self._settle()
                        self._save()
                self._settle()
                whole = self.finished
                if whole and self.step > 0:
                    whole = self._evaluate()
                self._save()
                self.signals.settle()
            reached("trained")
            if whole:
                return self._end("ok")
            signum = self.signals.ending
            return self._end("incomplete" if signum == signal.SIGINT else "killed", signum)
        except BaseException as raised:
            if ran_out(raised):
                error = failures.out_of_memory(self, raised)
            elif isinstance(raised, torch.AcceleratorError) or failures.gpu_is_lost(self.device, raised):
                error = failures.gpu_failed(self, raised)
            else:
                error = self.ranks.explain(raised)
            self.ranks.leave_note(error)
            if isinstance(error, (PluginError, DataError, LoaderError)) and self.ranks.all_here(error):
                self._save_what_is_left(error)
            failures.record(self, error)
            if error is raised:
                raise
            raise error from raised
        finally:
            self.feed.close()
            self._run_end(error)

    @property
    def finished(self) -> bool:
        """Whether the steps or the minutes asked for are done."""
        return self.settings.train.is_done(self.step, self.clock)

    @property
    def _length(self) -> tuple[float, float]:
        """The length of the training and how much of it is done: in steps, or in seconds if minutes end it."""
        train = self.settings.train
        if train.steps is not None:
            return train.steps, self.step
        return 60 * (train.minutes or 0), self.progress.seconds

    @property
    def clock(self) -> float:
        """Training time in seconds that ends a run of minutes and drives its schedule: the same on every rank."""
        return self.signals.clock(self.progress.seconds)

    def _warn_if_slow(self) -> None:
        """Say before the first step how long steps will take, if that is long."""
        if self.device.type != "cpu" or self.ranks.size > 1 or self._enough:
            return
        train = self.settings.train
        with self.uncompiled(), compute_in(train.precision, self.device):
            rows = train.batch_size // train.accumulate
            seconds = seconds_a_step(self.model, rows, train.chunk_size, train.accumulate)
        if seconds > SLOW:
            left = ""
            if train.steps:
                minutes = (train.steps - self.step) * seconds / 60
                left = f", {minutes / 60:,.1f} hours in all" if minutes >= 60 else f", {minutes:,.1f} minutes in all"
            limit = "" if train.minutes else "; --minutes 10 limits the run"
            self.display.say(
                f"slow: about {seconds:,.0f} s a step{left} on this CPU ({'; '.join(backends(self.model))}); "
                f"a GPU is much faster (elman doctor){limit}"
            )

    def _observe(self, hook: str, **arguments: Any) -> None:
        if self.ranks.main:
            with self.signals.by_one():
                call(hook, run=self, **arguments)

    @property
    def _enough(self) -> bool:
        """Whether no further step should be launched."""
        steps = self.settings.train.steps
        return self.finished or (steps is not None and self._next >= steps)

    @property
    def _next(self) -> int:
        """The next step to launch, from 0."""
        return self.step + len(self.launched)

    def _one_step(self) -> None:
        self._launch()
        self._settle(self.ahead)
        evaluates = self._due(self.settings.train.eval_every)
        saves = self._due(self.settings.train.save_every)
        if evaluates or saves:
            self._settle()
        if evaluates:
            self._evaluate()
        if saves:
            self._save()

    def _due(self, every: int) -> bool:
        return bool(every) and self._next % every == 0

    def advance(self, steps: int) -> None:
        """Run, record and show so many more steps as `fit` does, and wait for them. For benchmarks and tests."""
        for _ in range(steps):
            self._one_step()
        self._settle()

    # one step

    def train_step(self) -> dict[str, float]:
        """Run one optimizer step, wait for it and return its metrics.

        Raises:
            DivergedError: the loss or the gradient is not finite; nothing was updated, and diverged.json says where it began.
        """
        self._launch()
        return self._finish()

    def _launch(self) -> None:
        started = time.perf_counter()
        step = self._next
        windows = self.feed.get(step, self.launched[-1].done.carry if self.launched else self.progress.carry)
        minutes = self.plan.began.train.minutes
        fraction = None if minutes is None else self.clock / (60 * minutes)
        lr = self.settings.train.lr * self.plan.schedule.factor(step, fraction)
        counts = self.compute.ready
        self.signals.tell(self.progress.seconds)
        done = self.compute(windows, lr)
        self.launched.append(Launched(windows, lr, done, started, counts, self.signals.sent()))

    def _settle(self, ahead: int = 0) -> None:
        """Wait until at most `ahead` steps are running, and report those that have ended."""
        while len(self.launched) > ahead:
            messages = self.launched[0].messages
            metrics = self._finish()
            with self.signals.by_one():
                self.folder.record(kind="step", **metrics)
                self.display.step(metrics, self._length[1], self.settings.train.log_every, self.finished)
            self._observe("elman_step_end", step=self.step, metrics=metrics)
            self.signals.hear(messages)

    def _finish(self) -> dict[str, float]:
        """Wait for the earliest running step and return its metrics."""
        first = self.launched.popleft()
        values = first.done.read()
        now = time.perf_counter()
        seconds = now - max(first.started, self.settled_at)
        self.settled_at = now
        self.history.append({"step": self.step + 1, "loss": values.loss, "grad_norm": values.grad_norm})
        if not values.finite:
            check_errors(self.device)  # a kernel that gave up leaves no number, and a replay reports no error
            raise failures.diverged(self, first.windows, values)
        if self.carries:
            self.progress.carry = first.done.carry
        return self._advance(first, values, seconds)

    def _advance(self, first: Launched, values: StepValues, seconds: float) -> dict[str, float]:
        tokens = self.settings.tokens_per_step * values.terms.get("fill", 1.0)
        self.progress.step += 1
        self.progress.bytes_seen += round(tokens * self.windows.bytes_per_token)
        if first.counts:
            self.progress.seconds += seconds
        else:
            self._record_warm_up(seconds)
        return {
            "step": self.step,
            "loss": values.loss,
            "bits_per_byte": values.loss / math.log(2) / self.windows.bytes_per_token,
            "lr": first.lr,
            "grad_norm": values.grad_norm,
            **values.terms,
            "tok_s": tokens / seconds,
            "memory": memory_in_use(self.device),
            "seconds": self.progress.seconds,
            "bytes_seen": self.progress.bytes_seen,
        }

    def _record_warm_up(self, seconds: float) -> None:
        facts: dict[str, Any] = {} if self.warm_up else {"first_step_seconds": round(seconds, 3)}
        phases = reached("warm" if self.warm_up else "first step")
        self.warm_up += seconds
        facts["warm_up_seconds"] = round(self.warm_up, 3)
        self.folder.update(**facts, kernels=used(), step=self._how(), phases=phases)

    def uncompiled(self) -> AbstractContextManager[Any]:
        """The uncompiled model: for shapes other than a step's, which would be compiled again, and if every module is
        watched."""
        return torch.compiler.set_stance("force_eager") if self.plan.mode.compiles else nullcontext()

    def _how(self) -> dict[str, str]:
        """Return the launch mode in which steps actually run."""
        refused = getattr(self.compute, "refused", "")
        return self.plan.mode.facts() | ({"mode": "eager", "why": refused} if refused else {})

    # evaluation, saving

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model is as evaluations see it: uncompiled, in eval mode, without gradients, in the training's dtype,
        with the weights that a checkpoint publishes."""
        with (
            self.uncompiled(),
            self.optimizer.evaluation_weights(),
            compute_in(self.settings.train.precision, self.device),
            objective.evaluating(self.model),
        ):
            yield

    def evaluate(self) -> dict[str, Any]:
        """Loss and bits per byte on the held-out windows, with the weights that a checkpoint publishes; empty if a signal ends
        the run. Changes nothing.

        Raises:
            ConfigError: nothing is held out.
        """
        heldout = self.plan.text.heldout
        if not heldout:
            raise ConfigError("nothing is held out: evaluation needs data.heldout above 0")
        train = self.settings.train
        rows = train.batch_size // train.accumulate
        with self.evaluating():
            result = evaluate.on_mixture(
                self.model,
                heldout,
                rows,
                loss_chunk=train.loss_chunk,
                sizes=self.sizes,
                ranks=self.ranks,
                forward=self.processes.forward,
                stop=self.signals.asked_to_end,
                counted=self.display.evaluating,
            )
        return {"step": self.step, **result} if result else {}

    def _evaluate(self) -> bool:
        """Evaluate, unless that is done or nothing is held out. False if a signal ended it."""
        if not self.plan.text.heldout or (self.evaluation and self.evaluation["step"] == self.step):
            return True
        result = self.evaluate()
        if not result:
            return False
        if not math.isfinite(result["loss"]):
            raise failures.bad_evaluation(self, result)  # before these weights become the last checkpoint
        self.evaluation = result
        with self.signals.by_one():
            self.folder.record(kind="evaluation", **result)
            self.display.evaluation(result)
        self._observe("elman_evaluation_end", result=result)
        if self.ranks.first(lambda: self._ends):
            self.settings = with_length(self.settings, self.step, None)
            self.folder.update(settings=self.settings.to_dict())
        return True

    def _save(self) -> None:
        if self.saved[0] == self.step:
            return
        self.signals.beat()
        self.ranks.first(self.folder.sync_metrics)
        require_one_model(self.model, self.ranks)
        keep = self.settings.train.keep
        data = self.manifest["protocol"]["data"]
        seen = self.progress.bytes_seen
        self.model.training_facts = card_rows(self.settings, data, self.step, seen, self.evaluation)
        about = {"run": self.folder.id, "settings": self.settings.to_dict(), "text": data}
        folder = self.folder.checkpoints
        path = save_checkpoint(folder, self.model, self.optimizer, self.progress, keep, self.ranks, about)
        self.saved = (self.step, path)
        with self.signals.by_one():
            self.display.saved(path)
        self._observe("elman_checkpoint_saved", path=path)

    # the end

    def _end(self, status: str, signum: int = 0) -> Result:
        result = self.ranks.first(lambda: read_metrics(self.path, self.folder.id).summary())
        self.folder.update(status=status, ended=now(), steps_done=self.step, result=result, kernels=used())
        self.display.end(self.path, self.step, status, result, self.saved[1])
        return Result(status, self.step, signum, self.saved[1])

    def _save_what_is_left(self, error: BaseException) -> None:
        """A hook or the loader failed between two updates: the finished steps are sound and worth keeping."""
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
