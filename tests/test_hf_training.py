"""Every installed variant under transformers' Trainer, under PEFT, with classification heads."""

import contextlib

import pytest
import torch
from hf_helpers import GREEDY, PROMPT, RAW, TEXT, every_kind, examples, tiny, width
from packed_files import write_tokenizer
from train_helpers import losses, settings, write_text
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)
from transformers.integrations.peft import MIN_PEFT_VERSION

from elman_core.model import LadderConfig, LadderForCausalLM, byte_tokenizer
from elman_core.registry import ConfigError
from elman_core.training.plan import build_model
from elman_core.training.start import start


class InOrder(Trainer):
    """Batches in the order of the data set."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def hf_losses(model, folder, data, rows, **arguments):
    pytest.importorskip("accelerate")
    steps = len(data) // rows
    accumulate = arguments.get("gradient_accumulation_steps", 1)
    given = {
        "output_dir": str(folder), "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "seed": 1,
        "save_strategy": "no", "lr_scheduler_type": "constant", "max_steps": steps,
        "per_device_train_batch_size": rows // accumulate, **arguments,
    }  # fmt: skip
    collator = DataCollatorForLanguageModeling(byte_tokenizer(), mlm=False)
    trainer = InOrder(model=model, args=TrainingArguments(**given), train_dataset=data, data_collator=collator)
    trainer.train(resume_from_checkpoint=arguments.get("resume_from_checkpoint"))
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


# Trainer sees a module: a dense one with buffers, a matrix state and a state that grows stand for all.
few_variants = pytest.mark.parametrize("variant", ["e42", "e88", "transformer"])


@few_variants
def test_trainer_has_the_losses_of_our_trainer_on_the_same_batches(variant, tmp_path):
    """Also with accumulation and recomputed activations: three optimizer steps, so a wrong gradient would show."""
    ours = settings(
        write_text(tmp_path / "text", 20_000), f"model.variant={variant}", "train.steps=3", "train.warmup=0",
        "train.schedule=constant", "train.weight_decay=0", "train.precision=fp32", "train.lr=3e-3",
        f"model.hidden_size={width(variant)}",
    )  # fmt: skip
    run = start(ours, tmp_path / "run", quiet=True)
    data = [{"input_ids": row.tolist()} for step in range(3) for row in run.windows.batch(step).tokens]
    run.fit()
    expected = list(losses(tmp_path / "run").values())
    train = run.settings.train
    same = {
        "learning_rate": train.lr, "adam_beta1": train.beta1, "adam_beta2": train.beta2, "weight_decay": 0.0,
        "max_grad_norm": train.clip, "optim": "adamw_torch",
    }  # fmt: skip
    for extra in ({}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}):
        model = build_model(ours, torch.device("cpu"))
        got = hf_losses(model, tmp_path / "hf", data, rows=train.batch_size, **same, **extra)
        assert got == pytest.approx(expected, rel=2e-5), extra


@few_variants
def test_trainer_resumes_and_its_checkpoints_load_with_and_without_the_package(variant, tmp_path):
    data, model = examples(16), tiny(variant, dtype=torch.float32)
    start_of = {n: t.clone() for n, t in model.state_dict().items()}
    settings_of = {"learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    whole = hf_losses(model, tmp_path / "a", data, rows=4, **settings_of)
    model.load_state_dict(start_of)
    again = hf_losses(
        model, tmp_path / "a", data, rows=4, resume_from_checkpoint=str(tmp_path / "a/checkpoint-2"), **settings_of
    )
    assert again[-2:] == pytest.approx(whole[-2:], rel=1e-5)
    for trust in (False, True):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a/checkpoint-4", trust_remote_code=trust)
        assert type(loaded) is type(model)
        loaded.save_pretrained(tmp_path / "b")
        resaved = AutoModelForCausalLM.from_pretrained(tmp_path / "b", trust_remote_code=trust)
        with torch.no_grad():
            assert torch.equal(resaved.eval()(PROMPT).logits, loaded.eval()(PROMPT).logits)


def test_a_text_of_tokens_ends_where_its_tokenizer_says_and_nowhere_else(tmp_path):
    pytest.importorskip("accelerate")
    tokenizer = write_tokenizer(tmp_path / "bpe", [TEXT.decode(errors="ignore")])
    tokenizer.pad_token = tokenizer.eos_token
    how = {"variant": "e1", "hidden_size": 16, "num_hidden_layers": 1}
    model = LadderForCausalLM(LadderConfig(**how, vocab_size=len(tokenizer)))
    assert model.config.eos_token_id is model.config.bos_token_id is None, "30 is a token as any other"
    arguments = TrainingArguments(str(tmp_path / "hf"), report_to=[], use_cpu=True, disable_tqdm=True, max_steps=1)
    data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}]
    Trainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer).train()
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.eos_token_id == tokenizer.eos_token_id
    assert again.generation_config.eos_token_id in (tokenizer.eos_token_id, [tokenizer.eos_token_id])
    chosen = LadderForCausalLM(LadderConfig(**how, vocab_size=300, eos_token_id=30))
    chosen.save_pretrained(tmp_path / "chosen")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "chosen").config.eos_token_id == 30


@every_kind
def test_adapters_train_save_load_and_merge_on_projections_and_on_recurrent_matrices(variant, tmp_path):
    peft = pytest.importorskip("peft")
    tokens = torch.tensor([list(TEXT[:24])])
    kinds = [{"target_modules": "all-linear"}]
    if raw := [name for part in variant.split("+") for name in RAW[part]]:
        kinds.append({"target_modules": [], "target_parameters": [f"mixer.{n}" for n in raw]})
    for index, kind in enumerate(kinds):
        folder = tmp_path / f"base{index}"
        model = tiny(variant, dtype=torch.float32)
        for p in (p for p in model.parameters() if not p.any()):
            torch.nn.init.normal_(p, std=0.02)  # an output projection that begins at 0 passes no gradient to the rest
        model.save_pretrained(folder)
        base = AutoModelForCausalLM.from_pretrained(folder)
        before = {n: t.clone() for n, t in base.named_parameters()}
        adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **kind))
        trained = [n for n, p in adapted.named_parameters() if p.requires_grad]
        assert trained, "no adapter was placed"
        assert all("lora" in n for n in trained)
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
        history = []
        for _ in range(6):
            loss = adapted(tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        assert history[-1] < history[0], (kind, history)
        adapted.eval()
        adapter = tmp_path / f"adapter{index}"
        adapted.save_pretrained(adapter)
        with torch.no_grad():
            expected = adapted(tokens).logits
            loaded = AutoModelForCausalLM.from_pretrained(
                adapter
            ).eval()  # transformers finds the base through the adapter
            torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-5, atol=1e-5)
            written = adapted.generate(input_ids=PROMPT, num_beams=2, **GREEDY)
            merged = adapted.merge_and_unload()
            torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)
            assert torch.equal(merged.generate(PROMPT, num_beams=2, **GREEDY), written)
        assert any(not torch.equal(p, before[n]) for n, p in merged.named_parameters() if n in before)


def test_an_adapter_that_a_model_holds_is_saved_alone_and_loads_again(tmp_path):
    peft = pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    model = tiny("e1", dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.add_adapter(peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter/config.json").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(again(PROMPT).logits, model(PROMPT).logits, rtol=1e-5, atol=1e-5)
        model.disable_adapters()
        assert (again(PROMPT).logits - model(PROMPT).logits).abs().max() > 1e-2


@every_kind
def test_each_row_of_a_batch_may_have_another_adapter(variant):
    """Three rows of three steps: names of adapters fit either axis."""
    peft = pytest.importorskip("peft")
    model = tiny(variant, dtype=torch.float32)
    for p in (p for p in model.parameters() if not p.any()):
        torch.nn.init.normal_(p, std=0.02)
    how = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**how), adapter_name="a")
    adapted.add_adapter("b", peft.LoraConfig(**how))
    tokens, names = torch.tensor([list(TEXT[at : at + 3]) for at in range(3)]), ["b", "__base__", "a"]
    adapted.eval()
    with torch.no_grad():
        got = adapted(input_ids=tokens, adapter_names=names).logits
        written = adapted.generate(input_ids=tokens, adapter_names=names, **GREEDY)
        for row, name in enumerate(names):
            adapted.set_adapter("a" if row == 1 else name)
            with adapted.disable_adapter() if row == 1 else contextlib.nullcontext():
                one = tokens[row : row + 1]
                torch.testing.assert_close(got[row : row + 1], adapted(one).logits, rtol=1e-4, atol=1e-4)
                alone = adapted.generate(input_ids=one, **GREEDY)[0]
            assert torch.equal(written[row, : len(alone)], alone)


@pytest.mark.parametrize(("variant", "matrices"), [("e1", ["w_h"]), ("e42", ["w"]), ("e4", ["w_h.u", "w_h.v"])])
@pytest.mark.parametrize("by", ["loop", "Trainer"])
def test_adapters_of_a_normalised_matrix_compute_the_same_after_a_reload(variant, matrices, by, tmp_path):
    """The base was trained, so its norms have vectors, found for the weights before its last step."""
    peft = pytest.importorskip("peft")
    data = [{"input_ids": list(TEXT[at : at + 24])} for at in range(8)]
    tokens = torch.tensor([row["input_ids"] for row in data[:2]])
    base = tiny(variant, dtype=torch.float32).train()
    for p in (p for p in base.parameters() if not p.any()):
        torch.nn.init.normal_(p, std=0.02)
    hf_losses(base, tmp_path / "base", data, 2, learning_rate=3e-3)
    base.save_pretrained(tmp_path / "base")
    for index, kind in enumerate(({"target_modules": []}, {"target_modules": "all-linear"})):
        if not index:
            kind["target_parameters"] = [f"mixer.{name}" for name in matrices]
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        expected = base(tokens).logits
        adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **kind)).train()
        if by == "Trainer":
            hf_losses(adapted, tmp_path / "run", data, 2, learning_rate=0.02)
        else:
            optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.02)
            for _ in range(4):
                adapted(tokens, labels=tokens).loss.backward()
                optimizer.step()
        adapted.eval().save_pretrained(tmp_path / "adapter")
        with torch.no_grad():
            with adapted.disable_adapter():
                torch.testing.assert_close(adapted(tokens).logits, expected, rtol=1e-4, atol=1e-4)
            before, expected = expected, adapted(tokens).logits
            assert (expected - before).abs().max() > 0.1
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
            torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-5, atol=1e-5)
            adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
            merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
            torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_prompts_are_tuned_and_prefixes_of_keys_and_values_refused():
    peft = pytest.importorskip("peft")
    tokens = torch.tensor([list(TEXT[:24])])
    given = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4, "num_attention_heads": 1}
    tuned = peft.get_peft_model(tiny("e42", dtype=torch.float32), peft.PromptTuningConfig(**given))
    tuned(tokens, labels=tokens).loss.backward()
    assert tuned.prompt_encoder.default.embedding.weight.grad.any()
    prefixed = peft.get_peft_model(tiny("e42", dtype=torch.float32), peft.PrefixTuningConfig(**given))
    with pytest.raises(ConfigError, match="keys and values, from which no ladder"):
        prefixed(tokens)


def test_the_backward_of_e88_is_traced_by_aot_eager_on_a_cpu():
    tokens, model = PROMPT, tiny("e88", depth=1, dtype=torch.float32)
    torch._dynamo.reset()
    torch.compile(model, backend="aot_eager")(tokens, labels=tokens).loss.backward()


@every_kind
def test_sequences_and_tokens_are_classified(variant, tmp_path):
    tiny(variant, dtype=torch.float32).save_pretrained(tmp_path)
    for auto, labels in (
        (AutoModelForSequenceClassification, torch.tensor([0, 2])),
        (AutoModelForTokenClassification, PROMPT % 3),
    ):
        model = auto.from_pretrained(tmp_path, num_labels=3)
        first = model(PROMPT, labels=labels)
        first.loss.backward()
        assert first.logits.shape == (*labels.shape, 3)
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        model.eval().save_pretrained(tmp_path / "head")
        with torch.no_grad():
            again = auto.from_pretrained(tmp_path / "head").eval()
            assert torch.equal(again(PROMPT).logits, model(PROMPT).logits)


# Of each kind of state: a vector, a matrix, a tape with a learned initial value, gates, keys and values.
@pytest.mark.parametrize("variant", ["e42", "e88", "e23", "lstm", "transformer"])
def test_every_way_to_say_where_documents_begin_trains_as_single_rows(variant):
    """As transformers' collator says it, each way by itself, and as TRL's padding-free one; also with recomputed layers."""
    texts, model = (
        [{"input_ids": list(TEXT[at : at + n])} for at, n in ((0, 9), (20, 1), (30, 14))],
        tiny(variant).eval(),
    )
    batch = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True, return_seq_idx=True)(texts)
    whole = {name: batch.pop(name) for name in ("input_ids", "labels")}
    lengths = {name: batch.pop(name) for name in ("max_length_q", "max_length_k", "cu_seq_lens_k")}
    assert set(batch) == {"position_ids", "seq_idx", "cu_seq_lens_q"}

    def gradients(*rows):
        loss = torch.stack([model(**row, num_items_in_batch=21).loss for row in rows]).sum()
        return loss, *torch.autograd.grad(loss, [*model.parameters()])

    rows = ({k: torch.tensor([text["input_ids"]]) for k in ("input_ids", "labels")} for text in texts)
    expected = gradients(*(row for row in rows if row["labels"].shape[1] > 1))
    ways = [
        *({name: batch[name], **lengths} for name in batch),
        batch,
        {"position_ids": batch["position_ids"], "attention_mask": None},
    ]
    for _ in ("stored", "recomputed"):
        for way in ways:
            torch.testing.assert_close(gradients({**whole, **way}), expected)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for (
            block
        ) in model.model.layers:  # transformers recomputes only what trains; what a norm follows must stand still
            block.training = True


def test_a_padded_row_is_classified_as_the_row_alone(tmp_path):
    tiny("e42", dtype=torch.float32).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3).eval()
    rows = torch.tensor([[0, 0, 0, 97, 98, 99], list(b"abcdef")])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    scored = []
    model.score.register_forward_hook(lambda *call: scored.append(call[-1].shape))
    with torch.no_grad():
        both, alone = model(rows, attention_mask=mask).logits, model(rows[:1, 3:]).logits
    torch.testing.assert_close(both[0], alone[0])
    assert scored == [(2, 3), (1, 3)], "the last token of each row"


def test_embeddings_are_resized_with_the_head():
    model = tiny("e42")
    model.resize_token_embeddings(260)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens = torch.tensor([[257, 258]])
    assert model(tokens).logits.shape == (1, 2, 260)
    assert torch.isfinite(model(tokens, labels=tokens).loss)
