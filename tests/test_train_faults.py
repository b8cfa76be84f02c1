"""Trying to break a training: disks, folders, signals, memory. Whatever happens is one line, and what was saved stays whole."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_helpers import files_of_at_most, losses, manifest, metrics, settings, train_words

from elman_core.cli import main
from elman_core.registry import CheckpointError, ConfigError, DivergedError, KernelError, StorageError, hookimpl
from elman_core.storage import check_folder, write_json
from elman_core.training import evaluate, failures
from elman_core.training.checkpoint import list_checkpoints, load_checkpoint
from elman_core.training.rank_signals import listening
from elman_core.training.start import resume, start
from elman_core.training.step import TrainStep

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


@pytest.mark.parametrize("kind", ["adamw", "schedulefree", "muon"])
def test_a_checkpoint_of_the_other_optimizer_is_refused_before_the_first_step(kind, text, tmp_path):
    other = {"adamw": "schedulefree", "schedulefree": "adamw", "muon": "adamw"}[kind]
    runs = [
        start(settings(text, "train.steps=2", f"train.optimizer={name}"), tmp_path / name, quiet=True)
        for name in (kind, other)
    ]
    path = runs[0].fit().checkpoint
    with pytest.raises(CheckpointError, match=r"state belongs to another optimizer|last.safetensors"):
        load_checkpoint(path, runs[1].model, runs[1].optimizer)
    runs[1].folder.close()


NORM, OPTIMIZER = "model.norm.weight", "state/optimizer.safetensors"


# A damage that only the content shows: its checksum matches.
@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("state/trainer.json", lambda t: t.pop("seconds"), "KeyError: 'seconds'"),
        ("state/trainer.json", lambda t: t.update(step="two"), "cannot be read"),
        ("state/trainer.json", lambda t: t.update(step=1), "is of step 1"),
        (
            "model.safetensors",
            lambda t: t.update({NORM: torch.zeros(1)}),
            r"model.norm.weight is \(1,\), the model's \(16,\)",
        ),
        (OPTIMIZER, lambda t: t.pop(f"exp_avg/{NORM}"), "the optimizer's state"),
        (
            OPTIMIZER,
            lambda t: t.update({f"exp_avg/{NORM}": torch.zeros(3)}),
            r"is not finite torch\.float32 of the shape",
        ),
        (OPTIMIZER, lambda t: [t.pop(k) for k in list(t) if k.endswith(f"/{NORM}")], "is of another model"),
        (OPTIMIZER, lambda t: t.update({"exp_avg/other": torch.zeros(3)}), "is of another model"),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_model_or_its_name_is_refused(file, change, said, text, tmp_path):
    trainer = start(settings(text, "train.steps=2"), tmp_path / "run", quiet=True)
    path = trainer.fit().checkpoint
    found = json.loads((path / file).read_text()) if file.endswith("json") else load_file(path / file)
    change(found)
    if file.endswith("json"):
        write_json(path / file, found)
    else:
        save_file(found, path / file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(path, trainer.model, trainer.optimizer)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: [1], "is not a JSON object"),
        (lambda _: {"name": "an app of the web"}, "has no settings, horizon, protocol"),
        (lambda m: {**m, "horizon": {"steps": 4}}, "has no horizon.minutes"),
        (lambda m: {k: v for k, v in m.items() if k != "resumed"}, "has no resumed"),
    ],
    ids=["a list", "another program's", "a part missing", "a fact missing"],
)
def test_a_manifest_that_no_run_wrote_is_an_error(change, said, text, tmp_path):
    start(settings(text, "train.steps=2"), tmp_path / "run", quiet=True).fit()
    found = {k: v for k, v in manifest(tmp_path / "run").items() if k != "digest"}
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(change(found)))
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


def test_divergence_on_a_full_disk_is_still_divergence(text, tmp_path, monkeypatch):
    trainer = start(settings(text, "train.save_every=1"), tmp_path / "run", quiet=True)
    trainer._one_step()
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = torch.nan
    real = failures.write_json

    def on_a_full_disk(*arguments):
        with files_of_at_most(100):
            real(*arguments)

    monkeypatch.setattr(failures, "write_json", on_a_full_disk)
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


def test_a_signal_during_the_last_evaluation_stops_nothing(text, tmp_path, register):
    class Stop:
        @hookimpl
        def elman_evaluation_end(self):
            os.kill(os.getpid(), signal.SIGTERM)

    register(Stop())
    result = start(settings(text, "train.steps=3"), tmp_path / "run", quiet=True).fit()
    assert (result.status, result.signal) == ("ok", 0)


def test_a_signal_during_an_evaluation_ends_it_and_saves(text, tmp_path, monkeypatch):
    real = evaluate._score
    asks = lambda *given, **how: os.kill(os.getpid(), signal.SIGTERM) or real(*given, **how)  # noqa: E731
    monkeypatch.setattr(evaluate, "_score", asks)
    result = start(settings(text, "train.steps=3"), tmp_path / "run", quiet=True).fit()
    assert (result.status, result.step, result.signal) == ("killed", 3, signal.SIGTERM)
    monkeypatch.undo()
    assert resume(tmp_path / "run", quiet=True).fit().status == "ok"


def test_a_run_of_no_steps_shows_no_schedule(text, tmp_path, capsys):
    assert start(settings(text, "train.steps=0"), tmp_path / "none").fit().status == "ok"
    assert "schedule" not in capsys.readouterr().out


def sending(*signals):
    def send(_):
        for signum in signals:
            os.kill(os.getpid(), signum)

    return send


def test_a_second_interrupt_ends_at_once(text, tmp_path, after_step, monkeypatch, capsys):
    monkeypatch.setattr("elman_core.training.rank_signals.AGAIN", 0.0)
    after_step(2, sending(signal.SIGINT, signal.SIGINT))
    assert main(train_words(text, tmp_path / "run")) == 130
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
    with listening():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)] == before


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (torch.AcceleratorError, "CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure' in …"),
        (KernelError, "kernel e42: launch: uncorrectable ECC error encountered"),  # as the launcher says it
    ],
)
def test_a_gpu_that_fails_is_one_line_and_the_process_ends_at_once(error, first, text, tmp_path, monkeypatch, capsys):
    whole, run, calls = tmp_path / "whole", tmp_path / "run", []
    assert main(train_words(text, whole, "train.save_every=1")) == 0
    forward = TrainStep.forward

    def fail(*given):
        calls.append(given)
        if len(calls) == 3:
            raise error(first)
        return forward(*given)

    left: list[int] = []
    with monkeypatch.context() as broken:
        broken.setattr(TrainStep, "forward", fail)
        broken.setattr(os, "_exit", left.append)
        broken.setattr(failures, "gpu_is_lost", lambda _, raised: isinstance(raised, KernelError))
        main(train_words(text, run, "train.save_every=1"))
    assert left == [5]  # CUDA's destructors would abort it
    assert capsys.readouterr().err == (
        f"elman: cpu failed by step 3: {first.splitlines()[0]}; let no other program use this GPU, then type "
        f"`elman resume {run}`\n"
    )
    assert manifest(run)["status"] == "crashed"
    assert main(["resume", str(run)]) == 0
    assert losses(run) == losses(whole)


@pytest.mark.parametrize("said", [None, torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")])
def test_a_kernels_error_is_that_of_a_lost_gpu_if_the_gpu_answers_no_more(said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", Mock(side_effect=said))
    gpu, error = torch.device("cuda", 0), KernelError("kernel e42: launch")
    found = [
        failures.gpu_is_lost(*given) for given in ((gpu, error), (gpu, ValueError()), (torch.device("cpu"), error))
    ]
    assert found == [said is not None, False, False]


# memory --------------------------------------------------------------------------------------------------------------

ERRORS = [
    torch.cuda.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes"),
    MemoryError(),
    # Another process has taken the memory of a GPU: as the driver, cuBLAS, Triton and a kernel's launch say it.
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    KernelError("kernel e42_dense_cuda_cluster_bfloat16_192: launch: out of memory"),
]


@pytest.mark.parametrize("error", ERRORS, ids=["gpu", "cpu", "python", "driver", "cublas", "triton", "kernel"])
@pytest.mark.parametrize(
    ("sets", "advice"),
    [
        (("train.chunk_size=256",), "try train.loss_chunk=64, train.accumulate=2, train.gradient_checkpointing=true"),
        (
            ("train.loss_chunk=1", "train.accumulate=4", "train.gradient_checkpointing=true"),
            "lower train.batch_size or train.chunk_size, or use a smaller model",
        ),
    ],
    ids=["nothing in use", "all in use"],
)
def test_running_out_of_memory_is_exit_3_with_the_remedies_that_are_left(
    sets, advice, error, text, tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise error

    monkeypatch.setattr(TrainStep, "forward", fail)
    assert main(train_words(text, tmp_path / "run", *sets)) == 3
    assert re.fullmatch(
        rf"elman: out of memory on cpu in step 1, [\d,]+ MiB in use: {advice}\n", capsys.readouterr().err
    )
    assert manifest(tmp_path / "run")["status"] == "oom"
