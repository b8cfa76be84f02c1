"""The loop itself: what is logged, what must not depend on memory settings, and how it ends when numbers go wrong."""

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_helpers import losses, manifest, metrics, settings, tensors, train_words

from elman_core.cli import main
from elman_core.registry import ConfigError, DivergedError
from elman_core.training.start import start
from elman_core.training.step import TrainStep


def run(text, out, *sets):
    return start(settings(text, "train.steps=8", "train.warmup=2", *sets), out, quiet=True)


@pytest.mark.parametrize("sampling", ["random", "tbptt"])
def test_settings_of_memory_do_not_change_the_loss(sampling, text, tmp_path):
    def trained(*sets):
        out = tmp_path / "-".join(["run", *sets])
        run(text, out, f"data.sampling={sampling}", *sets).fit()
        return metrics(out)

    plain = trained()
    for changed in ("train.accumulate=4", "train.loss_chunk=3", "train.gradient_checkpointing=true"):
        for a, b in zip(plain, trained(changed), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5), changed
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4), changed


def test_evaluating_more_often_changes_no_loss(text, tmp_path):
    sets = ("train.optimizer=schedulefree", "train.lr=0.01")
    run(text, tmp_path / "one", *sets).fit()
    run(text, tmp_path / "two", *sets, "train.eval_every=1", "train.save_every=1").fit()
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert len(metrics(tmp_path / "two", "evaluation")) == 8


def test_training_learns_and_starts_at_the_logarithm_of_256(text, tmp_path):
    result = run(text, tmp_path / "run", "train.steps=60", "train.lr=0.01").fit()
    got = losses(tmp_path / "run")
    assert got[1] == pytest.approx(math.log(256), abs=0.05)
    assert got[60] < 2.7  # ten letters and a separator: ln 10 is 2.3
    assert result.status == "ok"


def test_every_line_of_metrics_has_the_figures(text, tmp_path):
    run(text, tmp_path / "run", "train.eval_every=4").fit()
    steps, evaluations = metrics(tmp_path / "run"), metrics(tmp_path / "run", "evaluation")
    assert [line["step"] for line in steps] == list(range(1, 9))
    keys = {"kind", "step", "loss", "bits_per_byte", "lr", "grad_norm", "tok_s", "memory", "seconds", "bytes_seen"}
    assert all(set(line) == keys for line in steps)
    assert steps[-1]["bytes_seen"] == 8 * 4 * 16
    assert steps[0]["lr"] == pytest.approx(0.0005)
    assert steps[1]["lr"] == pytest.approx(0.001)
    assert [line["step"] for line in evaluations] == [4, 8]
    for line in evaluations:
        assert line["bits_per_byte"] == pytest.approx(line["loss"] / math.log(2))
        assert line["bytes"] == 640


def test_the_manifest_says_what_ran(text, tmp_path):
    trainer = run(text, tmp_path / "run")
    trainer.fit()
    found = manifest(tmp_path / "run")
    assert found["status"] == "ok"
    assert found["settings"]["train"]["precision"] == "fp32"
    assert found["settings"]["train"]["schedule"] == "cosine"
    assert "spectral_radius" in found["settings"]["model"]["options"]
    assert found["made_with"]["e42"].startswith("elman-e42==")
    assert found["protocol"]["data"]["size"] == text.stat().st_size
    assert len(found["protocol_hash"]) == 12
    assert found["backends"] == [f"layers 0-1 E42Mixer: {trainer.model.model.layers[0].mixer.backend()}"]
    assert found["result"]["loss_last_100_steps"] == pytest.approx(sum(losses(tmp_path / "run").values()) / 8)
    assert {"hardware", "versions", "git_commit", "first_step_seconds", "parameters"} <= set(found)
    phases = [found["phases"][name] for name in ("model", "first step")]
    assert phases == sorted(phases)
    assert 0 < phases[0] < phases[1]


def test_the_protocol_leaves_out_what_is_tuned_and_what_is_only_memory(text, tmp_path):
    def hashed(name, *sets):
        trainer = run(text, tmp_path / name, *sets)
        trainer.folder.close()
        return trainer.manifest["protocol_hash"]

    first = hashed("a")
    for i, same in enumerate(
        ["train.lr=0.5", "train.seed=1", "train.accumulate=2", "train.save_every=3", "model.hidden_size=8"]
    ):
        assert hashed(f"same{i}", same) == first, same
    different = ["train.batch_size=2", "train.chunk_size=8", "train.steps=9", "train.optimizer=schedulefree", "train.clip=2.0",
                 "data.sampling=stream", "data.heldout=0.2", "train.precision=bf16", "data.eval_bytes=320"]  # fmt: skip
    assert len({first, *(hashed(f"other{i}", s) for i, s in enumerate(different))}) == 1 + len(different)


def test_a_run_of_zero_steps_prints_no_loss_and_saves_the_model(text, tmp_path, capsys):
    words = ["train", "e42@16x1", "--data", str(text), "--out", str(tmp_path / "run"), "--steps", "0"]
    assert main([*words, "--set", "train.chunk_size=16"]) == 0
    said = capsys.readouterr().out
    assert "step 1" not in said
    assert "held out at" not in said
    assert metrics(tmp_path / "run") == []
    assert (tmp_path / "run" / "checkpoints" / "step-00000000" / "model.safetensors").is_file()


def test_the_first_lines_say_what_will_happen(text, tmp_path, capsys):
    sets = ("train.steps=20", "train.warmup=2", "train.log_every=5")
    assert main(train_words(text, tmp_path / "run", *sets)) == 0
    said = capsys.readouterr().out
    assert re.search(r"layers 0-1 E42Mixer: [^;]+ on cpu, fp32", said)
    assert "expected at the start: 5.5452 nats per byte (ln 256)" in said
    assert "0% 5.00e-04, 1% 5.00e-04, 10% 1.00e-03, 50% " in said
    model = 256 * 16 + 2 * (16 + 16 * 16 * 3 + 16) + 16
    assert f"{tmp_path / 'run'}: e42@16x2, {model:,} parameters\n" in said
    first = said[: said.index("\nstep 1 ")].splitlines()
    assert [line.split()[0] for line in first] == ["run", "settings", "text", "backend", "schedule"]
    assert {"train.log_every=5", "train.batch_size=4"} <= set(first[1].split()), "what differs from the defaults"
    assert not {"train.clip=1.0", "train.seed=42"} & set(first[1].split())
    assert [line.split()[1] for line in said.splitlines() if line.startswith("step ")] == ["1", "5", "10", "15", "20"]
    logged = (tmp_path / "run" / "console.log").read_text()
    assert all(line in logged for line in said.splitlines())


def test_options_of_layers_are_printed_as_set_takes_them(text, tmp_path, capsys):
    def line(name, *sets):
        words = ["train", "e42+e1", "--data", str(text), "--out", str(tmp_path / name), "--steps", "0"]
        sets = ("model.hidden_size=16", "model.num_hidden_layers=2", "train.chunk_size=16", *sets)
        assert main([*words, *(word for pair in sets for word in ("--set", pair))]) == 0
        return next(said for said in capsys.readouterr().out.splitlines() if said.startswith("settings"))

    assert "model.options" not in line("plain")
    options = "model.options=[{}, {use_conv = true}]"
    assert options in line("named", "model.options.e1.use_conv=true")
    assert options in line("layered", options)


def test_a_learning_rate_of_a_million_diverges_with_exit_4_and_says_where(text, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(train_words(text, out, "train.steps=200", "train.lr=1e6", "train.warmup=0", "train.save_every=1")) == 4
    said = capsys.readouterr().err
    report = json.loads((out / "diverged.json").read_text())
    assert manifest(out)["status"] == f"diverged@{report['step']}"
    assert f"training diverged in step {report['step']}" in said
    assert report["first_non_finite"]["kind"] in ("weight", "activation", "gradient")
    assert len(report["batch"]["offsets"]) == 4
    assert report["history"][-1]["step"] == report["step"]
    kept = sorted((out / "checkpoints").iterdir())[-1]
    assert kept.name == f"step-{report['step'] - 1:08d}"


def test_the_gradient_met_first_in_the_backward_is_named(text, tmp_path):
    trainer = run(text, tmp_path / "run")
    trainer.model.model.layers[0].mixer.out_proj.weight.register_hook(lambda grad: grad * math.nan)
    trainer.model.model.layers[0].mixer.in_proj.weight.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(DivergedError, match=r"gradient model\.layers\.0\.mixer\.out_proj\.weight"):
        trainer.fit()


def test_minutes_are_counted_from_the_end_of_the_first_step(text, tmp_path, monkeypatch):
    asked = settings(text, "train.minutes=0.02", "train.warmup=1")
    asked = replace(asked, train=replace(asked.train, steps=None))
    trainer = start(asked, tmp_path / "run", quiet=True)
    real = TrainStep.forward
    waits = iter([0.6, 0.0])

    def slow_first(self, windows, counted=None):
        time.sleep(next(waits, 0.0))
        return real(self, windows, counted)

    monkeypatch.setattr(TrainStep, "forward", slow_first)
    trainer.fit()
    lines = metrics(tmp_path / "run")
    assert lines[0]["seconds"] == 0
    assert 1.2 <= lines[-1]["seconds"] < 1.7
    assert manifest(tmp_path / "run")["first_step_seconds"] > 0.6


def test_a_folder_that_is_not_empty_is_not_overwritten(text, tmp_path):
    run(text, tmp_path / "run").fit()
    with pytest.raises(ConfigError, match="elman resume"):
        run(text, tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        run(text, tmp_path / "other")


def test_default_names_are_unique(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainers = [run(text, None) for _ in range(3)]
    assert len({t.path for t in trainers}) == 3
    assert all(t.path.parent.name == "runs" for t in trainers)


def test_a_model_that_does_not_fit_is_one_line_and_exit_3(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "e42@999999x1", "--data", str(text), "--set", "train.chunk_size=16"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("elman: out of memory: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["e4242"], "no variant 'e4242'"),
        (["e42", "--set", "model.options.expansoin=2"], "no option 'expansoin'. Did you mean 'expansion'"),
        (["e42", "--set", "model.options.expansion='a'"], "must be a number"),
        (["e42", "--set", "train.stesp=3"], "Did you mean 'train.steps'"),
        (["e42@10"], "write a size as"),
        (["none.toml"], "there is no recipe"),
        (["e42", "--steps", "3", "--minutes", "1"], "one of --steps"),
        (["e42", "--set", "train.device=gpu"], "the device must be"),
        (["e42", "--set", "train.device=cuda:7"], "CUDA devices"),
        (["published"], "no variant to train"),
        ([__file__], "is a file, not a recipe (.toml): give a text with --data"),
        ([str(Path(__file__).parent)], "is neither a variant nor a recipe (.toml), but a folder"),
        (
            ["pretrained/e88-small"],
            "is a trained model: to begin with it, elman train --init pretrained/e88-small --data FILE",
        ),
        (
            [str(Path(__file__).parent / "checkpoints" / "0.1.0" / "e1")],
            "to begin with it, elman train --init",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_2_and_leaves_no_folder(words, said, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words, "--data", str(text), "--set", "train.chunk_size=16"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_is_read_and_flags_and_sets_go_over_it(text, tmp_path):
    from elman_core.cli.train import read_settings

    recipe = tmp_path / "r.toml"
    recipe.write_text('[model]\nvariant = "e1"\n[train]\nminutes = 3.0\nlr = 0.5\n')
    got = read_settings(str(recipe), text, steps=7, sets=["train.lr=0.25"])
    assert (got.model.variant, got.train.steps, got.train.minutes, got.train.lr) == ("e1", 7, None, 0.25)
    assert read_settings("e42:radius099@64x3").model.num_hidden_layers == 3
    assert read_settings("e42", tokens=1000, sets=["train.chunk_size=10", "train.batch_size=10"]).train.steps == 10


def test_every_shipped_recipe_is_valid():
    from elman_core.training.recipes import shipped
    from elman_core.training.settings import from_dict, read_recipe, resolve

    found = shipped()
    assert {"published", "small"} <= set(found)
    for path in found.values():
        resolve(from_dict(read_recipe(path)), "cpu", False)


def test_bf16_keeps_master_weights_in_fp32(text, tmp_path):
    result = run(text, tmp_path / "run", "train.precision=bf16").fit()
    assert all(t.dtype == torch.float32 for n, t in tensors(result.checkpoint).items() if t.is_floating_point())
    assert losses(tmp_path / "run")[8] < 5.6
