"""Trying to break a training: disks, folders, signals, memory. Whatever happens is one line, and what was saved stays whole."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train_disk import files_of_at_most
from train_helpers import TINY, losses, metrics, settings, write_text

from elman_core.cli import main
from elman_core.registry import (
    CheckpointError,
    ConfigError,
    DivergedError,
    OutOfMemoryError,
    StorageError,
    hookimpl,
    plugins,
)
from elman_core.training import ending, memory
from elman_core.training.checkpoint import list_checkpoints, load_checkpoint
from elman_core.training.signals import listening
from elman_core.training.start import resume, start
from elman_core.training.step import TrainStep
from elman_core.training.storage import check_folder, write_json


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture
def after_step():
    """Register a function that is called after a step."""
    names = []

    def register(when, act):
        class Act:
            @hookimpl
            def elman_step_end(self, run, step):
                if step == when:
                    act(run)

        names.append(plugins().manager.register(Act()))

    yield register
    for name in names:
        plugins().manager.unregister(name=name)


def manifest(run):
    return json.loads((run / "manifest.json").read_text())


# disks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["metrics.jsonl", "console.log"])
def test_a_disk_that_is_full_for_a_log_is_a_line_that_names_it(file, text, tmp_path):
    trainer = start(settings(text, "train.save_every=2", "train.log_every=1"), tmp_path / "run", quiet=True)
    for _ in range(2):
        trainer._one_step()
    path = tmp_path / "run" / file
    path.write_bytes(b" " * 150_000 + b"\n")  # so that this file alone meets the limit
    os.truncate(path, 150_000)
    opened = trainer.folder._metrics if file.startswith("m") else trainer.folder._console
    opened.seek(0, os.SEEK_END)
    with (
        files_of_at_most(150_010),
        pytest.raises(StorageError, match=rf"cannot write .*{re.escape(file)}: File too large; free"),
    ):
        trainer.fit()
    assert manifest(tmp_path / "run")["status"] == "crashed"
    check_folder(tmp_path / "run" / "checkpoints" / "step-00000002")


@pytest.mark.parametrize("limit", [100, 2_000, 20_000])
def test_wherever_the_disk_is_full_the_last_checkpoint_is_whole_and_the_run_goes_on(limit, text, tmp_path):
    straight = tmp_path / "straight"
    sets = ("train.save_every=2", "train.steps=6", "train.keep=0")
    start(settings(text, *sets), straight, quiet=True).fit()
    trainer = start(settings(text, *sets), tmp_path / "run", quiet=True)
    for _ in range(3):
        trainer._one_step()
    with files_of_at_most(limit), pytest.raises(StorageError, match="cannot write"):
        trainer.fit()
    for path in list_checkpoints(tmp_path / "run" / "checkpoints"):
        check_folder(path)
    again = resume(tmp_path / "run", quiet=True)
    assert again.step == 2
    assert again.fit().status == "ok"
    assert losses(tmp_path / "run") == losses(straight)


def test_a_folder_deleted_during_training_costs_the_metrics_and_not_the_model(text, tmp_path, after_step, caplog):
    after_step(3, lambda run: shutil.rmtree(run.path))
    result = start(settings(text, "train.steps=6"), tmp_path / "run", quiet=True).fit()
    assert result.status == "ok"
    check_folder(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert manifest(tmp_path / "run")["status"] == "ok"
    assert "was deleted during the training" in caplog.text
    assert resume(tmp_path / "run", quiet=True) is None


def test_a_checkpoint_deleted_during_training_is_not_missed(text, tmp_path, after_step):
    after_step(5, lambda run: shutil.rmtree(run.path / "checkpoints" / "step-00000002"))
    result = start(
        settings(text, "train.steps=8", "train.save_every=2", "train.keep=2"), tmp_path / "run", quiet=True
    ).fit()
    assert result.status == "ok"
    assert [p.name for p in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000006", "step-00000008"]


def rewrite(folder, name, change):
    """Change the tensors of a file and make its checksum match: a damage that only its content shows."""
    path = folder / "state" / name
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    from elman_core.training.storage import CHECKSUMS, checksums

    write_json(folder / CHECKSUMS, checksums(folder))


@pytest.mark.parametrize("kind", ["adamw", "schedulefree"])
def test_a_checkpoint_of_the_other_optimizer_is_refused_before_the_first_step(kind, text, tmp_path):
    other = {"adamw": "schedulefree", "schedulefree": "adamw"}[kind]
    runs = [
        start(settings(text, "train.steps=2", f"train.optimizer={name}"), tmp_path / name, quiet=True)
        for name in (kind, other)
    ]
    path = runs[0].fit().checkpoint
    with pytest.raises(CheckpointError, match=r"state is of another optimizer|last.safetensors"):
        load_checkpoint(path, runs[1].model, runs[1].optimizer)
    runs[1].folder.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("seconds"), "KeyError: 'seconds'"),
        (lambda t: t.update(step="two"), "cannot be read"),
        (lambda t: t.update(step=1), "is of step 1"),
    ],
    ids=["no seconds", "a step that is no number", "another step"],
)
def test_a_cursor_that_does_not_fit_its_checkpoint_is_an_error(change, said, text, tmp_path):
    trainer = start(settings(text, "train.steps=2"), tmp_path / "run", quiet=True)
    path = trainer.fit().checkpoint
    cursor = json.loads((path / "state/trainer.json").read_text())
    change(cursor)
    write_json(path / "state/trainer.json", cursor)
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(path, trainer.model, trainer.optimizer)


def test_a_weight_of_another_shape_is_not_spread_over_the_models(text, tmp_path):
    trainer = start(settings(text, "train.steps=2"), tmp_path / "run", quiet=True)
    path = trainer.fit().checkpoint
    weights = load_file(path / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.zeros(1)}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.norm.weight is \(1,\), the model's \(16,\)"):
        load_checkpoint(path, trainer.model, trainer.optimizer)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: [1], "is not an object"),
        (lambda _: {"name": "an app of the web"}, "has no settings, horizon, protocol"),
        (lambda m: {**m, "horizon": {"steps": 4}}, "has no horizon.minutes"),
        (lambda m: {k: v for k, v in m.items() if k != "resumed"}, "has no resumed"),
    ],
    ids=["a list", "another program's", "a part missing", "a fact missing"],
)
def test_a_manifest_that_no_run_wrote_is_an_error(change, said, text, tmp_path):
    start(settings(text, "train.steps=2"), tmp_path / "run", quiet=True).fit()
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(change(manifest(tmp_path / "run"))))
    with pytest.raises(CheckpointError, match=said):
        resume(tmp_path / "run", steps="4", quiet=True)


def test_lines_that_a_disk_garbled_cost_no_other_lines(text, tmp_path):
    start(settings(text, "train.steps=6"), tmp_path / "run", quiet=True).fit()
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    lines[1] = b"\xff\xfe" + lines[1][2:]
    lines[3:3] = [b"[1]", b"3", b'{"kind": "step"}', b'{"step": 3}', b"\0" * 40]
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert resume(tmp_path / "run", steps="8", quiet=True).fit().status == "ok"
    assert sorted(losses(tmp_path / "run")) == [1, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("exp_avg/model.norm.weight"), "the optimizer's state"),
        (lambda t: t.update({"exp_avg/model.norm.weight": torch.zeros(3)}), "is not of the shape"),
        (lambda t: [t.pop(k) for k in list(t) if k.endswith("/model.norm.weight")], "is not of this model"),
        (lambda t: t.update({"exp_avg/other": torch.zeros(3)}), "is not of this model"),
    ],
    ids=["a moment missing", "another shape", "a parameter missing", "a parameter too many"],
)
def test_an_optimizer_state_of_another_model_is_named(change, said, text, tmp_path):
    trainer = start(settings(text, "train.steps=2"), tmp_path / "run", quiet=True)
    path = trainer.fit().checkpoint
    rewrite(path, "optimizer.safetensors", change)
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(path, trainer.model, trainer.optimizer)


def test_divergence_on_a_full_disk_is_still_divergence(text, tmp_path, monkeypatch):
    trainer = start(settings(text, "train.save_every=1"), tmp_path / "run", quiet=True)
    trainer._one_step()
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = torch.nan
    real = ending.write_json

    def on_a_full_disk(*arguments):
        with files_of_at_most(100):
            real(*arguments)

    monkeypatch.setattr(ending, "write_json", on_a_full_disk)
    with pytest.raises(DivergedError, match=r"diverged in step 2: .* cannot write .*diverged\.json: File too large"):
        trainer.fit()
    assert manifest(tmp_path / "run")["status"] == "diverged@2"


@pytest.mark.parametrize("at", ["in the middle", "at the end"])
@pytest.mark.parametrize("optimizer", ["adamw", "schedulefree"])
def test_weights_that_evaluate_to_no_number_are_divergence_and_never_a_checkpoint(optimizer, at, text, tmp_path):
    """The update of a step whose loss was finite may be what breaks them."""
    sets = ("train.steps=4", "train.save_every=2", "train.eval_every=4", f"train.optimizer={optimizer}")
    trainer = start(settings(text, *sets), tmp_path / "run", quiet=True)
    for _ in range(3):
        trainer._one_step()
    real = trainer.optimizer.step

    def too_far(*arguments, **named):
        real(*arguments, **named)
        with torch.no_grad():
            trainer.model.model.norm.weight[0] = torch.nan

    trainer.optimizer.step = too_far
    if at == "at the end":
        trainer.settings = dataclasses.replace(
            trainer.settings, train=dataclasses.replace(trainer.settings.train, eval_every=0, save_every=0)
        )
    with pytest.raises(
        DivergedError, match=r"diverged by step 4: held-out loss nan; first not finite: weight model\.norm"
    ):
        trainer.fit()
    assert manifest(tmp_path / "run")["status"] == "diverged@4"
    assert [p.name for p in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000002"]
    report = json.loads((tmp_path / "run" / "diverged.json").read_text())
    assert (report["step"], report["held_out_loss"]) == (4, "nan")
    assert report["last_checkpoint"].endswith("step-00000002")
    assert metrics(tmp_path / "run", "evaluation") == []
    assert resume(tmp_path / "run", quiet=True).fit().status == "ok"


# signals -------------------------------------------------------------------------------------------------------------


def test_usr1_saves_now_and_goes_on(text, tmp_path, after_step):
    after_step(3, lambda _: os.kill(os.getpid(), signal.SIGUSR1))
    result = start(settings(text, "train.steps=6"), tmp_path / "run", quiet=True).fit()
    assert (result.status, result.step) == ("ok", 6)
    assert [p.name for p in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000003", "step-00000006"]
    assert [m["step"] for m in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_the_command_that_goes_on_can_be_pasted(text, tmp_path, after_step):
    folder = tmp_path / "a run's"
    after_step(2, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    start(settings(text, "train.steps=4"), folder, quiet=True).fit()
    said = (folder / "console.log").read_text().rpartition("continue with: ")[2]
    assert shlex.split(said) == ["elman", "resume", str(folder)]
    with pytest.raises(ConfigError) as raised:
        start(settings(text), folder, quiet=True)
    assert f"elman resume {shlex.quote(str(folder))} continues it" in str(raised.value)


def test_a_closed_terminal_saves_and_one_that_nohup_keeps_away_does_nothing(text, tmp_path, after_step):
    after_step(2, lambda _: os.kill(os.getpid(), signal.SIGHUP))
    result = start(settings(text, "train.steps=4"), tmp_path / "one", quiet=True).fit()
    assert (result.status, result.step, result.signal) == ("killed", 2, signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert start(settings(text, "train.steps=4"), tmp_path / "two", quiet=True).fit().status == "ok"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_during_the_last_evaluation_stops_nothing(text, tmp_path):
    class Stop:
        @hookimpl
        def elman_evaluation_end(self):
            os.kill(os.getpid(), signal.SIGTERM)

    name = plugins().manager.register(Stop())
    try:
        result = start(settings(text, "train.steps=3"), tmp_path / "run", quiet=True).fit()
    finally:
        plugins().manager.unregister(name=name)
    assert (result.status, result.signal) == ("ok", 0)


def sending(*signals):
    def send(_):
        for signum in signals:
            os.kill(os.getpid(), signum)

    return send


def test_a_second_interrupt_ends_at_once(text, tmp_path, after_step, monkeypatch, capsys):
    monkeypatch.setattr("elman_core.training.signals.AGAIN", 0.0)
    after_step(2, sending(signal.SIGINT, signal.SIGINT))
    flat = [f"{table}.{k}={json.dumps(v)}" for table, values in TINY.items() for k, v in values.items()]
    words = ["train", "e42", "--data", str(text), "--out", str(tmp_path / "run")]
    assert main([*words, *(w for s in flat for w in ("--set", s))]) == 130
    assert capsys.readouterr().err == "elman: interrupted\n"
    assert manifest(tmp_path / "run")["status"] == "incomplete"


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ((signal.SIGINT, signal.SIGINT), "incomplete"),
        ((signal.SIGTERM, signal.SIGINT), "killed"),
        ((signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), "killed"),
    ],
    ids=["one Ctrl-C passed on", "two of different kinds", "all"],
)
def test_signals_that_come_at_once_save_as_one_does(signals, status, text, tmp_path, after_step):
    after_step(2, sending(*signals))
    result = start(settings(text), tmp_path / "run", quiet=True).fit()
    assert (result.status, result.step, result.signal) == (status, 2, signals[0])
    check_folder(result.checkpoint)


def test_handlers_are_put_back():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]
    with listening(stuck=lambda _: None):
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_is_heard_while_the_main_thread_runs_no_python(monkeypatch):
    """As in a collective operation that waits for a process that no longer is: handlers do not run there."""
    code = (
        "import ctypes, os, signal, threading\n"
        "from elman_core.training import signals\n"
        "signals.PATIENCE = 0.2\n"
        "def stuck(signum): print('stuck', signum, flush=True); os._exit(7)\n"
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "libc = ctypes.CDLL(None)\n"
        "with signals.listening(stuck=stuck):\n"
        "    for _ in range(100): libc.usleep(10_000_000)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "stuck 15\n"), done.stderr
    assert time.monotonic() - began < 60


def test_a_clock_that_jumps_changes_no_count(text, tmp_path, monkeypatch, after_step):
    after_step(2, lambda _: monkeypatch.setattr(time, "time", lambda: 0.0))
    start(settings(text, "train.steps=4"), tmp_path / "run", quiet=True).fit()
    seconds = [m["seconds"] for m in metrics(tmp_path / "run")]
    assert seconds == sorted(seconds)
    assert all(m["tok_s"] > 0 for m in metrics(tmp_path / "run"))


# memory --------------------------------------------------------------------------------------------------------------

LARGE = ("train.batch_size=8", "train.chunk_size=256", "model.hidden_size=32", "model.num_hidden_layers=4")


@pytest.mark.parametrize("variant", ["e42", "e88"])
def test_what_a_micro_batch_keeps_is_measured_from_one_short_row(variant, text, tmp_path):
    few = ("model.options.n_heads=2", "model.options.n_state=4") if variant == "e88" else ()
    trainer = start(settings(text, *LARGE, f"model.variant={variant}", *few), tmp_path / "run", quiet=True)
    rows = 4
    kept = memory.measure(trainer.model, trainer.settings.train, rows, torch.device("cpu"))
    own = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    tokens = torch.zeros((rows, 256), dtype=torch.long)
    true = memory._saved(lambda: trainer.model.model(input_ids=tokens, use_cache=False).last_hidden_state, own)
    assert kept.layers == pytest.approx(true, rel=0.03)
    assert kept.logits == pytest.approx(3 * rows * 256 * 256 * 4, rel=0.05)
    assert kept.boundaries == rows * 256 * 32 * 8 * 4
    trainer.folder.close()


def test_each_remedy_saves_what_it_says(text, tmp_path):
    """Against the bytes that autograd keeps of the whole micro-batch, with and without the remedy."""
    from elman_core.training.objective import forward_loss

    trainer = start(settings(text, *LARGE), tmp_path / "run", quiet=True)
    model, train = trainer.model, trainer.settings.train
    found = {name.partition("=")[0]: (name, saved) for name, saved, _ in memory.remedies(model, train)}
    assert list(found) == ["train.loss_chunk", "train.accumulate", "train.gradient_checkpointing"]
    assert found["train.accumulate"][0] == "train.accumulate=2"
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def kept(rows):
        tokens = torch.zeros((rows, 256), dtype=torch.long)
        return memory._saved(lambda: forward_loss(model, tokens, tokens).loss, own)

    logits = 2 * 8 * 256 * 256 * 4  # the logits and their gradient are no part of what autograd keeps
    assert found["train.accumulate"][1] == pytest.approx(kept(8) - kept(4) + logits // 2, rel=0.1)
    whole = kept(8)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    one_layer = kept(8)  # the boundaries; in the backward one layer comes on top
    assert found["train.gradient_checkpointing"][1] == pytest.approx((whole - one_layer) * 3 / 4, rel=0.2)
    trainer.folder.close()


ERRORS = [
    torch.cuda.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes"),
    MemoryError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=["gpu", "cpu", "python"])
def test_running_out_of_memory_is_exit_3_with_three_remedies_and_their_figures(
    error, text, tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise error

    monkeypatch.setattr(TrainStep, "forward", fail)
    flat = [f"{table}.{k}={json.dumps(v)}" for table, values in TINY.items() for k, v in values.items()]
    words = ["train", "e42", "--data", str(text), "--out", str(tmp_path / "run")]
    assert main([*words, *(w for s in [*flat, *LARGE] for w in ("--set", s))]) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "out of memory on cpu in step 1" in said
    for remedy in ("train.loss_chunk=64", "train.accumulate=2", "train.gradient_checkpointing=true"):
        assert re.search(rf"{remedy} saves about [\d.]+ [MK]iB of", said), said
    assert manifest(tmp_path / "run")["status"] == "oom"


def test_what_is_in_use_already_is_not_advised(text, tmp_path):
    used = ("train.accumulate=8", "train.gradient_checkpointing=true", "train.loss_chunk=1")
    trainer = start(settings(text, *LARGE, *used), tmp_path / "run", quiet=True)
    assert memory.advice(trainer.model, trainer.settings.train).startswith("every remedy is in use")
    assert trainer.model.model.layers[0].gradient_checkpointing  # measuring has put it back
    trainer.folder.close()


def test_where_measuring_fails_too_the_remedies_are_named_without_figures(text, tmp_path, monkeypatch):
    trainer = start(settings(text), tmp_path / "run", quiet=True)

    def fail(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory, "forward_loss", fail)
    error = memory.explain(ERRORS[0], trainer)
    assert isinstance(error, OutOfMemoryError)
    assert "train.accumulate" in str(error)
    trainer.folder.close()
