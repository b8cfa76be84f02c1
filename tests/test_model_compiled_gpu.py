"""`torch.compile` of a whole model on a GPU: one graph, the kernels in it, and the loss and gradients of the eager model."""

from __future__ import annotations

import pytest
import torch

from elman_core.model import LadderConfig, LadderForCausalLM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("precision", ["float32", "bfloat16 autocast"])
@pytest.mark.parametrize("variant", ["e1", "e42", "e88:h8n32"])
def test_a_whole_model_is_one_graph_with_the_gradients_of_the_eager_one(variant, precision, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = LadderForCausalLM(LadderConfig(variant=variant, hidden_size=256, num_hidden_layers=2)).cuda().train()
    tokens_BT = torch.randint(256, (4, 64), device="cuda")

    def gradients(forward):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision != "float32"):
            loss = forward(input_ids=tokens_BT, labels=tokens_BT).loss
        loss.backward()
        return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    gradients(model.forward)  # the power iteration of a spectral norm has begun
    began = {n: b.clone() for n, b in model.named_buffers()}
    loss, eager = gradients(model.forward)
    for name, buffer in model.named_buffers():  # and goes on at every forward
        buffer.copy_(began[name])
    compiled_loss, compiled = gradients(torch.compile(model.forward, fullgraph=True, dynamic=False))
    limit = 1e-4 if precision == "float32" else 3e-2
    assert compiled_loss.item() == pytest.approx(loss.item(), rel=limit)
    assert compiled.keys() == eager.keys()
    for name, gradient in eager.items():
        gap = (compiled[name] - gradient).norm() / gradient.norm().clamp(min=1e-8)
        assert gap < limit, f"{name}: {gap:.2e}"
