"""What users of transformers do with a model: Trainer, pipelines, heads, sharded and resized checkpoints."""

import pytest
import torch
import toy_mixers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    pipeline,
)

from elman_core.model import LadderForCausalLM, LadderForTokenClassification, LadderLM, byte_tokenizer

TEXT = b"the quick brown fox jumps over the lazy dog, and again: " * 8

toys = toy_mixers.toys  # for every test here


def build(variant="toy", **options):
    return LadderLM(variant, dim=16, depth=2, **options)


def examples(count=8, length=24):
    return [{"input_ids": list(TEXT[i * 7 : i * 7 + length])} for i in range(count)]


def train(model, folder, steps, accumulate=1, resume=None, **settings):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4 // accumulate,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
        **settings,
    )
    collator = DataCollatorForLanguageModeling(byte_tokenizer(), mlm=False)
    trainer = Trainer(model=model, args=arguments, train_dataset=examples(), data_collator=collator)
    trainer.train(resume_from_checkpoint=resume)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def copy_of(model):
    other = LadderForCausalLM(model.config)
    other.load_state_dict(model.state_dict())
    return other


def test_trainer_accumulates_checkpoints_and_resumes(tmp_path):
    pytest.importorskip("accelerate")
    model = build()
    plain, pieces, recomputed, resumed = (copy_of(model) for _ in range(4))
    losses = train(plain, tmp_path / "a", 4)
    assert losses[-1] < losses[0]
    train(pieces, tmp_path / "b", 4, accumulate=2)
    train(recomputed, tmp_path / "c", 4, gradient_checkpointing=True)
    train(resumed, tmp_path / "d", 4, resume=str(tmp_path / "a" / "checkpoint-2"))
    for other in (pieces, recomputed, resumed):
        for a, b in zip(weights(plain), weights(other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-4")
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(saved), strict=True))
    assert (tmp_path / "a" / "checkpoint-4" / "modeling_ladder_hub.py").exists()


def test_a_pipeline_writes_text_in_batches(tmp_path):
    build().save_pretrained(tmp_path)
    writer = pipeline("text-generation", model=str(tmp_path), device="cpu")
    single = writer("abc", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert single.startswith("abc")
    batch = writer(["abc", "longer prompt"], max_new_tokens=8, do_sample=False, batch_size=2)
    assert batch[0][0]["generated_text"] == single


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, None])
def test_heads_train_from_a_language_model(auto, tmp_path):
    build().save_pretrained(tmp_path)
    tokens = torch.tensor([list(TEXT[:12]), list(TEXT[12:24])])
    if auto is None:
        model, labels = LadderForTokenClassification.from_pretrained(tmp_path, num_labels=3), tokens % 3
    else:
        model, labels = auto.from_pretrained(tmp_path, num_labels=3), torch.tensor([0, 2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = model(tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_a_padded_row_is_classified_as_the_row_alone(tmp_path):
    build().save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3).eval()
    rows = torch.tensor([[0, 0, 0, 97, 98, 99], list(b"abcdef")])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    with torch.no_grad():
        both, alone = model(rows, attention_mask=mask).logits, model(rows[:1, 3:]).logits
    torch.testing.assert_close(both[0], alone[0])


def test_shards_and_half_precision_load(tmp_path):
    model = build(["toy", "toysum"]).eval()
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    tokens = torch.tensor([list(TEXT[:12])])
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
        for dtype in (torch.float16, torch.bfloat16):
            half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
            assert half.dtype == dtype
            assert torch.isfinite(half(tokens).logits).all()
            assert half.generate(tokens, max_new_tokens=3).shape == (1, 15)


def test_embeddings_are_resized_with_the_head():
    model = build()
    model.resize_token_embeddings(260)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(torch.tensor([[257, 258]])).logits.shape == (1, 2, 260)
    assert torch.isfinite(model(torch.tensor([[257, 258]]), labels=torch.tensor([[257, 258]])).loss)
