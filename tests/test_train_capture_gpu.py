"""Real CUDA graphs: the same bits as eager steps, nothing in a step that waits for the device, and the run says what ran."""

import json

import pytest
import torch
from train_helpers import assert_same_bits, checkpoint, losses, manifest, settings, write_text

from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.registry import DivergedError
from elman_core.training.start import resume, start

pytestmark = pytest.mark.gpu

SETTINGS = {
    "bf16": (),
    "fp32": ("train.precision=fp32",),
    "accumulate": ("train.accumulate=2",),
    "checkpointing": ("train.gradient_checkpointing=true",),
    "dropout": ("model.options.dropout=0.3",),
    "muon": ("train.optimizer=muon",),
    "schedulefree": ("train.optimizer=schedulefree",),
    "tbptt": ("data.sampling=tbptt", "train.accumulate=2"),
    "documents in tbptt": ("data.sampling=tbptt", "data.documents=reset", "train.accumulate=2"),
    "rows of documents": ("data.documents=pack",),
    "saving and evaluating": ("train.save_every=3", "train.eval_every=4"),
}
VARIANTS = {"e1": "e1", "e42": "e42", "e88": "e88:h32n16"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text", 2_000_000)


def made(text, out, *sets):
    shape = ("model.hidden_size=256", "train.batch_size=16", "train.chunk_size=128", "train.device=cuda")
    return start(settings(text, *shape, "train.steps=12", "train.warmup=3", *sets), out, quiet=True)


@pytest.mark.parametrize("sets", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_graph_trains_as_eager_steps_do_bit_for_bit(variant, sets, text, tmp_path):
    if "dropout" in str(sets) and variant.startswith("e88"):
        pytest.skip("it has no dropout")
    sets = (f"model.variant={variant}", *sets)
    made(text, tmp_path / "eager", "train.launch=eager", *sets).fit()
    made(text, tmp_path / "graph", "train.launch=graph", *sets).fit()
    assert losses(tmp_path / "eager") == losses(tmp_path / "graph")
    assert_same_bits(checkpoint(tmp_path / "eager"), checkpoint(tmp_path / "graph"))
    assert json.loads((tmp_path / "graph" / "manifest.json").read_text())["step"]["mode"] == "graph"


def test_auto_is_a_graph(text, tmp_path):
    made(text, tmp_path / "run").fit()
    assert manifest(tmp_path / "run")["step"]["mode"] == "graph"


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_nothing_in_a_step_waits_for_the_device(variant, text, tmp_path):
    trainer = made(text, tmp_path / "run", "train.launch=eager", f"model.variant={variant}")
    trainer.advance(2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer._launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trainer._settle()
    trainer.feed.reader.close()
    trainer.folder.close()


def test_a_graph_that_diverges_names_its_step_and_keeps_what_was(text, tmp_path):
    trainer = made(text, tmp_path / "run", "train.launch=graph", "train.lr=1e6", "train.warmup=0", "train.save_every=1")
    with pytest.raises(DivergedError):
        trainer.fit()
    report = json.loads((tmp_path / "run" / "diverged.json").read_text())
    assert checkpoint(tmp_path / "run").name == f"step-{report['step'] - 1:08d}"


def test_a_graph_resumes_bit_for_bit(text, tmp_path):
    sets = ("train.launch=graph", "data.sampling=tbptt")
    made(text, tmp_path / "whole", *sets).fit()
    trainer = made(text, tmp_path / "parts", *sets, "train.save_every=6")
    trainer.advance(6)
    trainer.feed.reader.close()
    trainer.folder.close()
    resume(tmp_path / "parts", quiet=True).fit()
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert_same_bits(checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "parts"))


@pytest.mark.parametrize("launch", ["compile", "compile+graph"])
def test_a_compiled_step_learns_as_an_eager_one(launch, text, tmp_path):
    made(text, tmp_path / "eager", "train.launch=eager", "train.precision=fp32").fit()
    made(text, tmp_path / "compiled", f"train.launch={launch}", "train.precision=fp32").fit()
    for step, loss in losses(tmp_path / "eager").items():
        assert losses(tmp_path / "compiled")[step] == pytest.approx(loss, rel=1e-4)


# `torch.compile` of a whole model: one graph, the kernels in it, and the loss and gradients of the eager model -------


@pytest.mark.parametrize("precision", ["float32", "bfloat16 autocast"])
@pytest.mark.parametrize("variant", ["e1", "e42", "e88:h8n32"])
def test_a_whole_model_is_one_graph_with_the_gradients_of_the_eager_one(variant, precision, monkeypatch):
    """In bfloat16 compiled code rounds elsewhere: it may be as far from float32 as twice the eager model, and 4 eps."""
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = LadderForCausalLM(LadderConfig(variant=variant, hidden_size=256, num_hidden_layers=2)).cuda().train()
    tokens_BT = torch.randint(256, (4, 64), device="cuda")
    narrow = precision != "float32"
    began: dict[str, torch.Tensor] = {}

    def gradients(forward, autocast=narrow):
        for name, buffer in model.named_buffers():  # the power iteration of a spectral norm goes on at every forward
            buffer.copy_(began.get(name, buffer))
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = forward(input_ids=tokens_BT, labels=tokens_BT).loss
        loss.backward()
        return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}

    gradients(model.forward)  # it has begun now
    began |= {n: b.clone() for n, b in model.named_buffers()}
    truth, eager = gradients(model.forward, autocast=False), gradients(model.forward)
    compiled = gradients(torch.compile(model.forward, fullgraph=True, dynamic=False))
    assert compiled.keys() == eager.keys() == truth.keys()

    def gap(made, name):
        return ((made[name] - truth[name]).norm() / truth[name].norm().clamp(min=1e-8)).item()

    gaps = {
        n: (gap(compiled, n), 2 * gap(eager, n) + 4 * torch.finfo(torch.bfloat16).eps if narrow else 1e-4)
        for n in truth
    }
    assert not {n: f"{far:.2e} > {limit:.2e}" for n, (far, limit) in gaps.items() if not far <= limit}
    if narrow:
        assert max(gap(eager, n) for n in truth) > 1e-4, "nothing was rounded"
