"""The trainer's hooks: what observers see, what actors change, and how a failing one ends a run."""

import json
import time

import pytest
import torch
from train_helpers import losses, manifest, metrics, settings

from elman_core.registry import ConfigError, DivergedError, PluginError, hookimpl, plugins
from elman_core.registry.checks import said_when_slow
from elman_core.training import hooks
from elman_core.training.start import resume, start


def run(text, out, *sets):
    return start(settings(text, "train.steps=6", "train.eval_every=3", "train.save_every=4", *sets), out, quiet=True)


class Observer:
    def __init__(self):
        self.seen = []

    @hookimpl
    def elman_run_start(self, run):
        self.seen.append(("start", run.step, run.manifest["parameters"], run.settings.train.steps))

    @hookimpl
    def elman_step_end(self, run, step, metrics):
        self.seen.append(("step", step, metrics["loss"]))

    @hookimpl
    def elman_evaluation_end(self, run, result):
        self.seen.append(("evaluation", result["step"], result["bits_per_byte"]))

    @hookimpl
    def elman_checkpoint_saved(self, run, path):
        assert (path / "model.safetensors").is_file()
        self.seen.append(("saved", path.name))

    @hookimpl
    def elman_run_end(self, run, error):
        self.seen.append(("end", error))


def test_a_hook_that_hangs_at_the_start_is_named(text, good, tmp_path, register, monkeypatch, caplog):
    class Slow:
        @hookimpl
        def elman_run_start(self, run):
            time.sleep(0.3)

    monkeypatch.setattr(hooks, "said_when_slow", lambda what: said_when_slow(what, 0.05))
    register(Slow())
    run(text, tmp_path / "run").fit()
    assert "elman: still waiting for elman_run_start of plugin elman-test:test" in caplog.text


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), type("Own", (BaseException,), {})("no more")])
def test_whatever_a_hook_raises_ends_the_run_with_its_name(error, text, good, tmp_path, register):
    class Failing:
        @hookimpl
        def elman_step_end(self, run, step, metrics):
            raise error

    register(Failing())
    with pytest.raises(PluginError, match=rf"failed in elman_step_end: {type(error).__name__}"):
        run(text, tmp_path / "run").fit()
    assert manifest(tmp_path / "run")["status"] == "crashed"


def test_observers_see_everything_in_order_and_change_nothing(text, good, tmp_path, register):
    observer = register(Observer())
    run(text, tmp_path / "watched").fit()
    order = [(e[0], e[1]) for e in observer.seen]
    assert order == [
        ("start", 0), ("step", 1), ("step", 2), ("step", 3), ("evaluation", 3), ("step", 4), ("saved", "step-00000004"),
        ("step", 5), ("step", 6), ("evaluation", 6), ("saved", "step-00000006"), ("end", None),
    ]  # fmt: skip
    assert losses(tmp_path / "watched") == losses(good)
    assert json.loads((tmp_path / "watched" / "manifest.json").read_text())["act_hooks"] == {}


class Actor:
    @hookimpl
    def elman_loss_terms(self, run, outputs):
        assert outputs.logits.shape[-1] == 256
        return {"z_loss": 0.5 * outputs.logits.float().logsumexp(-1).square().mean()}

    @hookimpl
    def elman_before_optimizer_step(self, run):
        for p in run.model.parameters():
            p.grad.mul_(0.0)


def test_loss_terms_are_logged_under_their_names_and_actors_are_in_the_manifest(text, tmp_path, register):
    register(Actor())
    run(text, tmp_path / "run", "train.accumulate=2").fit()
    lines = metrics(tmp_path / "run")
    assert all(line["z_loss"] > 0 and line["grad_norm"] == 0 for line in lines)
    assert manifest(tmp_path / "run")["act_hooks"] == {
        "elman_loss_terms": ["elman-test:test"],
        "elman_before_optimizer_step": ["elman-test:test"],
    }


def test_a_loss_term_changes_the_gradient_and_not_the_logged_loss(text, good, tmp_path, register):
    class Term:
        @hookimpl
        def elman_loss_terms(self, run, outputs):
            return {"decay": sum(p.square().sum() for p in run.model.parameters())}

    register(Term())
    run(text, tmp_path / "term").fit()
    plain, term = metrics(good), metrics(tmp_path / "term")
    assert plain[0]["loss"] == term[0]["loss"]
    assert plain[0]["grad_norm"] != term[0]["grad_norm"]
    assert plain[-1]["loss"] != term[-1]["loss"]


@pytest.fixture(scope="module")
def good(text, tmp_path_factory):
    """A run without plugins."""
    folder = tmp_path_factory.mktemp("hooks") / "good"
    run(text, folder).fit()
    return folder


def failing(hook, at):
    """A plugin whose `hook` raises after step `at`."""

    def fail(self, run):
        if run.step == at:
            raise RuntimeError("no good")

    return type("Failing", (), {hook: hookimpl(fail)})()


@pytest.mark.parametrize(
    ("hook", "last"),
    [("elman_step_end", 3), ("elman_evaluation_end", 3), ("elman_checkpoint_saved", 4), ("elman_loss_terms", 2),
     ("elman_before_optimizer_step", 2), ("elman_run_start", 0), ("elman_run_end", 6)],
)  # fmt: skip
def test_a_failing_hook_stops_the_run_with_its_plugin_named_and_what_was_done_saved(
    hook, last, text, good, tmp_path, register
):
    plugin = register(failing(hook, last), name="elman-bad:bad")
    with pytest.raises(PluginError, match=f"plugin elman-bad:bad failed in {hook}: RuntimeError: no good") as raised:
        run(text, tmp_path / "run").fit()
    assert isinstance(raised.value.__cause__, RuntimeError)
    found = manifest(tmp_path / "run")
    assert found["status"] == ("ok" if hook == "elman_run_end" else "crashed")
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:08d}").is_dir()
    plugins().manager.unregister(plugin)
    trainer = resume(tmp_path / "run", quiet=True)
    if trainer is not None:
        trainer.fit()
    assert losses(tmp_path / "run") == losses(good)


@pytest.mark.parametrize(
    "given",
    [{"loss": torch.zeros(())}, {"fill": torch.zeros(())}, {"x": torch.zeros(2)}, {"x": 1.0}, torch.zeros(())],
    ids=["taken", "taken for rows", "vector", "float", "tensor"],
)
def test_a_loss_term_that_is_not_a_named_scalar_is_an_error(given, text, tmp_path, register):
    class Wrong:
        @hookimpl
        def elman_loss_terms(self, run, outputs):
            return given

    register(Wrong())
    with pytest.raises(PluginError, match="elman_loss_terms"):
        run(text, tmp_path / "run").fit()
    with pytest.raises(ConfigError, match=r"plugin elman-test.* set train\.loss_chunk=0"):
        run(text, tmp_path / "chunked", "train.loss_chunk=4")


def test_a_term_that_is_not_finite_ends_the_run(text, tmp_path, register):
    class Infinite:
        @hookimpl
        def elman_loss_terms(self, run, outputs):
            return {"x": torch.tensor(float("inf"))}

    register(Infinite())
    with pytest.raises(DivergedError, match="a loss term"):
        run(text, tmp_path / "run").fit()
