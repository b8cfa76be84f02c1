"""mLSTM: all that a variant promises; its recurrence beside the paper's step and, if it is installed, the xlstm package's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from elman_authors.testing import VariantContract, initial
from elman_baselines.mlstm import mlstm
from torch import Tensor
from torch.nn.functional import logsigmoid

from elman_core.registry import resolve

B, T, H, N, V = 2, 9, 2, 4, 4
States = tuple[Tensor, Tensor, Tensor]
Step = Callable[..., tuple[Tensor, States]]


class TestMLSTM(VariantContract):
    variant = "mlstm"
    options = ({"head_dim": 8, "key_dim": 4}, {"n_heads": 3, "head_dim": 12, "key_dim": 8, "gate_cap": 4.0})

    def initial_values(self, o: Any) -> dict[str, Any]:
        maps = dict.fromkeys((f"{name}_proj.weight" for name in ("q", "k", "v", "o", "out")), initial.NORMAL)
        heads = o["n_heads"] or self.dim // o["head_dim"]
        gates = {
            "i_proj.weight": 0.0,
            "f_proj.weight": 0.0,
            "i_proj.bias": -10.0,
            "f_proj.bias": torch.linspace(3, 6, heads),
        }
        return maps | gates | {"norm": 1.0}


def paper(
    c: Tensor, n: Tensor, m: Tensor, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor
) -> tuple[Tensor, States]:
    """One step of every row and head; the stabiliser is differentiated like everything else."""
    new = torch.maximum(logsigmoid(f) + m, i)
    keep, write = (logsigmoid(f) + m - new).exp(), (i - new).exp()
    c = keep[..., None, None] * c + write[..., None, None] * k[..., None] * v[..., None, :]
    n, q = keep[..., None] * n + write[..., None] * k, q / N**0.5
    h = (q[..., None, :] @ c)[..., 0, :] / torch.maximum((q * n).sum(-1).abs(), (-new).exp())[..., None]
    return h, (c, n, new)


def package(c: Tensor, n: Tensor, m: Tensor, *inputs: Tensor) -> tuple[Tensor, States]:
    """The xlstm package's step, which scales k instead of q."""
    from xlstm.blocks.mlstm.backends import recurrent_step_stabilized_simple

    q, k, v, i, f = inputs
    rows, gates = (x[:, :, None].clone() for x in (q, k, v)), (x[..., None, None] for x in (i, f))
    h, (c, n, m) = recurrent_step_stabilized_simple(
        c / N**0.5, n[..., None] / N**0.5, m[..., None, None], *rows, *gates, eps=0
    )
    return h[:, :, 0], (c * N**0.5, n[..., 0] * N**0.5, m[..., 0, 0])


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("step", [paper, package])
def test_outputs_gradients_and_states_are_those_of_the_published_steps(step: Step) -> None:
    if step is package:
        pytest.importorskip("xlstm")
    inputs = [draw(B, T, H, *wide, seed=seed) for seed, wide in enumerate(((N,), (N,), (V,), (), ()))]
    given = draw(B, H, N, V, seed=5), draw(B, H, N, seed=6), draw(B, H, seed=7)
    starts_BT = torch.zeros(B, T, dtype=torch.bool)
    starts_BT[1, 4:6] = True
    states, outputs = given, []
    for t in range(T):
        begins = starts_BT[:, t, None]
        c, n, m = states
        states = (
            torch.where(begins[..., None, None], 0, c),
            torch.where(begins[..., None], 0, n),
            torch.where(begins, 0, m),
        )
        y, states = step(*states, *(x[:, t] for x in inputs))
        outputs.append(y)
    q, k, v, i, f = inputs
    y, end = mlstm(q, k, v, i, logsigmoid(f), given, None, starts_BT)
    found, leaves = [], [*inputs, *given]
    for results in ([y, *end], [torch.stack(outputs, 1), *states]):
        loss = sum((draw(*each.shape, seed=20 + s).detach() * each).sum() for s, each in enumerate(results))
        found.append([*results, *torch.autograd.grad(loss, leaves)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_a_fresh_layer_is_that_of_transformers() -> None:
    xlstm = pytest.importorskip("transformers.models.xlstm.modeling_xlstm")
    kernels = {"chunkwise_kernel": "chunkwise--native_autograd", "sequence_kernel": "native_sequence__native"}
    config = xlstm.xLSTMConfig(
        hidden_size=16, num_heads=2, num_hidden_layers=1, vocab_size=8, mode="train", chunk_size=T, **kernels,
        step_kernel="native", autocast_kernel_dtype="float32",
    )  # fmt: skip
    theirs, found = xlstm.xLSTMLayer(config), resolve("mlstm", {"head_dim": 8, "key_dim": 4})
    ours = found.variant.branch(0)(16, found.config)
    names = {"ogate_preact": "o", "igate_preact": "i", "fgate_preact": "f", "out_proj": "out"}
    for name in ("q", "k", "v", *names):
        getattr(theirs, name).load_state_dict(getattr(ours, f"{names.get(name, name)}_proj").state_dict())
    x_BTD = torch.randn(B, T, 16)
    torch.testing.assert_close(ours(x_BTD)[0], theirs(x_BTD)[0], rtol=1e-3, atol=1e-7)
