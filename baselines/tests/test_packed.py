"""Packed rows on a GPU, in the kernels of the libraries: no further from float64 than each document in a row of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from elman_baselines.transformer.attention import block_mask

from elman_core import LadderConfig, LadderForCausalLM

VARIANTS = {
    "gdn": {"head_dim": 128}, "kda": {}, "gdn2": {}, "rwkv7": {}, "mamba2": {}, "mamba3": {}, "transformer": {}, "lstm": {},
    "gru": {},
}  # fmt: skip


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
def test_packed_rows_err_as_single_rows(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty cache most of its time is compilers: nvcc for `lstm` and `gru`, Triton, which also tunes, for others. So
    its calls have three lengths and one number of rows, and no first use is verified beside it."""
    monkeypatch.setenv("ELMAN_VERIFY", "skip")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "options": VARIANTS[variant]}
    model = LadderForCausalLM(LadderConfig(variant=variant, **sizes)).eval().cuda()
    for weight in model.parameters():
        if not weight.any():  # behind it all gradients would be zero
            torch.nn.init.normal_(weight, std=0.02)
    tokens_BT = torch.randint(256, (2, 512), device="cuda")
    starts_BT = torch.zeros(2, 512, dtype=torch.bool, device="cuda")
    starts_BT[0, 128] = starts_BT[1, [0, 384]] = True
    short_BT = torch.stack((tokens_BT[0, :128], tokens_BT[1, 384:]))
    long_BT = torch.stack((tokens_BT[0, 128:], tokens_BT[1, :384]))

    def made(model, packed: bool) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
        if packed:
            y_BTD = model.model(tokens_BT, starts=starts_BT).last_hidden_state
        else:
            short_BTD, long_BTD = (model.model(x_BT).last_hidden_state for x_BT in (short_BT, long_BT))
            y_BTD = torch.stack((torch.cat((short_BTD[0], long_BTD[0])), torch.cat((long_BTD[1], short_BTD[1]))))
        weights = [p for n, p in model.named_parameters() if "lm_head" not in n]
        return [x.double() for x in (y_BTD.detach(), *torch.autograd.grad(y_BTD.double().square().sum() / 2, weights))]

    truth = made(copy.deepcopy(model).double(), packed=False)

    def errors(packed: bool) -> list[float]:
        with torch.autocast("cuda", torch.bfloat16):
            found = made(model, packed)
        return [((x - y).norm() / y.norm()).item() for x, y in zip(found, truth, strict=True)]

    for alone, packed in zip(errors(packed=False), errors(packed=True), strict=True):
        assert packed <= 2 * alone + 8 * 2**-8
