"""Packed rows on a GPU, in the kernels of the libraries: no further from float64 than each document in a row of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from elman_baselines.transformer.attention import block_mask

from elman_core import LadderConfig, LadderForCausalLM

VARIANTS = {"gdn": {"head_dim": 128}, "mamba2": {}, "transformer": {}, "lstm": {}, "gru": {}}


@pytest.mark.parametrize("steps", [512, 300])
def test_attention_visits_the_blocks_that_hold_something_to_see(steps: int) -> None:
    starts_BT = torch.rand(3, steps, generator=torch.Generator().manual_seed(0)) < 0.01
    starts_BT[1], starts_BT[2, 200:205] = False, True
    number_BT = starts_BT.cumsum(1)
    seen_BTT = (number_BT[:, None, :] == number_BT[:, :, None]) & torch.ones(steps, steps, dtype=torch.bool).tril()
    blocks = -(-steps // 128)
    padded = torch.nn.functional.pad(seen_BTT, (0, 128 * blocks - steps) * 2)
    expected = padded.unflatten(2, (blocks, 128)).unflatten(1, (blocks, 128)).any(4).any(2)
    assert torch.equal(block_mask(starts_BT).to_dense()[:, 0].bool(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_rows_err_as_single_rows(variant: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "options": VARIANTS[variant]}
    model = LadderForCausalLM(LadderConfig(variant=variant, **sizes)).eval().cuda()
    tokens_BT = torch.randint(256, (2, 512), device="cuda")
    starts_BT = torch.zeros(2, 512, dtype=torch.bool, device="cuda")
    starts_BT[0, [128, 384]] = starts_BT[1, [0, 128]] = True
    pieces = [(0, 0, 128), (0, 128, 384), (0, 384, 512), (1, 0, 128), (1, 128, 512)]

    def made(model, packed: bool) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
        if packed:
            y_BTD = model.model(tokens_BT, starts=starts_BT).last_hidden_state
        else:
            alone = [model.model(tokens_BT[r : r + 1, a:b]).last_hidden_state[0] for r, a, b in pieces]
            y_BTD = torch.stack([torch.cat(alone[:3]), torch.cat(alone[3:])])
        weights = [p for n, p in model.named_parameters() if "lm_head" not in n]
        return [x.double() for x in (y_BTD.detach(), *torch.autograd.grad(y_BTD.double().square().sum() / 2, weights))]

    truth = made(copy.deepcopy(model).double(), packed=False)

    def errors(packed: bool) -> list[float]:
        with torch.autocast("cuda", torch.bfloat16):
            found = made(model, packed)
        return [((x - y).norm() / y.norm()).item() for x, y in zip(found, truth, strict=True)]

    for alone, packed in zip(errors(packed=False), errors(packed=True), strict=True):
        assert packed <= 2 * alone + 8 * 2**-8
