"""Optimizers: what decays, what is saved, and that looking at averaged weights changes nothing."""

import pytest
import torch
from torch import nn

from elman_core.registry import Mixer
from elman_core.training.muon import orthogonal
from elman_core.training.optim import Optimizer, matrices, undecayed
from elman_core.training.settings import TrainSettings


class Toy(Mixer):
    no_decay = ("memory",)

    def __init__(self):
        super().__init__(4, None)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.memory = nn.Parameter(torch.randn(4, 4))
        self.A_log = nn.Parameter(torch.randn(2, 4))
        self.dt_bias = nn.Parameter(torch.randn(4))
        self.norm = nn.LayerNorm(4)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Toy())


def train(made, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in made.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step(0.01)


def test_vectors_decay_rates_and_what_a_mixer_names_do_not_decay():
    made = model()
    alone = {"0.bias", "1.memory", "1.A_log", "1.dt_bias", "1.norm.weight", "1.norm.bias"}
    assert undecayed(made) == alone
    before = {n: p.detach().clone() for n, p in made.named_parameters()}
    optimizer = Optimizer(made, TrainSettings(weight_decay=0.5))
    for p in made.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(0.1)
    for name, p in made.named_parameters():
        expected = before[name] if name in alone else before[name] * (1 - 0.1 * 0.5)
        torch.testing.assert_close(p.detach(), expected)


def test_adamw_is_torchs_adamw():
    one, two = model(), model()
    ours = Optimizer(one, TrainSettings(weight_decay=0.0, beta1=0.8, beta2=0.9))
    theirs = torch.optim.AdamW(two.parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.0, foreach=False)
    generator = torch.Generator().manual_seed(0)
    train(one, ours, 5)
    for _ in range(5):
        for p in two.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        theirs.step()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_muon_is_torchs_muon_on_the_matrices_of_mixers_and_adamw_on_the_rest():
    settings = TrainSettings(optimizer="muon", weight_decay=0.5, beta1=0.8, beta2=0.9)
    one, two = model(), model()
    assert matrices(one) == {"1.weight"}
    theirs = torch.optim.Muon([two[1].weight], lr=0.01, momentum=0.8, weight_decay=0.5, adjust_lr_fn="match_rms_adamw")
    train(one, Optimizer(one, settings), 3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for p in two.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        theirs.step()
    torch.testing.assert_close(one[1].weight, two[1].weight)
    three = model()
    train(three, Optimizer(three, TrainSettings(weight_decay=0.5, beta1=0.8, beta2=0.9)), 3)
    for name, p in three.named_parameters():
        assert torch.equal(p, one.get_parameter(name)) == (name != "1.weight")


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_an_orthogonal_matrix_has_singular_values_near_one(shape):
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)).float())
    assert 0.5 < values.min() < values.max() < 1.5


def test_evaluation_weights_of_schedule_free_are_its_average():
    one, two = model(), model()
    settings = TrainSettings(optimizer="schedulefree", weight_decay=0.0)
    ours, theirs = Optimizer(one, settings), Optimizer(two, settings)
    train(one, ours, 6)
    train(two, theirs, 6)
    theirs.inner.eval()  # the package's own switch, in place
    with ours.evaluation_weights():
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(p, q)
            assert p.requires_grad
