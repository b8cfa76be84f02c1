"""The transformer against its equations in NumPy, a whole model against transformers' LLaMA, with gradients; in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elman_authors.testing import VariantContract, initial, silu
from elman_baselines.transformer import Attention, SwiGLU, TransformerConfig
from transformers import LlamaConfig, LlamaForCausalLM

from elman_core.model import LadderCache, LadderForCausalLM, LadderLM
from elman_core.registry import ConfigError
from elman_core.training.run.display import backends

MASK_BT = torch.tensor([[c == "1" for c in row] for row in ("111111", "001111", "101101")])
STARTS_BT = torch.tensor([[c == "1" for c in row] for row in ("000100", "010000", "000011")])


def rotated(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Each pair (x_i, x_{i + K/2}) as a complex number, turned by its angle."""
    real, imaginary = np.split(x, 2)
    turned = (real + 1j * imaginary) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag])


def attention_by_hand(config: TransformerConfig, p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """One document of T real positions, one head and one query after the other."""
    q, k, v = (x @ p[f"{n}_proj.weight"].T for n in "qkv")
    wide, out = config.head_dim, np.zeros_like(q)
    speed = config.rope_theta ** (-2 * np.arange(wide // 2) / wide)
    for h in range(x.shape[1] // wide):
        part = slice(h * wide, (h + 1) * wide)
        for t in range(len(x)):
            query = rotated(q[t, part], t * speed)
            scores = np.array([query @ rotated(k[s, part], s * speed) for s in range(t + 1)]) / math.sqrt(wide)
            weights = np.exp(scores - scores.max())
            out[t, part] = (weights / weights.sum()) @ v[: t + 1, part]
    return out @ p["o_proj.weight"].T


class TestTransformer(VariantContract):
    variant = "transformer"
    options = (
        {"head_dim": 8, "mlp_multiple": 8},
        {"head_dim": 4, "rope_theta": 100.0, "mlp_ratio": 1.5, "mlp_multiple": 5, "init_depth": 3},
    )

    def initial_values(self, o: Any) -> dict[str, Any]:
        last = initial.Normal(0.0, 0.02 / math.sqrt(2 * o["init_depth"] or 1))
        maps = {f"{n}_proj.weight": initial.NORMAL for n in ("q", "k", "v", "gate", "up")}
        return maps | {"o_proj.weight": last, "down_proj.weight": last}

    @pytest.mark.parametrize("pieces", [(6,), (2, 1, 3)])
    def test_attention_follows_its_equations(self, opts: Any, pieces: tuple[int, ...]) -> None:
        mixer, x, state, outputs = self.make(opts), self.input(6), None, []
        with torch.no_grad():
            for given in zip(*(a.split(pieces, 1) for a in (x, MASK_BT, STARTS_BT)), strict=True):
                y, state = mixer(given[0], state, *given[1:])
                outputs.append(y)
        y, weights = torch.cat(outputs, 1), {n: p.detach().numpy() for n, p in mixer.named_parameters()}
        document_BT = STARTS_BT.cumsum(1)
        for b in range(3):
            for number in document_BT[b].unique():
                on = MASK_BT[b] & (document_BT[b] == number)
                expected = attention_by_hand(mixer.config, weights, x[b, on].numpy())
                np.testing.assert_allclose(y[b, on].numpy(), expected, rtol=0, atol=1e-12)
        assert state["position"].tolist() == [[-1, -1, -1, 0, 1, 2], [-1, -1, 0, 1, 2, 3], [-1, -1, -1, -1, -1, 0]]

    def test_swiglu_follows_its_equation(self, opts: Any) -> None:
        mixer, x = self.make(opts, 1), self.input(6)
        gate, up, down = (
            p.detach().numpy() for p in (mixer.gate_proj.weight, mixer.up_proj.weight, mixer.down_proj.weight)
        )
        expected = (silu(x.numpy() @ gate.T) * (x.numpy() @ up.T)) @ down.T
        np.testing.assert_allclose(mixer(x)[0].detach().numpy(), expected, rtol=0, atol=1e-13)

    def test_a_width_that_heads_do_not_fill_is_refused(self) -> None:
        variant = self.declared()
        with pytest.raises(ConfigError, match="nearest width: 640 or 704"):
            variant.check(650, variant.make_config())


def test_the_whole_model_is_transformers_llama() -> None:
    torch.manual_seed(0)
    ours = LadderLM("transformer", dim=16, depth=2, options={"head_dim": 8, "mlp_multiple": 8}).double()
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(
        **shape, vocab_size=256, intermediate_size=48, rms_norm_eps=1e-5, tie_word_embeddings=True,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).double()
    names = {"model.embed_tokens.weight": "model.embed_tokens.weight", "model.norm.weight": "model.norm.weight"}
    for i in range(2):
        a, m = f"model.layers.{2 * i}.", f"model.layers.{2 * i + 1}."
        names |= {f"{a}norm.weight": f"model.layers.{i}.input_layernorm.weight"}
        names |= {f"{m}norm.weight": f"model.layers.{i}.post_attention_layernorm.weight"}
        names |= {f"{a}mixer.{n}_proj.weight": f"model.layers.{i}.self_attn.{n}_proj.weight" for n in "qkvo"}
        names |= {f"{m}mixer.{n}_proj.weight": f"model.layers.{i}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert names.keys() == mine.keys()
    assert set(names.values()) == other.keys()
    with torch.no_grad():
        for name, their_name in names.items():
            mine[name].normal_(std=0.3)
            other[their_name].copy_(mine[name])
    tokens = torch.arange(20).view(2, 10) * 13 % 256
    results = []
    for model in (ours, theirs):
        logits = model(tokens).logits
        loss = logits.square().mean() + logits[..., 3].sum()
        loss.backward()
        results.append(logits.detach())
    # transformers' tables of angles are float32, which is what the limit allows for
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=2e-6 * float(results[1].abs().max()))
    for name, their_name in names.items():
        mine_grad, their_grad = mine[name].grad, other[their_name].grad
        assert mine_grad is not None and their_grad is not None  # noqa: PT018
        torch.testing.assert_close(mine_grad, their_grad, rtol=0, atol=5e-6 * float(their_grad.abs().max()))


def test_init_depth_shrinks_what_writes_to_the_stream() -> None:
    wide = TransformerConfig(init_depth=8)
    torch.manual_seed(0)
    attention, mlp = Attention(128, wide), SwiGLU(128, wide, 1)
    assert math.isclose(float(attention.o_proj.weight.detach().std()), 0.005, rel_tol=0.05)
    assert math.isclose(float(mlp.down_proj.weight.detach().std()), 0.005, rel_tol=0.05)
    assert math.isclose(float(attention.q_proj.weight.detach().std()), 0.02, rel_tol=0.05)


def build() -> LadderForCausalLM:
    torch.manual_seed(0)
    model = LadderLM(["gru", "transformer"], dim=16, depth=2, options=[None, {"head_dim": 8, "mlp_multiple": 8}])
    return model.double().eval()


def test_branches_keep_their_order_behind_a_layer_of_one_branch() -> None:
    kinds = [type(block.mixer).__name__ for block in build().model.layers]
    assert kinds == ["GRUMixer", "Attention", "SwiGLU"]


def test_tokens_are_taken_back_exactly() -> None:
    model, tokens = build(), torch.arange(24).view(2, 12) * 7 % 256
    cache = LadderCache(num_blocks=3)
    with torch.no_grad():
        model(tokens[:, :5], past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            layer.activate_past_recording()
        model(tokens[:, 5:9] + 1, past_key_values=cache, use_cache=True)
        cache.crop(-3)
        assert cache.states[1] is not None
        assert cache.states[1]["k"].shape[1] == 6
        out = model(tokens[:, 6:], past_key_values=cache, use_cache=True).logits
        whole = model(torch.cat([tokens[:, :5], tokens[:, 5:6] + 1, tokens[:, 6:]], 1)).logits[:, 6:]
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-12)


def test_a_state_without_entries_is_the_initial_one() -> None:
    torch.manual_seed(0)
    attention = Attention(16, TransformerConfig(head_dim=8)).double()
    x = torch.randn(3, 6, 16, dtype=torch.float64)
    empty = {name: entries[:, :0] for name, entries in attention(x)[1].items()}
    for given in ((None, None), (MASK_BT, None), (MASK_BT, STARTS_BT)):
        (y, end), (wanted, expected) = (attention(x, state, *given) for state in (empty, None))
        torch.testing.assert_close(y, wanted, rtol=0, atol=1e-12)
        assert all(torch.equal(end[name], expected[name]) for name in expected)


def test_a_saved_state_goes_on(tmp_path: Path) -> None:
    model, tokens = build(), torch.arange(12).view(1, 12) * 7 % 256
    cache = LadderCache(num_blocks=3)
    with torch.no_grad():
        model(tokens[:, :7], past_key_values=cache, use_cache=True)
        cache.save(tmp_path / "state")
        loaded = LadderCache.load(tmp_path / "state", model.config)
        out = model(tokens[:, 7:], past_key_values=loaded, use_cache=True).logits
        torch.testing.assert_close(out, model(tokens).logits[:, 7:], rtol=0, atol=1e-12)


def test_a_run_says_what_attends_and_nothing_of_the_branches_between():
    model = LadderLM("transformer", dim=64, depth=6)
    assert backends(model) == ["layers 0, 2, … 10 Attention: sdpa"]
