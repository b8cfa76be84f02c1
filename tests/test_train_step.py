"""The step as a function: what it updates, what it must leave alone, and what several processes may replace."""

import itertools
import math

import pytest
import torch
from train_helpers import metrics, settings, write_text

from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.registry import ConfigError, get_variant
from elman_core.training.objective import forward_loss, initial_states
from elman_core.training.start import start
from elman_core.training.step import Windows


@pytest.fixture
def made(text, tmp_path):
    """Makes trainers whose folders are closed at the end."""
    trainers = []

    def make(*sets):
        trainers.append(start(settings(text, *sets), tmp_path / f"run{len(trainers)}", quiet=True))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.folder.close()


def windows(trainer, step):
    return Windows(torch.from_numpy(trainer.windows.batch(step).tokens))


def everything(trainer):
    """Weights, moments and the counts of steps, as bytes."""
    held = {**trainer.model.state_dict(), **trainer.optimizer.tensors()}
    return {name: tensor.numpy().tobytes() for name, tensor in held.items() if "spectral" not in name}


@pytest.mark.parametrize("optimizer", ["adamw", "schedulefree", "muon"])
def test_after_a_step_that_is_not_finite_nothing_is_updated_any_more(optimizer, made):
    trainer = made(f"train.optimizer={optimizer}")
    compute = trainer.compute
    assert compute(windows(trainer, 0), 1e-3).read().finite
    before = everything(trainer)
    compute.terms = lambda outputs: {"bad": outputs.loss.detach() * math.inf}
    values = compute(windows(trainer, 1), 1e-3).read()
    assert not values.finite
    assert math.isfinite(values.loss)
    assert everything(trainer) == before
    compute.terms = lambda _: {}
    assert compute(windows(trainer, 2), 1e-3).read().finite
    assert everything(trainer) == before, "the step after a failed one, which may be on its way already, counts no more"


@pytest.mark.parametrize("sets", [(), ("train.accumulate=2", "train.precision=bf16")])
def test_without_logits_the_step_is_the_same_but_for_rounding(sets, made):
    plain, fused = made(*sets), made(*sets)
    fused.compute.logits = False
    for step in range(3):
        one, two = (t.compute(windows(t, step), 1e-3).read() for t in (plain, fused))
        assert two.loss == pytest.approx(one.loss, rel=1e-5 if not sets else 1e-3)
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4 if not sets else 1e-2)
    with torch.no_grad():
        assert fused.compute.forward(windows(fused, 3)).logits is None


# its forward: pieces, carried states and chunked losses are one function ---------------------------------------------


B, T = 3, 14


@pytest.fixture(params=["e1", "e42", "e88"])
def model(request):
    torch.manual_seed(0)
    options = {"n_heads": 2, "n_state": 4, "use_conv": True} if request.param == "e88" else {"use_conv": True}
    config = LadderConfig(variant=request.param, options=options, hidden_size=16, num_hidden_layers=2)
    return LadderForCausalLM(config).double()


@pytest.fixture
def tokens():
    return torch.randint(0, 256, (B, T + 1), generator=torch.Generator().manual_seed(1))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def test_the_loss_is_that_of_the_model_itself(model, tokens):
    ours = forward_loss(model, tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(ours.loss, model(tokens, return_loss=True).to(ours.loss.dtype))
    assert ours.logits.shape == (B, T, 256)


def test_a_reset_row_is_as_if_its_document_stood_alone(model, tokens):
    model.eval()
    fresh = torch.zeros((B, T), dtype=torch.bool)
    fresh[1, 6] = fresh[2, 3] = fresh[2, 6] = True
    with torch.no_grad():
        carried = forward_loss(model, tokens[:, :-1], tokens[:, 1:], return_states=True)
        got = forward_loss(
            model, tokens[:, :-1], tokens[:, 1:], states=carried.states, starts_BT=fresh, return_states=True
        ).logits

        def alone(row, first, end, states=None):
            rows = None if states is None else [{n: t[row : row + 1] for n, t in s.items()} for s in states]
            inputs = tokens[row : row + 1, first:end]
            return forward_loss(model, inputs, inputs, states=rows).logits[0]

        torch.testing.assert_close(got[0], alone(0, 0, T, carried.states))
        torch.testing.assert_close(got[1, :6], alone(1, 0, 6, carried.states))
        torch.testing.assert_close(got[1, 6:], alone(1, 6, T))
        torch.testing.assert_close(got[2, 3:6], alone(2, 3, 6))
        torch.testing.assert_close(got[2, 6:], alone(2, 6, T))
        assert not torch.allclose(got[1, 6:], alone(1, 0, T)[6:])


def test_asking_for_the_initial_state_leaves_the_model_as_it_was(model):
    model.train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    states = initial_states(model)
    assert model.training
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(t.shape[0] == 1 for s in states for t in s.values())


# truncated backpropagation: what is carried is the state that the text before left behind, and no gradient -----------


STEPS, ROWS, LENGTH = 12, 4, 16


@pytest.fixture(scope="module")
def long_text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text", 300_000, document=40)


def frozen(long_text, out, documents, variant):
    """A training whose gradients are nothing, so that every step has the weights of the first."""
    sets = ["data.sampling=tbptt", f"data.documents={documents}", f"model.variant={variant}", "train.accumulate=2"]
    trainer = start(
        settings(long_text, *sets, "train.weight_decay=0", f"train.steps={STEPS}", "train.warmup=0"), out, quiet=True
    )
    trainer.optimizer.step = lambda **_: None
    trainer.model.train(False)
    return trainer


@pytest.mark.parametrize("variant", ["e1", "e88"])
@pytest.mark.parametrize("documents", ["keep", "reset"])
def test_carried_windows_are_one_long_text(documents, variant, long_text, tmp_path):
    trainer = frozen(long_text, tmp_path / "run", documents, variant)
    batches = [trainer.windows.batch(s) for s in range(STEPS)]
    trainer.fit()
    nats = torch.zeros(STEPS * LENGTH)
    resets = 0
    for row in range(ROWS):
        stream = torch.cat([torch.from_numpy(b.tokens[row]).long()[:-1] for b in batches])
        targets = torch.cat([torch.from_numpy(b.tokens[row]).long()[1:] for b in batches])
        fresh = torch.zeros(STEPS * LENGTH, dtype=torch.bool)
        fresh[[i * LENGTH for i, b in enumerate(batches) if b.fresh[row]]] = True
        if documents == "reset":
            fresh |= stream == 0x1E
        starts = [*fresh.nonzero().flatten().tolist(), len(stream)]
        resets += len(starts) - 2
        for first, end in itertools.pairwise(starts):
            with torch.no_grad():
                logits = forward_loss(trainer.model, stream[None, first:end], targets[None, first:end]).logits[0]
            nats[first:end] += torch.nn.functional.cross_entropy(logits, targets[first:end], reduction="none")
    expected = nats.reshape(STEPS, LENGTH).sum(1) / (ROWS * LENGTH)
    assert (resets > 5) == (documents == "reset")
    for line, loss in zip(metrics(tmp_path / "run"), expected.tolist(), strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_state_that_grows_is_not_carried(long_text, tmp_path, monkeypatch):
    monkeypatch.setattr(get_variant("e42").mixer, "state_growth", "per_token")
    with pytest.raises(ConfigError, match="needs a state of constant size"):
        start(settings(long_text, "data.sampling=tbptt"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
