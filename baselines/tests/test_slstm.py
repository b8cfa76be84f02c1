"""sLSTM: all that a variant promises; its recurrence beside the paper's step and, if it is installed, the xlstm package's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from elman_authors.testing import VariantContract, initial
from elman_baselines.rnn.op import slstm, slstm_exp_gates, slstm_gates
from torch import Tensor
from torch.nn.functional import logsigmoid

T, B, W, H, C = 9, 3, 5, 2, 3  # steps, rows, inputs, heads, channels of a head
States = tuple[Tensor, Tensor, Tensor, Tensor]
Step = Callable[[Tensor, States], States]


class TestSLSTM(VariantContract):
    variant = "slstm"
    options = (
        {},
        {"heads": 2, "forget": "exp", "expansion": 1.5, "init": "normal", "norm": False},
        {"heads": 1, "in_proj": False, "zero_out_proj": True},
        {"in_proj": False, "out_proj": False},
    )

    def initial_values(self, o: Any) -> dict[str, Any]:
        normal, columns = o["init"] == "normal", int(self.dim * o["expansion"]) // o["heads"]
        maps = dict.fromkeys(("in_proj.weight", "out_proj.weight"), initial.NORMAL if normal else initial.xavier)
        maps["out_proj.weight"] = 0.0 if o["zero_out_proj"] else maps["out_proj.weight"]
        logit = torch.linspace(5, -7, columns)
        bias = torch.zeros(o["heads"], 4, columns)
        bias[:, 1] = logit if o["forget"] == "sigmoid" else logsigmoid(logit)
        return maps | {
            "weight_ih": initial.NORMAL if normal else initial.blocks(columns),
            "weight_hh": (lambda w: w.unflatten(-2, (-1, columns)), initial.orthogonal(1.0)),
            "bias_ih": bias.flatten(),
            "norm": 1.0,
        }


def paper(forget: Callable[[Tensor], Tensor]) -> Step:
    """Equations 9 to 15 of arXiv:2405.04517 with the stabilised gates of its appendix; raw (B, H, 4, C), log f = forget(f~)."""

    def step(raw: Tensor, states: States) -> States:
        i, f, z, o = raw.unbind(2)
        _, c, n, m = states
        past = torch.where(n == 0, -torch.inf, forget(f) + m)
        new_m = torch.maximum(past, i)
        c, n = (past - new_m).exp() * c + (i - new_m).exp() * z.tanh(), (past - new_m).exp() * n + (i - new_m).exp()
        return o.sigmoid() * c / n, c, n, new_m

    return step


def package(raw: Tensor, states: States) -> States:
    """The step of the xlstm package, which takes all four states as one tensor."""
    from xlstm.blocks.slstm.src.vanilla.slstm import slstm_forward_pointwise

    gates = raw.transpose(1, 2).flatten(1)
    new, _ = slstm_forward_pointwise(gates, gates * 0, gates[:1] * 0, torch.stack(states).flatten(2), {})
    return tuple(s.unflatten(-1, (H, C)) for s in new)  # type: ignore[return-value]


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("name", ["sigmoid", "exp", "package"])
def test_outputs_gradients_and_states_are_those_of_the_published_steps(name: str) -> None:
    """n and m are one pair of all with this n exp(m)."""
    if name == "package":
        pytest.importorskip("xlstm")
    step = {"sigmoid": paper(logsigmoid), "exp": paper(lambda f: f), "package": package}[name]
    x, weights = draw(T, B, W, seed=0), [draw(4 * H * C, n, seed=n) for n in (W, C)] + [draw(4 * H * C, seed=1)]
    start = torch.zeros(T, B, dtype=torch.bool)
    start[4] = name == "package"  # the package begins again if all rows do
    start[5, 1] = start[6, 1] = name != "package"
    w, r, b = weights
    states: Any = (x.new_zeros(B, H, C),) * 4
    outputs = []
    for t in range(T):
        states = tuple(torch.where(start[t, :, None, None], 0.0, s) for s in states)
        recurrent = torch.einsum("bhc,hgec->bhge", states[0], r.unflatten(0, (H, 4, C)))
        states = step((x[t] @ w.T + b).unflatten(-1, (H, 4, C)) + recurrent, states)
        outputs.append(states[0])
    _, c, n, m = states
    expected = [torch.stack(outputs), states[0], c / n, m + n.log()]
    kernel = slstm_exp_gates if name == "exp" else slstm_gates
    y, h, c, n, m = (
        each.unflatten(-1, (H, C)) for each in slstm(kernel, x, weights, [x.new_zeros(B, H * C)] * 4, None, start)
    )
    assert torch.equal(n, torch.ones_like(n))
    gradients = []
    for found in ([y, h, c, m], expected):
        loss = sum((draw(*each.shape, seed=7 + i).detach() * each).sum() for i, each in enumerate(found))
        gradients.append(torch.autograd.grad(loss, [x, *weights]))
    for mine, theirs in zip([y, h, c, m, *gradients[0]], [*expected, *gradients[1]], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_large_logits_neither_overflow_nor_lose_the_past() -> None:
    """Input gates of exp(300) and exp(-300), in float32: c / n is a mean, whatever the scale of its weights."""
    for at in (300.0, -300.0):
        u = torch.zeros(3, 1, 4)
        u[..., 0], u[..., 1], u[0, 0, 2] = at, 30.0, 1.0
        zero = torch.zeros(1, 1)
        y, *_ = slstm_gates(u, torch.zeros(4, 1), None, zero, zero, zero, zero)
        mean = torch.tensor(1.0).tanh() / torch.tensor([1.0, 2.0, 3.0])
        torch.testing.assert_close(y.flatten(), mean / 2)
