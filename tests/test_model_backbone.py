"""The backbone against the equations written out, its loss, masks and states."""

import pytest
import torch
import torch.nn.functional as F
import toy_mixers

from elman_core.model import LadderConfig, LadderForCausalLM, LadderLM, add_rms_norm
from elman_core.registry import ConfigError

TOKENS = torch.arange(22).view(2, 11) * 23 % 256

toys = toy_mixers.toys  # for every test here


def ladder(variant="toy", dtype=torch.float64, **backbone):
    return LadderLM(variant, dim=16, depth=3, **backbone).to(dtype).eval()


def rms(x, weight, eps=1e-5):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("variant", ["toy", "toysum", "toypair"])
def test_the_backbone_is_the_prenorm_residual_network(variant):
    model = ladder(variant)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        stream = model.model.embed_tokens.weight[TOKENS]
        for block in model.model.layers:
            stream = stream + block.mixer(rms(stream, block.norm.weight))[0]
        expected = rms(stream, model.model.norm.weight) @ model.model.embed_tokens.weight.T
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-12, atol=1e-12)


def test_the_stream_is_float32_whatever_the_weights():
    x, residual, weight = torch.randn(2, 8).bfloat16(), torch.randn(2, 8), torch.ones(8).bfloat16()
    normed, stream = add_rms_norm(x, residual, weight, 1e-5)
    assert (normed.dtype, stream.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(stream, residual + x.float())


def test_mixers_compute_in_the_autocast_dtype_and_the_stream_does_not():
    model, seen = ladder(dtype=torch.float32), []
    block = model.model.layers[1]
    block.register_forward_pre_hook(lambda _, args: seen.append(("stream", args[1].dtype)))
    block.mixer.register_forward_pre_hook(lambda _, args: seen.append(("mixer", args[0].dtype)))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(TOKENS)
    assert seen == [("stream", torch.float32), ("mixer", torch.bfloat16)]


def test_embeddings_are_small_and_gains_are_one():
    model = LadderLM("toy", dim=64, depth=1)
    assert 0.019 < model.model.embed_tokens.weight.std() < 0.021
    assert model.model.norm.weight.unique().tolist() == [1.0]
    assert model.lm_head.weight is model.model.embed_tokens.weight


# loss -----------------------------------------------------------------------------------------------------------------


def test_return_loss_is_the_mean_cross_entropy_of_the_next_tokens():
    model = ladder(dtype=torch.float32)
    loss = model(TOKENS, return_loss=True)
    logits = model(TOKENS[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model(TOKENS, labels=TOKENS).loss, expected)


def test_num_items_in_batch_divides_the_sum():
    model = ladder(dtype=torch.float32)
    mean, summed = (
        model(TOKENS, labels=TOKENS).loss,
        model(TOKENS, labels=TOKENS, num_items_in_batch=torch.tensor(7)).loss,
    )
    torch.testing.assert_close(summed, mean * 20 / 7)


def test_logits_to_keep_keeps_the_last_or_the_named_positions():
    model = ladder()
    full = model(TOKENS).logits
    for keep, expected in ((2, full[:, -2:]), (torch.tensor([1, 4]), full[:, [1, 4]])):
        torch.testing.assert_close(model(TOKENS, logits_to_keep=keep).logits, expected, rtol=1e-13, atol=1e-13)
    padded = torch.ones(TOKENS.shape)
    padded[0, -2:] = 0  # what is real may be any number but 0
    for mask in (padded, padded.bool(), padded * 3, -padded, padded / 2):
        kept = model(TOKENS, attention_mask=mask, logits_to_keep=1).logits[:, 0]
        torch.testing.assert_close(kept, torch.stack([full[0, -3], *full[1:, -1]]), rtol=1e-13, atol=1e-13)


def test_hidden_states_are_the_stream_before_each_layer_and_the_final_norm():
    model = ladder("toypair")
    out = model.model(TOKENS, output_hidden_states=True)
    assert len(out.hidden_states) == 4
    assert torch.equal(out.hidden_states[0], model.model.embed_tokens(TOKENS))
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    again = model.model(inputs_embeds=out.hidden_states[0]).last_hidden_state
    assert torch.equal(again, out.last_hidden_state)


# states and masks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["toy", "toysum", "toypair"])
@pytest.mark.parametrize("pattern", ["left", "right", "holes"])
def test_masked_positions_do_not_exist(variant, pattern):
    model = ladder(variant)
    mask = torch.ones(2, 11, dtype=torch.long)
    if pattern == "holes":
        mask[0, [2, 3, 6]] = mask[1, [0, 9]] = 0
    else:
        mask[0, slice(0, 4) if pattern == "left" else slice(7, 11)] = 0
    out = model(TOKENS, attention_mask=mask).logits
    for row in range(2):
        real = mask[row].bool()
        alone = model(TOKENS[row : row + 1, real]).logits
        torch.testing.assert_close(out[row, real], alone[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", [TOKENS[0], TOKENS.to(torch.uint8), TOKENS.float()])
def test_tokens_of_another_shape_or_kind_are_refused_in_one_line(tokens):
    with pytest.raises(ConfigError, match=r"input_ids must be \(batch, time\) \.long\(\), not \("):
        ladder(dtype=torch.float32)(tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_ids": TOKENS[:, :3]}, "position_ids must have the shape .* of the tokens"),
        ({"seq_idx": TOKENS[None]}, "seq_idx must have the shape .* of the tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 11])}, "cu_seqlens belongs to one row"),
        ({"attention_mask": torch.ones(2, 3)}, "cover the 11 new tokens"),
        ({"attention_mask": torch.ones(2, 1, 11, 11)}, "must be"),
        ({"attention_mask": torch.ones(3, 11)}, r"must be \(2, time\)"),
        ({"inputs_embeds": torch.ones(2, 3, 16)}, "exactly one of input_ids and inputs_embeds"),
        ({"past_key_values": "cache"}, "must be a Cache"),
        ({"return_loss": True, "labels": TOKENS}, "return_loss=True takes tokens"),
        ({"return_loss": True, "attention_mask": torch.ones(2, 10)}, "cover the 10 new tokens"),
        ({"prev_hiddens": []}, "prev_hiddens is an argument of other models: give past_key_values"),
        ({"segment_ids": TOKENS}, "segment_ids .* give seq_idx, position_ids or cu_seqlens"),
    ],
)
def test_arguments_that_would_be_misread_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ladder(dtype=torch.float32)(TOKENS, **arguments)


@pytest.mark.parametrize("masked", [[], [0], [4], [3, 4, 5], [9, 10], [3, 4, 8]], ids=str)
@pytest.mark.parametrize("way", ["position_ids", "seq_idx", "cu_seq_lens_q", "cu_seqlens"])
def test_a_document_begins_at_its_first_real_token(way, masked):
    model, tokens_BT, lengths = ladder(), TOKENS[:1], [4, 4, 3]
    value = {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "seq_idx": torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].int(),
        **dict.fromkeys(("cu_seq_lens_q", "cu_seqlens"), torch.tensor([0, 4, 8, 11], dtype=torch.int32)),
    }[way]
    mask_BT = torch.ones_like(tokens_BT)
    mask_BT[0, masked] = 0
    with torch.no_grad():
        packed = model(tokens_BT, attention_mask=mask_BT, **{way: value}).logits
        for document in torch.arange(11).split(lengths):
            real = document[mask_BT[0, document].bool()]
            torch.testing.assert_close(packed[:, real], model(tokens_BT[:, real]).logits)


def test_a_first_real_token_behind_a_cache_begins_a_document_only_at_position_0():
    model, mask_BT = ladder(), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    ways = [
        ({"position_ids": torch.tensor([[9, 0, 1, 2], [5, 6, 7, 8]])}, (True, False)),
        ({"position_ids": torch.tensor([[0, 5, 6, 7], [0, 1, 2, 3]])}, (False, True)),
        ({"seq_idx": torch.tensor([[0, 1, 1, 1], [2, 2, 2, 2]])}, (False, False)),
    ]
    for packing, anew in ways:
        with torch.no_grad():
            cache = model(TOKENS[:, :5], use_cache=True).past_key_values
            logits = model(TOKENS[:, 5:9], attention_mask=mask_BT, past_key_values=cache, **packing).logits
            for row, begins in enumerate(anew):
                real = mask_BT[row].bool()
                text = torch.cat([TOKENS[row, : 0 if begins else 5], TOKENS[row, 5:9][real]])
                torch.testing.assert_close(logits[row, real], model(text[None]).logits[0, -real.sum() :])


def test_positions_of_padded_and_continued_rows_pack_nothing():
    model, steps = ladder(), TOKENS.shape[1]
    mask_BT = (torch.arange(steps) >= torch.tensor([[0], [3]])).long()
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(TOKENS, attention_mask=mask_BT)
        told = model(TOKENS[:, :5], attention_mask=mask_BT[:, :5], position_ids=positions_BT[:, :5], use_cache=True)
        rest = model(TOKENS[:, 5:], position_ids=positions_BT[:, 5:], past_key_values=told.past_key_values)
    together = torch.cat([told.logits, rest.logits], 1)
    torch.testing.assert_close(together[mask_BT.bool()], whole.logits[mask_BT.bool()])


def test_a_cache_that_takes_tokens_back_refuses_packed_rows():
    model = ladder()
    cache = model(TOKENS, use_cache=True).past_key_values
    cache.activate_past_recording()
    model.eval()
    with pytest.raises(ConfigError, match="takes no packed rows"):
        model(TOKENS, position_ids=torch.zeros_like(TOKENS), past_key_values=cache)


def test_no_tokens_are_refused():
    model = ladder()
    cache = model(TOKENS, use_cache=True).past_key_values
    with pytest.raises(ConfigError, match="no new tokens"):
        model(TOKENS[:, :0], past_key_values=cache)
    with pytest.raises(ConfigError, match="begin an empty text with bos_token_id"):
        model(TOKENS[:, :0])


def test_training_returns_no_cache_unless_it_is_asked_for():
    model = ladder(dtype=torch.float32).train()
    assert model(TOKENS).past_key_values is None
    assert model(TOKENS, use_cache=True).past_key_values.get_seq_length() == 11
    assert model.eval()(TOKENS).past_key_values.get_seq_length() == 11


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("e1", {}), ("e42", {"use_conv": True}), ("e88", {"n_heads": 2, "n_state": 8}), ("gru", {}),
        ("gdn", {"head_dim": 16, "n_heads": 2}), ("mamba2", {"headdim": 16}), ("transformer", {"head_dim": 16}),
    ],
)  # fmt: skip
def test_a_model_without_data_has_shapes_and_gradients(variant, options):
    """What counts operations or memory runs a model on the meta device, which has no autocast to switch off."""
    with torch.device("meta"):
        model = LadderForCausalLM(LadderConfig(variant=variant, options=options, hidden_size=32, num_hidden_layers=2))
        loss = model(torch.zeros(2, 9, dtype=torch.long), return_loss=True)
    loss.backward()
    assert loss.is_meta
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


# A SwiGLU after each layer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["toy", "toypair"])
def test_mlp_ratio_puts_a_swiglu_after_each_layer(variant):
    """Width: 16 · 5 rounded up to a multiple of 64. Every other branch is the variant's, in its own order."""
    model, plain = ladder(variant, mlp_ratio=5.0), ladder(variant)
    branches = len(plain.model.layers) // 3
    assert len(model.model.layers) == len(plain.model.layers) + 3
    assert [block.ends_layer for block in model.model.layers] == ([False] * branches + [True]) * 3
    more = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in plain.parameters())
    assert more == 3 * (3 * 16 * 128 + 16)
    with torch.no_grad():
        stream = model.model.embed_tokens.weight[TOKENS]
        for i, block in enumerate(model.model.layers):
            x, mixer = rms(stream, block.norm.weight), block.mixer
            if i % (branches + 1) == branches:
                gate, up, down = (m.weight for m in (mixer.gate_proj, mixer.up_proj, mixer.down_proj))
                stream = stream + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
            else:
                stream = stream + mixer(x)[0]
        expected = rms(stream, model.model.norm.weight) @ model.model.embed_tokens.weight.T
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-12, atol=1e-12)


def test_a_ladder_with_an_mlp_keeps_its_text_its_state_and_its_checkpoint(tmp_path):
    model = ladder(mlp_ratio=1.5)
    with torch.no_grad():
        cache = model(TOKENS[:, :6], use_cache=True).past_key_values
        cache.save(tmp_path / "state")
        again = type(cache).load(tmp_path / "state", config=model.config)
        expected = model(TOKENS).logits[:, 6:]
        torch.testing.assert_close(model(TOKENS[:, 6:], past_key_values=again).logits, expected, rtol=1e-12, atol=1e-12)
        model.save_pretrained(tmp_path / "model")
        loaded = LadderForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
        assert loaded.config.mlp_ratio == 1.5
        assert model.generate(TOKENS[:, :3], max_new_tokens=4, do_sample=False).shape == (2, 7)


@pytest.mark.parametrize("ratio", [-1.0, 17.0])
def test_an_mlp_ratio_out_of_range_is_refused(ratio):
    with pytest.raises(ConfigError, match="mlp_ratio must be from 0"):
        LadderLM("toy", dim=16, depth=1, mlp_ratio=ratio)
