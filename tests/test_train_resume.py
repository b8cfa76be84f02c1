"""A run that was stopped and resumed is the run that was never stopped: same batches, same bits."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import toy_mixers
from safetensors.torch import load_file
from train_helpers import assert_same_bits, losses, manifest, metrics, settings, train_words, wait_for_step, write_text

from elman_core.cli import main
from elman_core.data import ByteFile
from elman_core.registry import CheckpointError, ConfigError, DataError, PluginError, StorageError
from elman_core.storage import read_json, write_json
from elman_core.training import evaluate, failures, loop
from elman_core.training.loop import Trainer
from elman_core.training.settings import apply_sets, from_dict
from elman_core.training.start import resume, start


@pytest.fixture
def stop_at(after_step):
    return lambda step, signum=signal.SIGINT: after_step(step, lambda _: os.kill(os.getpid(), signum))


CASES = {
    "plain": (),
    "accumulated": ("train.accumulate=2",),
    "muon": ("train.optimizer=muon",),
    "schedule_free": ("train.optimizer=schedulefree", "train.eval_every=7"),
    "tbptt": ("data.sampling=tbptt", "data.documents=reset", "train.accumulate=2"),
    "documents in rows": ("data.documents=pack", "train.chunk_size=50", "train.accumulate=2"),
    "stream": ("data.sampling=stream", "train.schedule=wsd"),
    "checkpointed": ("train.gradient_checkpointing=true", "train.loss_chunk=5"),
    "gated_matrix": ("model.variant=e88", "model.options.n_heads=2", "model.options.n_state=4"),
    "tanh": ("model.variant=e1", "model.options.use_conv=true", "data.sampling=tbptt"),
}


@pytest.mark.parametrize("case", CASES)
def test_stopped_and_resumed_equals_straight_bit_for_bit(case, text, tmp_path, stop_at):
    straight = start(settings(text, "train.steps=20", *CASES[case]), tmp_path / "straight", quiet=True).fit()
    assert straight.status == "ok"
    stop_at(9)
    stopped = start(settings(text, "train.steps=20", *CASES[case]), tmp_path / "stopped", quiet=True).fit()
    assert (stopped.status, stopped.step, stopped.signal) == ("incomplete", 9, signal.SIGINT)
    resumed = resume(tmp_path / "stopped", quiet=True).fit()
    assert (resumed.status, resumed.step) == ("ok", 20)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "straight")
    assert metrics(tmp_path / "stopped", "evaluation") == metrics(tmp_path / "straight", "evaluation")
    assert_same_bits(straight.checkpoint, resumed.checkpoint)


def test_a_run_whose_windows_were_cut_at_documents_says_that_they_no_longer_are(text, tmp_path, capsys):
    trainer = start(settings(text, "train.steps=2", *CASES["tbptt"]), tmp_path / "run", quiet=True)
    trainer.folder.manifest.pop("documents")
    trainer.fit()
    for said in (True, False):
        resume(tmp_path / "run", steps="+1").fit()
        assert ("windows are no longer cut where documents begin" in capsys.readouterr().out) == said


def test_an_evaluation_that_a_signal_ended_is_made_up(text, tmp_path, monkeypatch):
    asked = settings(text, "train.steps=12", "train.eval_every=5")
    start(asked, tmp_path / "straight", quiet=True).fit()
    with monkeypatch.context() as patched:
        score = evaluate.on_windows
        patched.setattr(
            evaluate, "on_windows", lambda *a, **k: (os.kill(os.getpid(), signal.SIGINT), score(*a, **k))[1]
        )
        assert start(asked, tmp_path / "stopped", quiet=True).fit().step == 5
    assert metrics(tmp_path / "stopped", "evaluation") == []
    resume(tmp_path / "stopped", quiet=True).fit()
    assert metrics(tmp_path / "stopped", "evaluation") == metrics(tmp_path / "straight", "evaluation")


def process(words):
    code = "import sys; from elman_core.cli import main; sys.exit(main())"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen([sys.executable, "-c", code, *words], env=environment, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_run_killed_twice_ends_as_if_it_had_not_been(text, tmp_path):
    """SIGKILL at two places, one of them before the first checkpoint; then to the end, in processes of their own."""
    run, whole = tmp_path / "killed", tmp_path / "whole"
    words = train_words(text, run, "train.save_every=5")
    for step in (2, 17):
        job = process(words)
        wait_for_step(run, step)
        job.kill()
        job.communicate()
        assert manifest(run)["status"] == "running"
        words = ["resume", str(run)]
    assert main(words) == 0
    assert main(train_words(text, whole, "train.save_every=5")) == 0
    assert losses(run) == losses(whole)
    assert [m["step"] for m in metrics(run)] == list(range(1, 41))
    names = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert names == ["step-00000030", "step-00000035", "step-00000040"]
    assert_same_bits(run / "checkpoints" / names[-1], whole / "checkpoints" / names[-1])


@pytest.mark.parametrize(
    ("signum", "code", "status"), [(signal.SIGINT, 130, "incomplete"), (signal.SIGTERM, 143, "killed")]
)
def test_a_signal_saves_and_says_how_to_resume(signum, code, status, text, tmp_path, stop_at, capsys):
    stop_at(3, signum)
    assert main(train_words(text, tmp_path / "run")) == code
    assert f"elman resume {tmp_path / 'run'}" in capsys.readouterr().out
    found = manifest(tmp_path / "run")
    assert (found["status"], found["steps_done"]) == (status, 3)
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()


@pytest.fixture
def finished(text, tmp_path):
    sets = ("train.steps=6", "train.save_every=2", "train.warmup=1")
    start(settings(text, *sets), tmp_path / "run", quiet=True).fit()
    return tmp_path / "run"


def test_resuming_a_finished_run_says_so_and_exits_0(finished, capsys):
    assert resume(finished, quiet=True) is None
    assert main(["resume", str(finished)]) == 0
    assert "is finished: 6 steps" in capsys.readouterr().out


@pytest.mark.parametrize("killed_in", ["_evaluate", "_end"])
def test_a_run_killed_after_its_last_step_is_brought_to_its_end(killed_in, text, tmp_path, monkeypatch):
    """Its last checkpoint has every step; what it lacks is the evaluation, or only the word that it ended well."""

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    sets = ("train.steps=6", "train.save_every=3", "train.final_lr=0")
    start(settings(text, *sets), tmp_path / "straight", quiet=True).fit()
    trainer = start(settings(text, *sets), tmp_path / "run", quiet=True)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, killed_in, kill)
        patched.setattr(failures, "record", lambda *_: None)
        with pytest.raises(Killed):
            trainer.fit()
    assert manifest(tmp_path / "run")["status"] == "running"
    result = resume(tmp_path / "run", quiet=True).fit()
    assert (result.status, result.step) == ("ok", 6)
    found, expected = manifest(tmp_path / "run"), manifest(tmp_path / "straight")
    assert found["steps_done"] == 6
    assert found["result"]["bits_per_byte"] == expected["result"]["bits_per_byte"]
    assert metrics(tmp_path / "run", "evaluation") == metrics(tmp_path / "straight", "evaluation")
    assert resume(tmp_path / "run", quiet=True) is None


def test_a_run_that_ended_well_at_last_says_nothing_of_an_earlier_end(text, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise StorageError("no space")

    trainer = start(settings(text, "train.steps=6", "train.save_every=2"), tmp_path / "run", quiet=True)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "save_checkpoint", fail)
        with pytest.raises(StorageError):
            trainer.fit()
    assert (manifest(tmp_path / "run")["status"], manifest(tmp_path / "run")["error"]) == ("crashed", "no space")
    again = resume(tmp_path / "run", quiet=True)
    assert not {"error", "ended", "steps_done", "result"} & manifest(tmp_path / "run").keys()
    again.fit()
    assert manifest(tmp_path / "run")["status"] == "ok"
    assert "error" not in manifest(tmp_path / "run")


def test_a_checkpoint_of_a_resumed_run_still_tells_of_the_last_evaluation(text, tmp_path, stop_at):
    stop_at(3)
    start(settings(text, "train.steps=6", "train.eval_every=2"), tmp_path / "run", quiet=True).fit()
    again = resume(tmp_path / "run", quiet=True)
    assert again.evaluation == {k: v for k, v in metrics(tmp_path / "run", "evaluation")[-1].items() if k != "kind"}
    assert again.evaluation["step"] == 2
    again.folder.close()


def test_more_steps_keep_the_schedule_that_the_run_began_with(finished):
    result = resume(finished, steps="+3", quiet=True).fit()
    assert result.step == 9
    rates = [m["lr"] for m in metrics(finished)]
    assert rates[6:] == [pytest.approx(1e-4)] * 3
    assert rates[5] == pytest.approx(1e-4)
    found = manifest(finished)
    assert found["horizon"]["steps"] == 6
    assert found["resumed"][0]["at_step"] == 6
    assert resume(finished, steps="9", quiet=True) is None


def test_metrics_are_cut_back_to_the_checkpoint(finished):
    (finished / "checkpoints" / "step-00000006" / "model.safetensors").write_bytes(b"")
    before = losses(finished)
    with (finished / "metrics.jsonl").open("a") as out:
        out.write('{"kind": "step", "st')  # cut short by a kill
    resume(finished, quiet=True).fit()
    assert losses(finished) == before
    names = sorted(p.name for p in (finished / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000006", "step-00000006.damaged"]


def test_a_run_without_an_intact_checkpoint_is_an_error(finished):
    for path in (finished / "checkpoints").iterdir():
        (path / "state" / "optimizer.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"has no good checkpoint: .*optimizer\.safetensors"):
        resume(finished, quiet=True)


def test_a_finished_run_whose_checkpoints_are_gone_keeps_what_it_has(finished):
    shutil.rmtree(finished / "checkpoints")
    before = (finished / "metrics.jsonl").read_bytes(), (finished / "manifest.json").read_bytes()
    for steps in (None, "+3"):
        with pytest.raises(CheckpointError, match="is finished, 6 steps, and has no checkpoint to continue from"):
            resume(finished, steps=steps, quiet=True)
    assert ((finished / "metrics.jsonl").read_bytes(), (finished / "manifest.json").read_bytes()) == before


def test_a_text_that_was_moved_is_found_and_another_refused(finished, text, tmp_path):
    with pytest.raises(DataError, match="is not the text of this run"):
        resume(finished, steps="+2", data=str(write_text(tmp_path / "other", 150_000)), quiet=True)
    moved = shutil.copy(text, tmp_path / "moved")
    assert resume(finished, steps="7", data=str(moved), quiet=True).fit().step == 7


def test_a_small_text_is_compared_whole_not_only_in_samples(tmp_path):
    text, run = write_text(tmp_path / "text", 600_000), tmp_path / "run"
    assert start(settings(text, "train.steps=2"), run, quiet=True).fit().status == "ok"
    before, sampled = text.read_bytes(), ByteFile(text).fingerprint()
    place = next(place for place in range(4096, 600_000, 512) if changed(text, before, place) == sampled)
    assert text.read_bytes()[place] != before[place]
    with pytest.raises(DataError, match="was changed since the run began"):
        resume(run, steps="+2", quiet=True)
    known = read_json(run / "manifest.json")
    known.pop("text_digests")  # as in runs of older versions
    write_json(run / "manifest.json", known)
    assert resume(run, steps="+2", quiet=True).fit().step == 4


def changed(text, before, place):
    """The fingerprint of a text in which one byte differs."""
    text.write_bytes(before[:place] + bytes([before[place] ^ 1]) + before[place + 1 :])
    return ByteFile(text).fingerprint()


def test_two_processes_do_not_train_in_one_run_and_none_in_another_folder(finished):
    trainer = resume(finished, steps="+2", quiet=True)
    with pytest.raises(ConfigError, match="another process is training in it"):
        resume(finished, steps="+2", quiet=True)
    trainer.folder.close()
    with pytest.raises(CheckpointError, match="is not a run"):
        resume(finished.parent, quiet=True)
    with pytest.raises(CheckpointError, match=r"manifest\.json is a file; a run is a folder"):
        resume(finished / "manifest.json", quiet=True)


def test_a_run_by_steps_goes_on_by_minutes(finished):
    before = metrics(finished)[-1]["seconds"]
    resume(finished, minutes="+0.005", quiet=True).fit()
    last = metrics(finished)[-1]
    assert last["seconds"] >= before + 0.3
    assert last["step"] > 6
    assert last["lr"] == pytest.approx(1e-4)
    assert "has ended: the learning rate stays at 1.00e-04" in (finished / "console.log").read_text()


def test_a_constant_schedule_has_no_end(text, tmp_path):
    start(settings(text, "train.steps=4", "train.schedule='constant'"), tmp_path / "run", quiet=True).fit()
    resume(tmp_path / "run", steps="+2", quiet=True).fit()
    said = (tmp_path / "run/console.log").read_text()
    assert "schedule    6 steps, constant" in said
    assert "has ended" not in said


@pytest.mark.parametrize(
    ("steps", "minutes"), [("x", None), ("-3", None), ("5", "5"), (None, "soon"), (None, "nan"), (None, "+inf")]
)
def test_a_wrong_length_is_an_error(finished, steps, minutes):
    with pytest.raises(ConfigError):
        resume(finished, steps=steps, minutes=minutes, quiet=True)


def test_a_schedule_that_ended_at_zero_is_not_continued(text, tmp_path):
    start(settings(text, "train.steps=4", "train.final_lr=0.0"), tmp_path / "run", quiet=True).fit()
    with pytest.raises(ConfigError, match="learning rate of 0"):
        resume(tmp_path / "run", steps="+4", quiet=True)
    assert resume(tmp_path / "run", steps="+4", quiet=True, sets=["train.final_lr=0.1"]).fit().step == 8


@pytest.mark.parametrize(("steps", "minutes"), [("5", None), (None, "2")])
def test_a_schedule_that_will_end_at_zero_is_not_continued_either(steps, minutes, text, tmp_path, stop_at):
    stop_at(2)
    length = "train.steps=4" if steps else "train.minutes=1.0"
    tree = settings(text, "train.final_lr=0.0").to_dict()
    tree["train"]["steps"] = None
    start(from_dict(apply_sets(tree, [length])), tmp_path / "run", quiet=True).fit()
    with pytest.raises(ConfigError, match="learning rate of 0"):
        resume(tmp_path / "run", steps, minutes, quiet=True)


def test_the_first_lines_of_a_longer_run_give_the_schedule_that_it_keeps(text, tmp_path, stop_at):
    stop_at(2)
    start(settings(text, "train.steps=4"), tmp_path / "run", quiet=True).fit()
    resume(tmp_path / "run", steps="9", quiet=True).fit()
    said = (tmp_path / "run/console.log").read_text().splitlines()
    assert [s for s in said if s.startswith("schedule    4 steps") and s.endswith("; the run ends after 9 steps")]


def test_a_checkpoint_holds_nothing_but_safetensors_json_and_text(finished):
    suffixes = {p.suffix for p in (finished / "checkpoints").rglob("*") if p.is_file()}
    assert suffixes == {".safetensors", ".json", ".py", ".md"}
    assert {p.name for p in (finished / "checkpoints").rglob("*.py")} == {"modeling_ladder_hub.py"}


@pytest.mark.parametrize("optimizer", ["adamw", "schedulefree", "muon"])
def test_a_run_with_parameters_that_no_gradient_reaches_is_resumed(
    optimizer, text, tmp_path, stop_at, monkeypatch, request
):
    toy_mixers.install()
    request.addfinalizer(toy_mixers.uninstall)
    make = toy_mixers.ToySum.__init__

    def with_idle(mixer, *arguments):
        make(mixer, *arguments)
        mixer.idle, mixer.idle_vector = torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(3))

    monkeypatch.setattr(toy_mixers.ToySum, "__init__", with_idle)
    asked = settings(text, "model.variant='toysum'", f"train.optimizer={optimizer}", "train.steps=6")
    whole = start(asked, tmp_path / "whole", quiet=True).fit().checkpoint
    stop_at(3)
    assert start(asked, tmp_path / "run", quiet=True).fit().step == 3
    assert_same_bits(resume(tmp_path / "run", quiet=True).fit().checkpoint, whole)
    assert (load_file(whole / "model.safetensors")["model.layers.0.mixer.idle"] == 1).all()


def test_a_run_whose_plugin_is_gone_or_another_version_says_with_what_it_was_made(
    text, tmp_path, stop_at, request, caplog
):
    toy_mixers.install()
    request.addfinalizer(toy_mixers.uninstall)
    stop_at(2)
    run = start(settings(text, "model.variant='toysum'", "train.steps=4"), tmp_path / "run", quiet=True).fit()
    toy_mixers.uninstall()
    with pytest.raises(PluginError, match=r"made with toy-package==1\.2\.3: pip install toy-package"):
        resume(tmp_path / "run", quiet=True)
    toy_mixers.install()
    installed = toy_mixers.plugins().installed
    installed["toysum"] = dataclasses.replace(installed["toysum"], version="1.3.0")
    assert resume(tmp_path / "run", quiet=True).fit().step == 4 > run.step
    assert caplog.text.count("made with toy-package==1.2.3; toy-package==1.3.0 accepts its options") == 1


def test_another_beta1_leaves_the_average_of_schedule_free_as_it_is(text, tmp_path):
    start(settings(text, *CASES["schedule_free"], "train.steps=8"), tmp_path / "run", quiet=True).fit()
    before = metrics(tmp_path / "run", "evaluation")[-1]["loss"]
    trainer = resume(tmp_path / "run", steps="+1", quiet=True, sets=["train.beta1=0.5"])
    assert trainer.evaluate()["loss"] == pytest.approx(before, rel=1e-6)
    trainer.fit()
