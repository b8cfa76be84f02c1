"""E23: everything a variant promises, and its equation in NumPy."""

from typing import Any, ClassVar

import numpy as np
import torch
from elman_authors.testing import VariantContract, silu, silu_slope
from elman_authors.testing.initial import Normal, orthogonal, wrapper, xavier
from elman_e23.reference import e23_reference

from elman_core import LadderLM
from elman_core.training.optim.optimizer import matrices, undecayed


def softmax(scores):
    e = np.exp(scores - scores.max())
    return e / e.sum()


def scores_gradient(a, ga):
    return a * (ga - a @ ga)


class E23Equation:
    """One step from the equation, and its derivative."""

    def parts(self, p: Any, s: Any, x: Any) -> tuple[Any, ...]:
        k = len(x) ** -0.5
        reads = softmax(s["tape"] @ s["h"] * k)
        h = np.tanh(p["w_x.weight"] @ x + p["w_x.bias"] + p["w_h"] @ s["h"] + reads @ s["tape"])
        return k, reads, h, softmax(s["tape"] @ h * k), p["w_w"] @ h

    def initial_values(self, o: Any) -> Any:
        return wrapper(o) | {
            "w_x.weight": xavier,
            "w_x.bias": 0.0,
            "w_w": xavier,
            "w_h": orthogonal(0.9),
            "tape_0": lambda tape: Normal(0.0, tape.shape[-1] ** -0.5),
        }

    def step(self, o: Any, p: Any, s: Any, x: Any, z: Any) -> Any:
        _, _, h, writes, w = self.parts(p, s, x)
        return h * silu(z), {"h": h, "tape": s["tape"] + np.outer(writes, w) - writes[:, None] * s["tape"]}

    def step_gradient(self, o: Any, p: Any, s: Any, x: Any, z: Any, gy: Any, gs: Any) -> Any:
        k, reads, h, writes, w = self.parts(p, s, x)
        tape, g = s["tape"], gs["tape"]
        gw = writes @ g
        g_write = k * scores_gradient(writes, (g * (w - tape)).sum(1))
        gh = gy * silu(z) + gs["h"] + p["w_w"].T @ gw + g_write @ tape
        g = (1 - writes[:, None]) * g + np.outer(g_write, h)
        da = gh * (1 - h * h)
        g_read = k * scores_gradient(reads, tape @ da)
        g = g + np.outer(reads, da) + np.outer(g_read, s["h"])
        dp = {"w_x.weight": np.outer(da, x), "w_x.bias": da, "w_h": np.outer(da, s["h"]), "w_w": np.outer(gw, h)}
        before = {"h": p["w_h"].T @ da + g_read @ tape, "tape": g}
        return dp, before, p["w_x.weight"].T @ da, gy * h * silu_slope(z)


class TestE23(E23Equation, VariantContract):
    variant = "e23"
    options = ({"slots": 3}, {"slots": 2, "use_conv": True, "mamba2_init": True})


class TestLearnedTape(E23Equation, VariantContract):
    variant = "e23"
    options = ({"slots": 3, "tape_init": "learned"}, {"slots": 2, "tape_init": "learned", "use_conv": True})
    initial: ClassVar = {"tape": "tape_0"}


def test_slots_differ_from_a_learned_tape_alone() -> None:
    torch.manual_seed(0)
    u, w_h, w_w = torch.randn(9, 2, 8), torch.randn(8, 8) / 4, torch.randn(8, 8) / 2
    for tape, differ in ((torch.zeros(3, 8), False), (torch.randn(3, 8), True)):
        _, _, end = e23_reference(u, w_h, w_w, torch.zeros(2, 8), tape.expand(2, 3, 8), tape)
        assert bool((end - end[:, :1]).abs().max() > 1e-3) is differ


def test_a_learned_tape_is_a_state_and_no_map_for_the_optimizers() -> None:
    model = LadderLM("e23", 16, 1, options={"tape_init": "learned"})
    assert "model.layers.0.mixer.tape_0" in undecayed(model) - matrices(model).keys()
