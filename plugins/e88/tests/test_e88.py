"""E88: everything a variant promises, and its equation in NumPy under every option and every pair of options."""

import random

import pytest
import torch
from elman_authors.testing import VariantContract, initial
from elman_e88.mixer import E88Mixer

from elman_core.nn import MatrixConfig

from .oracle import Row

SMALL = {"n_heads": 4, "n_state": 8}
PLAIN = {**SMALL, "use_gate": False, "use_output_norm": False}
CHOICES = {
    "expansion": (1.0, 2.0),
    "n_state": (4, 8),
    "n_heads": (1, 3),
    "use_conv": (False, True),
    "d_conv": (4, 2),
    "use_gate": (False, True),
    "gate_activation": ("sigmoid", "silu"),
    "use_silu": (False, True),
    "l2_norm": (False, True),
    "decay": ("mamba", "simple", "constant", "none"),
    "use_write_gate": (False, True),
    "write_scale": (1.0, 2.0),
    "value_residual": (False, True),
    "tie_kv": (False, True),
    "linear_state": (False, True),
    "use_output_norm": (False, True),
    "output_norm_eps": (1e-5, 0.01),
    "head_mix": ("concat", "weighted_sum", "per_head", "input_weighted", "sum"),
}
MAPS = ("qkv_proj", "a_proj", "beta_proj", "g_proj", "head_attn", "o_proj")
IMPOSSIBLE = {("expansion", 2.0, "tie_kv", True), ("use_write_gate", False, "write_scale", 2.0)}


def pairs(options):
    return {(a, options[a], b, options[b]) for a in CHOICES for b in CHOICES if a < b}


def combinations():
    """Random sets of options, the same every time, until every possible pair of choices has occurred."""
    draw, found, seen = random.Random(0), [], set(IMPOSSIBLE)
    wanted = {(a, x, b, y) for a in CHOICES for b in CHOICES if a < b for x in CHOICES[a] for y in CHOICES[b]}
    while wanted - seen:
        tries = [{name: draw.choice(values) for name, values in CHOICES.items()} for _ in range(50)]
        found.append(max((o for o in tries if not IMPOSSIBLE & pairs(o)), key=lambda o: len(pairs(o) - seen)))
        seen |= pairs(found[-1])
    return found


class TestE88(VariantContract):
    variant = "e88"
    options = (
        SMALL,
        PLAIN,
        {
            **SMALL,
            "use_conv": True,
            "d_conv": 7,
            "expansion": 2.0,
            "use_write_gate": True,
            "value_residual": True,
            "decay": "simple",
        },
        {**PLAIN, "use_conv": True, "tie_kv": True, "decay": "constant", "head_mix": "weighted_sum"},
        {**PLAIN, "linear_state": True, "decay": "none", "head_mix": "input_weighted"},
        {**SMALL, "l2_norm": False, "gate_activation": "silu", "head_mix": "sum"},
    )
    equations = (*combinations(), *({**SMALL, "use_write_gate": True, "init": init} for init in ("normal", "zero")))
    row = Row

    def initial_values(self, o):
        keys, normal = o["n_heads"] * o["n_state"], o["init"] != "xavier"
        maps = {f"{n}.weight": initial.NORMAL if normal else initial.xavier for n in MAPS}
        maps["write_gate_proj.weight"] = initial.NORMAL if normal else initial.linear
        if o["tie_kv"] and not normal:
            maps["qkv_proj.weight"] = initial.blocks(keys)
        if o["head_mix"] == "per_head" and not normal:
            maps["o_proj.weight"] = (lambda w: w.unflatten(-1, (o["n_heads"], -1)).movedim(-2, 1), initial.xavier)
        if o["init"] == "zero":
            maps["o_proj.weight"] = 0.0
        return (
            maps
            | initial.decays()
            | {
                "conv.weight": initial.NORMAL if normal else initial.linear,
                "o_norm.weight": 1.0,
                "decay_logit": 4.0,
                "value_residual": 1.0,
                "head_weights": 1 / o["n_heads"],
            }
        )


@pytest.mark.parametrize("init", ["normal", "zero"])
def test_initial_weights(init):
    torch.manual_seed(0)
    mixer = E88Mixer(64, MatrixConfig(**SMALL, use_conv=True, init=init))
    drawn = {n: p.std().item() for n, p in mixer.named_parameters() if p.ndim > 1}
    wanted = {n: 0.0 if init == "zero" and n == "o_proj.weight" else pytest.approx(0.02, rel=0.1) for n in drawn}
    assert drawn == wanted


@pytest.mark.parametrize("decay", ["mamba", "none"])
def test_erasing_never_makes_a_linear_state_grow(decay):
    """Values are zero, so that a step only multiplies S along k by decay - write."""
    options = {**SMALL, "linear_state": True, "use_write_gate": True, "write_scale": 2.0, "decay": decay}
    mixer = E88Mixer(16, MatrixConfig(**options)).double()
    x = torch.randn(16, dtype=torch.float64)
    with torch.no_grad():
        mixer.qkv_proj.weight[2 * mixer.config.keys :] = 0
        mixer.write_gate_proj.weight.copy_(x)  # the gate is open, and the key always the same
        start = torch.randn(1, 4, 8, 8, dtype=torch.float64)
        _, end = mixer(x.expand(1, 400, 16), {"S": start})
    assert end["S"].norm() <= start.norm() * (1 + 1e-9)
