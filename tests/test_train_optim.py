"""Optimizers: what decays, what is saved, and that looking at averaged weights changes nothing."""

import itertools

import pytest
import torch
from torch import nn

from elman_core.registry import Mixer
from elman_core.training.optim.muon import orthogonal
from elman_core.training.optim.optimizer import Optimizer, matrices, undecayed
from elman_core.training.optim.schedule import Schedule
from elman_core.training.settings import TrainSettings


class Toy(Mixer):
    no_decay = ("memory",)

    def __init__(self):
        super().__init__(4, None)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.pair = nn.Parameter(torch.randn(6, 4))
        self.heads = nn.Parameter(torch.randn(3, 4, 2))
        self.conv = nn.Parameter(torch.randn(3, 1, 4))
        self.memory = nn.Parameter(torch.randn(4, 4))
        self.A_log = nn.Parameter(torch.randn(2, 4))
        self.dt_bias = nn.Parameter(torch.randn(4))
        self.norm = nn.LayerNorm(4)

    def stacked(self):
        return {"pair": (4, 2)}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Toy())


def train(made, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in made.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.set_lr(0.01)
        optimizer.step()


def test_vectors_decay_rates_and_what_a_mixer_names_do_not_decay():
    made = model()
    alone = {"0.bias", "1.memory", "1.A_log", "1.dt_bias", "1.norm.weight", "1.norm.bias"}
    assert undecayed(made) == alone
    before = {n: p.detach().clone() for n, p in made.named_parameters()}
    optimizer = Optimizer(made, TrainSettings(weight_decay=0.5))
    for p in made.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.set_lr(0.1)
    optimizer.step()
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
    assert matrices(one) == {"1.weight": (4,), "1.pair": (4, 2), "1.heads": (4,)}
    apart = [two[1].weight, *(nn.Parameter(w) for w in (*two[1].pair.detach().split((4, 2)), *two[1].heads.detach()))]
    theirs = torch.optim.Muon(apart, lr=0.01, momentum=0.8, weight_decay=0.5, adjust_lr_fn="match_rms_adamw")
    train(one, Optimizer(one, settings), 3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for p in two.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        for p, grad in zip(apart[1:], (*two[1].pair.grad.split((4, 2)), *two[1].heads.grad), strict=True):
            p.grad = grad
        theirs.step()
    torch.testing.assert_close(one[1].weight, two[1].weight)
    torch.testing.assert_close(one[1].pair, torch.cat(apart[1:3]))
    torch.testing.assert_close(one[1].heads, torch.stack(apart[3:]))
    three = model()
    train(three, Optimizer(three, TrainSettings(weight_decay=0.5, beta1=0.8, beta2=0.9)), 3)
    for name, p in three.named_parameters():
        assert torch.equal(p, one.get_parameter(name)) == (name not in ("1.weight", "1.pair", "1.heads"))


@pytest.mark.parametrize("shape", [(2, 24, 8), (3, 8, 24)])
def test_an_orthogonal_matrix_has_singular_values_near_one(shape):
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)).float())
    assert 0.5 < values.min() < values.max() < 1.5


def test_evaluation_weights_of_schedule_free_are_its_average():
    one, two = model(), model()
    settings = TrainSettings(optimizer="schedulefree", weight_decay=0.0)
    ours, theirs = Optimizer(one, settings), Optimizer(two, settings)
    train(one, ours, 6)
    train(two, theirs, 6)
    theirs.inner.eval()  # type: ignore[attr-defined]  # the package's own switch, in place
    with ours.evaluation_weights():
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(p, q)
            assert p.requires_grad


def test_looking_at_evaluation_weights_changes_no_bit_and_no_address():
    made = model()
    optimizer = Optimizer(made, TrainSettings(optimizer="schedulefree"))
    train(made, optimizer, 3)
    before = [(p.data_ptr(), p.detach().clone()) for p in made.parameters()]
    with optimizer.evaluation_weights():
        assert any(not torch.equal(p, kept) for p, (_, kept) in zip(made.parameters(), before, strict=True))
    for p, (address, kept) in zip(made.parameters(), before, strict=True):
        assert p.data_ptr() == address
        assert torch.equal(p, kept)


# schedules at their ends, and that they are functions of the step alone ----------------------------------------------


def factors(**kwargs):
    schedule = Schedule(**kwargs)
    return [schedule.factor(step) for step in range(schedule.horizon)]


def test_cosine_reaches_the_peak_after_warmup_and_the_end_in_the_last_step():
    made = factors(kind="cosine", warmup=10, horizon=100, final=0.1)
    assert made[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert made[10] == 1
    assert made[99] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(made[10:]))
    assert made[10 + 89 // 2] == pytest.approx((1 + 0.1) / 2, abs=0.01)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warmup_zero_starts_at_the_peak(kind):
    made = factors(kind=kind, warmup=0, horizon=50, final=0.2)
    assert made[0] == 1
    assert made[-1] == pytest.approx(1 if kind == "constant" else 0.2)


def test_wsd_is_flat_then_falls_linearly():
    made = factors(kind="wsd", warmup=5, horizon=101, final=0.0, decay=0.2)
    assert made[5:81] == [1] * 76
    assert made[90] == pytest.approx(0.5)
    assert made[100] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("warmup", "horizon"), [(0, 1), (1, 1), (5, 3), (3, 3), (0, 2)])
@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_short_horizons_and_long_warmups_are_finite_and_in_range(kind, warmup, horizon):
    schedule = Schedule(kind, warmup, horizon, 0.1)
    assert all(0 < schedule.factor(s) <= 1 for s in range(horizon + 3))


def test_under_a_time_budget_wsd_follows_the_fraction_of_the_time():
    schedule = Schedule("wsd", 3, None, 0.1, 0.25)
    assert [schedule.factor(s, 0.0) for s in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])
    assert schedule.factor(50, 0.75) == pytest.approx(1)
    assert schedule.factor(50, 0.875) == pytest.approx(0.55)
    assert schedule.factor(50, 1.0) == schedule.factor(50, 1.7) == pytest.approx(0.1)


def test_under_a_time_budget_warm_up_takes_a_tenth_of_the_time_at_most():
    slow = Schedule("wsd", 100, None)
    assert [slow.factor(s, f) for s, f in ((0, 0.0), (5, 0.05), (9, 0.1), (50, 0.5))] == pytest.approx(
        [0.01, 0.5, 1, 1]
    )
