"""The step as a function: what it updates, what it must leave alone, and what several processes may replace."""

import math

import pytest
import torch
from train_helpers import settings

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


def test_a_weight_is_cast_once_for_all_micro_batches(made):
    def casts(accumulate):
        trainer = made("train.precision=bf16", f"train.accumulate={accumulate}")
        given = windows(trainer, 0)
        with torch.profiler.profile(record_shapes=True) as profile:
            trainer.compute(given, 1e-3)
        shapes = [e.input_shapes[0] for e in profile.events() if e.name == "aten::_to_copy"]
        return shapes.count([256, 16])  # the head, which nothing but autocast touches

    assert casts(4) - casts(1) == 3, "three more gradients of the head come back in float32, and no more casts of it"


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
