"""`torch.compile` of a whole model on a GPU: one graph, the kernels in it, and the loss and gradients of the eager model."""

from __future__ import annotations

import pytest
import torch

from elman_core.model import LadderConfig, LadderForCausalLM

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["float32", "bfloat16 autocast"])
@pytest.mark.parametrize("variant", ["e1", "e42", "e88:h8n32"])
def test_a_whole_model_is_one_graph_with_the_gradients_of_the_eager_one(variant, precision, monkeypatch):
    """In bfloat16 compiled code rounds elsewhere: it may be as far from float32 as twice the eager model, and 4 eps."""
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = LadderForCausalLM(LadderConfig(variant=variant, hidden_size=256, num_hidden_layers=2)).cuda().train()
    tokens_BT = torch.randint(256, (4, 64), device="cuda")
    narrow = precision != "float32"
    began: dict[str, torch.Tensor] = {}

    def gradients(forward, autocast=narrow):
        for name, buffer in model.named_buffers():  # the power iteration of a spectral norm goes on at every forward
            buffer.copy_(began.get(name, buffer))
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = forward(input_ids=tokens_BT, labels=tokens_BT).loss
        loss.backward()
        return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}

    gradients(model.forward)  # it has begun now
    began |= {n: b.clone() for n, b in model.named_buffers()}
    truth, eager = gradients(model.forward, autocast=False), gradients(model.forward)
    compiled = gradients(torch.compile(model.forward, fullgraph=True, dynamic=False))
    assert compiled.keys() == eager.keys() == truth.keys()

    def gap(made, name):
        return ((made[name] - truth[name]).norm() / truth[name].norm().clamp(min=1e-8)).item()

    gaps = {
        n: (gap(compiled, n), 2 * gap(eager, n) + 4 * torch.finfo(torch.bfloat16).eps if narrow else 1e-4)
        for n in truth
    }
    assert not {n: f"{far:.2e} > {limit:.2e}" for n, (far, limit) in gaps.items() if not far <= limit}
    if narrow:
        assert max(gap(eager, n) for n in truth) > 1e-4, "nothing was rounded"
