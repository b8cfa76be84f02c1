"""A captured step gives the same bits as an eager one, on a recorder that does on a CPU what a CUDA graph does on a GPU."""

import json

import pytest
import torch
from cpu_graph import CpuRecorder, _CpuRecording
from train_helpers import assert_same_bits, checkpoint, losses, manifest, metrics, settings, write_text

from elman_core.registry import ConfigError, DivergedError, KernelError, OutOfMemoryError, hookimpl
from elman_core.training import modes
from elman_core.training.hooks import watched
from elman_core.training.modes import CapturedStep, choose_mode
from elman_core.training.start import resume, start


def eager(text, out, *sets):
    return start(settings(text, "train.steps=9", "train.warmup=3", *sets), out, quiet=True)


def captured(trainer, ahead=1, required=True):
    """The trainer with its step captured, and metrics that come one step late, as on a GPU."""
    trainer.compute = CapturedStep(trainer.compute, CpuRecorder(), required=required)
    trainer.ahead = ahead
    return trainer


SETTINGS = {
    "chunked loss, checkpointing, no clipping": (
        "train.loss_chunk=3",
        "train.gradient_checkpointing=true",
        "train.clip=0",
    ),
    "bf16, accumulating": ("train.precision=bf16", "train.accumulate=2"),
    "muon": ("train.optimizer=muon",),
    "schedulefree, evaluating": ("train.optimizer=schedulefree", "model.options.dropout=0.3", "train.eval_every=3"),
    "tbptt, accumulating": ("data.sampling=tbptt", "train.accumulate=2", "train.batch_size=8", "train.chunk_size=100"),
    "documents in tbptt": (
        "data.sampling=tbptt",
        "data.documents=reset",
        "model.variant=e88",
        "model.options.n_state=4",
    ),
    "rows of documents": ("data.documents=pack", "train.chunk_size=50", "train.accumulate=2", "model.variant=e1"),
    "saving and evaluating": ("train.save_every=2", "train.eval_every=3"),
    "e1": ("model.variant=e1", "data.sampling=tbptt"),
    "e88": ("model.variant=e88", "model.options.n_heads=2", "model.options.n_state=4", "data.sampling=tbptt"),
}


@pytest.mark.parametrize("sets", SETTINGS.values(), ids=SETTINGS)
def test_a_captured_training_is_the_eager_one_bit_for_bit(sets, text, tmp_path):
    eager(text, tmp_path / "eager", *sets).fit()
    trainer = captured(eager(text, tmp_path / "graph", *sets))
    trainer.fit()
    recorder = trainer.compute.recorder
    assert (recorder.records, recorder.replays) == (1, 9 - modes.WARM)
    one, two = metrics(tmp_path / "eager"), metrics(tmp_path / "graph")
    for line in (*one, *two):
        for timed in ("tok_s", "memory", "seconds"):
            del line[timed]
    assert one == two
    assert metrics(tmp_path / "eager", "evaluation") == metrics(tmp_path / "graph", "evaluation")
    assert_same_bits(checkpoint(tmp_path / "eager"), checkpoint(tmp_path / "graph"))


def test_rows_that_start_afresh_are_restarted_in_the_replay(text, tmp_path):
    """Streams so short that every row comes to its end, and starts again, while the step is being replayed."""
    short = write_text(tmp_path / "short", 4_000)
    sets = ("data.sampling=tbptt", "train.chunk_size=200", "data.heldout=0", "train.batch_size=4")
    eager(short, tmp_path / "eager", *sets).fit()
    trainer = captured(eager(short, tmp_path / "graph", *sets))
    assert trainer.windows.sampler.windows_per_row < 9 - modes.WARM
    trainer.fit()
    assert losses(tmp_path / "eager") == losses(tmp_path / "graph")
    assert_same_bits(checkpoint(tmp_path / "eager"), checkpoint(tmp_path / "graph"))


def test_a_captured_training_resumes_as_an_eager_one_and_back(text, tmp_path):
    sets = ("data.sampling=tbptt", "train.accumulate=2", "model.options.dropout=0.1")
    eager(text, tmp_path / "whole", *sets).fit()
    trainer = captured(eager(text, tmp_path / "parts", *sets, "train.save_every=5"))
    trainer.folder.update(horizon={"steps": 9, "minutes": None})
    while trainer.step < 5:
        trainer._one_step()
    trainer.folder.close()
    again = captured(resume(tmp_path / "parts", quiet=True))
    assert again.step == 5
    again.fit()
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert_same_bits(checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "parts"))


@pytest.mark.parametrize(("step", "sampling"), [(1, "random"), (3, "tbptt"), (6, "random")])
def test_divergence_is_told_of_the_right_step_and_nothing_was_updated_since(step, sampling, text, tmp_path):
    sets = ("train.save_every=1", "train.keep=0", f"data.sampling={sampling}")
    eager(text, tmp_path / "good", *sets).fit()
    trainer = captured(eager(text, tmp_path / "run", *sets))
    trainer.model.model.embed_tokens.register_forward_hook(
        lambda _module, inputs, out: out.where((inputs[0] != 255).unsqueeze(-1), torch.nan)
    )
    mark(trainer, step, column=0)
    with pytest.raises(DivergedError, match=f"diverged in step {step}: loss nan"):
        trainer.fit()
    found = manifest(tmp_path / "run")
    report = json.loads((tmp_path / "run" / "diverged.json").read_text())
    assert found["status"] == f"diverged@{step}"
    assert report["step"] == step
    assert report["batch"]["offsets"] == trainer.windows.batch(step - 1).offsets.tolist()
    assert report["first_non_finite"]["name"] == "model.embed_tokens"
    assert [h["step"] for h in report["history"]] == list(range(1, step + 1))
    assert [m["step"] for m in metrics(tmp_path / "run")] == list(range(1, step))
    good = losses(tmp_path / "good")
    assert all(good[s] == loss for s, loss in losses(tmp_path / "run").items())
    if step > 1:
        assert_same_bits(tmp_path / "good/checkpoints" / f"step-{step - 1:08d}", checkpoint(tmp_path / "run"))


def mark(trainer, step, column):
    """A byte 255, which the text does not have, in the windows of one step alone."""
    assert not (trainer.windows.batch(step - 1).tokens == 255).any()
    real = trainer.windows.batch

    def batch(s, rows=None):
        found = real(s, rows)
        if s == step - 1:
            found.tokens[0, column] = 255
        return found

    trainer.windows.batch = batch


def test_a_failed_step_leaves_the_gradient_to_look_at_though_another_was_launched(text, tmp_path):
    trainer = captured(eager(text, tmp_path / "run"))
    name = "model.layers.0.mixer.out_proj.weight"
    weight, real = trainer.model.get_parameter(name), trainer.compute.step._backward

    def backward(windows):
        out = real(windows)
        weight.grad.masked_fill_((windows.tokens == 255).any(), torch.nan)
        return out

    trainer.compute.step._backward = backward
    mark(trainer, 6, column=-1)
    with pytest.raises(
        DivergedError, match=f"step 6: loss [0-9.]+, gradient norm nan; first not finite: gradient {name}"
    ):
        trainer.fit()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        torch.AcceleratorError("CUDA error: out of memory"),  # of the driver: another process has taken it
        KernelError("kernel e42_dense_cuda_cluster_bfloat16_192: launch: out of memory"),
    ],
    ids=["torch", "driver", "launch"],
)
@pytest.mark.parametrize("replays", [0, 3])
def test_memory_that_runs_out_while_recording_or_replaying_ends_the_run_and_the_checkpoint_goes_on(
    replays, error, text, tmp_path, monkeypatch
):
    """It does not say that the step cannot be captured."""
    sets = ("train.save_every=2",)
    eager(text, tmp_path / "whole", *sets).fit()
    trainer = captured(eager(text, tmp_path / "run", *sets))
    recorder, replay = trainer.compute.recorder, _CpuRecording.__call__

    def fail(*given):
        if recorder.replays == replays:
            raise error
        return replay(*given)

    monkeypatch.setattr(*((_CpuRecording, "__call__") if replays else (recorder, "record")), fail)
    with pytest.raises(
        OutOfMemoryError, match=f"out of memory on cpu in step {modes.WARM + replays + 1}, .*: try train.accu"
    ):
        trainer.fit()
    assert manifest(tmp_path / "run")["status"] == "oom"
    monkeypatch.undo()
    resume(tmp_path / "run", quiet=True).fit()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_what_the_host_must_read_is_refused_by_name_or_said_and_run_eager(text, tmp_path, caplog):
    def looks(_module, _inputs, out):
        assert float(out[0].detach().sum()) < 1e9

    eager(text, tmp_path / "eager").fit()
    trainer = captured(eager(text, tmp_path / "auto"), required=False)
    trainer.model.model.norm.register_forward_hook(looks)
    trainer.fit()
    assert (
        "cannot be captured as a CUDA graph and runs eager: operation not permitted when stream is capturing"
        in caplog.text
    )
    assert losses(tmp_path / "auto") == losses(tmp_path / "eager")
    step = manifest(tmp_path / "auto")["step"]
    assert step["mode"] == "eager"
    assert "reads a value on the host" in step["why"]
    strict = captured(eager(text, tmp_path / "graph"))
    strict.model.model.norm.register_forward_hook(looks)
    with pytest.raises(KernelError, match=r"use train\.launch='eager'"):
        strict.fit()


def test_time_to_warm_up_and_capture_is_not_training_time(text, tmp_path):
    trainer = captured(eager(text, tmp_path / "run"))
    trainer.fit()
    seconds = [line["seconds"] for line in metrics(tmp_path / "run")]
    assert seconds[: modes.WARM + 1] == [0] * (modes.WARM + 1)
    assert 0 < seconds[modes.WARM + 1] < seconds[-1]
    found = manifest(tmp_path / "run")
    assert 0 < found["first_step_seconds"] < found["warm_up_seconds"]


def test_who_watches_steps_is_noticed(after_step):
    assert not watched()
    after_step(1, lambda _: None)
    assert watched()


CUDA = torch.device("cuda")


def test_auto_is_a_graph_on_a_gpu_and_says_what_stands_against_it(text, tmp_path):
    trainer = eager(text, tmp_path / "run", "model.options.dropout=0.1")
    trainer.folder.close()

    def mode(device, *sets):
        chosen = choose_mode(settings(text, *sets), trainer.model, device)
        return chosen.name, chosen.why

    assert mode(CUDA)[0] == "graph"
    assert mode(torch.device("cpu")) == ("eager", "no CUDA graphs on cpu")
    assert mode(CUDA, "train.launch=eager") == ("eager", "asked for")
    assert mode(CUDA, "train.launch=compile+graph")[0] == "compile+graph"
    assert mode(CUDA, "data.sampling=tbptt", "data.documents=reset")[0] == "graph"
    assert mode(CUDA, "train.gradient_checkpointing=true")[0] == "eager"
    assert mode(CUDA, "data.sampling=tbptt")[0] == "graph"
    assert mode(CUDA, "train.optimizer=schedulefree")[0] == "graph"


class Actor:
    @hookimpl
    def elman_before_optimizer_step(self, run):
        pass


def test_a_plugin_that_acts_keeps_the_step_eager_and_is_named(text, tmp_path, register):
    trainer = eager(text, tmp_path / "run")
    trainer.folder.close()
    register(Actor(), "elman-test:actor")
    mode = choose_mode(settings(text), trainer.model, CUDA)
    assert (mode.name, mode.why) == ("eager", "elman-test:actor acts on every step, in elman_before_optimizer_step")
    with pytest.raises(ConfigError, match="elman-test:actor acts on every step"):
        choose_mode(settings(text, "train.launch=graph"), trainer.model, CUDA)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["train.launch=graph"], "no CUDA graphs on cpu"),
        (["train.launch=compile", "data.sampling=tbptt"], "a carried state cannot be compiled"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_is_written(sets, said, text, tmp_path):
    with pytest.raises(ConfigError, match=said):
        eager(text, tmp_path / "run", *sets)
    assert not (tmp_path / "run").exists()


def test_a_compiled_backbone_trains_as_the_eager_one(text, tmp_path, monkeypatch):
    """Traced forward and backward, as for a GPU; only that no machine code is made, which takes a minute."""
    from elman_core.model import LadderModel

    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(
        LadderModel, "compile", lambda self, **how: torch.nn.Module.compile(self, backend=backend, **how)
    )
    sets = ("train.eval_every=4", "train.accumulate=2", "train.precision=bf16")
    eager(text, tmp_path / "eager", *sets).fit()
    trainer = eager(text, tmp_path / "compiled", *sets, "train.launch=compile")
    try:
        trainer.fit()
    finally:
        torch.compiler.reset()
    assert len(traced) == 1, "one trace: neither another micro-batch nor an evaluation is compiled anew"
    for step, loss in losses(tmp_path / "eager").items():
        assert losses(tmp_path / "compiled")[step] == pytest.approx(loss, rel=1e-4)
    assert trainer.manifest["step"]["mode"] == "compile"
