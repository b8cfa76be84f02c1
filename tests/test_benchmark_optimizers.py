"""benchmarks/optimizers.py: the optimizers that it times are those that train. Time needs a GPU."""

import json

import optimizers
import pytest
import torch

from elman_core.training.optim import Optimizer
from elman_core.training.settings import TrainSettings


def parameters():
    draw = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((7, 5), (9,))]
    for p in params:
        p.grad = torch.randn(p.shape, generator=draw)
    return params


def updated(name):
    params = parameters()
    made, gradients = optimizers.updates(params)[name], [p.grad.clone() for p in params]
    for _ in range(3):
        for p, gradient in zip(params, gradients, strict=True):
            p.grad.copy_(gradient)  # the package normalises them where they lie
        made.step()
    return params


def test_the_package_and_ours_make_the_same_update_and_adamw_another():
    names = list(optimizers.updates(parameters()))
    assert names == ["adamw", "schedulefree", "schedulefree, the package's"]
    adamw, ours, theirs = map(updated, names)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert not any(torch.equal(a, b) for a, b in zip(adamw, ours, strict=True))


@pytest.mark.parametrize("name", ["adamw", "schedulefree"])
def test_they_are_the_optimizers_of_a_training(name):
    model = torch.nn.Linear(2, 2)
    trained = Optimizer(model, TrainSettings(optimizer=name)).inner
    timed = optimizers.updates(list(model.parameters()))[name]
    assert type(timed) is type(trained)
    assert timed.defaults["betas"] == trained.defaults["betas"]
    for key in ("fused", "eps", "foreach"):
        assert timed.defaults.get(key) == trained.defaults.get(key), key


def test_the_file_holds_every_update_and_the_steps_of_two(tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, "alone", lambda model: [{"model": model, "optimizer": "adamw", "ms": 1.0}])
    monkeypatch.setattr(
        optimizers,
        "step",
        lambda model, name, batch, steps, text: {"of": (model, name, batch, steps, text.stat().st_size)},
    )
    out = tmp_path / "new" / "optimizers.json"
    assert (
        optimizers.main(["--models", "a,b", "--batch", "2", "--steps", "3", "--out", str(out), "--commit", "abc"]) == 0
    )
    written = json.loads(out.read_text())
    assert [r["model"] for r in written["alone"]] == ["a", "b"]
    assert [r["of"][:4] for r in written["step"]] == [
        [m, o, 2, 3] for m in "ab" for o in ("adamw", "schedulefree")
    ]  # fmt: skip
    assert written["commit"] == "abc"
