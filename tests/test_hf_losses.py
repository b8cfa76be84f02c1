"""Losses and scores are those of each row alone, however rows are padded and however a step is divided."""

import pytest
import torch
from hf_helpers import OF_EACH_KIND, TEXT, every_kind, tiny, width
from torch.nn.functional import cross_entropy
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from elman_core.model import (
    LadderConfig,
    LadderForCausalLM,
    LadderForSequenceClassification,
    LadderForTokenClassification,
    LadderLM,
    byte_tokenizer,
)

ROWS = [TEXT[:5] + b"\0", TEXT[7:18], TEXT[20:23] + b"\x1e\0", TEXT[30:38]]  # 0x00 is a byte as any other
PADDINGS = {
    "left": lambda row, n: [*[None] * (n - len(row)), *row],
    "right": lambda row, n: [*row, *[None] * (n - len(row))],
    "holes": lambda row, n: [*row[:2], *[None] * (n - len(row)), *row[2:]],
}


def padded(how, filler=0):
    rows = [PADDINGS[how](row, max(map(len, ROWS))) for row in ROWS]
    ids = torch.tensor([[filler if t is None else t for t in row] for row in rows])
    return ids, torch.tensor([[int(t is not None) for t in row] for row in rows])


@every_kind
@torch.no_grad()
def test_the_loss_of_a_padded_batch_is_that_of_its_rows(variant):
    model = tiny(variant)
    logits = torch.cat([model(torch.tensor([list(row)])).logits[0, :-1] for row in ROWS])
    expected = cross_entropy(logits.float(), torch.tensor([byte for row in ROWS for byte in row[1:]]))
    for how in PADDINGS:
        ids, mask = padded(how, filler=77)
        got = model(ids, attention_mask=mask, labels=ids).loss, model(ids, attention_mask=mask, return_loss=True)
        torch.testing.assert_close(torch.stack(got), expected.expand(2), msg=how)


@every_kind
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_padding_of_any_numbers_leaves_the_logits_beside_it_as_they_are(variant, bad):
    model = tiny(variant, dtype=torch.float32).eval()
    for p in (p for p in model.parameters() if not p.any()):
        torch.nn.init.normal_(p, std=0.02)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 1, 1, 1]]).bool()
    with torch.no_grad():
        embeds = model.get_input_embeddings()(torch.tensor([list(TEXT[:9]), list(TEXT[9:18])]))
        expected = model(inputs_embeds=embeds, attention_mask=mask).logits[mask]
        got = model(inputs_embeds=embeds.masked_fill(~mask[..., None], bad), attention_mask=mask).logits[mask]
    torch.testing.assert_close(got, expected)


def test_another_number_may_mark_labels_that_do_not_count():
    model, (ids, mask) = tiny("e42"), padded("right")
    for number in (-1, -100):
        labels = ids.masked_fill(mask == 0, number).index_fill(1, torch.tensor([2]), number)
        for given in ({}, {"attention_mask": mask}):
            loss = model(ids, labels=labels, ignore_index=number, **given).loss
            torch.testing.assert_close(
                loss, model(ids, labels=labels.masked_fill(labels == number, -100), **given).loss
            )


@every_kind
@torch.no_grad()
def test_the_scores_of_a_padded_row_are_those_of_the_row(variant):
    torch.manual_seed(0)
    config = LadderConfig(
        variant=variant, hidden_size=width(variant), num_hidden_layers=len(variant.split("+")), num_labels=3
    )
    judge, tagger = (
        head(config).double().eval() for head in (LadderForSequenceClassification, LadderForTokenClassification)
    )
    alone = [torch.tensor([list(row)]) for row in ROWS]
    scores = torch.cat([judge.score(judge.model(row).last_hidden_state[:, -1]) for row in alone])
    tags = torch.cat([tagger(row).logits[0] for row in alone])
    for how in PADDINGS:
        ids, mask = padded(how)
        embedded = judge.get_input_embeddings()(ids)
        torch.testing.assert_close(judge(ids, attention_mask=mask).logits, scores)
        torch.testing.assert_close(judge(inputs_embeds=embedded, attention_mask=mask).logits, scores)
        torch.testing.assert_close(tagger(ids, attention_mask=mask).logits[mask.bool()], tags)
        labels = ids % 3
        loss = tagger(ids, attention_mask=mask, labels=labels).loss
        torch.testing.assert_close(loss, cross_entropy(tags.float(), labels[mask.bool()]))
    assert len(judge(alone[0], return_dict=False)) == 2


def step(model, data, collator, folder, rows, **settings):
    """The loss and the norm of the gradient of one step of Trainer over all of `data`, `rows` at a time."""
    pytest.importorskip("accelerate")
    arguments = TrainingArguments(
        folder, max_steps=1, per_device_train_batch_size=rows, gradient_accumulation_steps=len(data) // rows,
        logging_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, optim="sgd", **settings
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=collator)
    trainer.train()
    return torch.tensor([trainer.state.log_history[0][name] for name in ("loss", "grad_norm")])


def heads(tokenizer, variant):
    """Of each head: what makes it, the examples and the collator that a user would write."""
    ids = [{"input_ids": list(row)} for row in ROWS]
    make = {"variant": variant, "hidden_size": width(variant), "num_hidden_layers": 1}
    judges = {
        "single_label_classification": [0, 2, 1, 2],
        "regression": [0.5, -1.0, 2.0, 0.0],
        "multi_label_classification": [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]],
    }
    for kind, labels in judges.items():
        config = LadderConfig(**make, problem_type=kind, num_labels=1 if kind == "regression" else 3)
        data = [{**row, "labels": label} for row, label in zip(ids, labels, strict=True)]
        yield LadderForSequenceClassification, config, data, DataCollatorWithPadding(tokenizer), {}
    data = [{**row, "labels": [byte % 3 for byte in row["input_ids"]]} for row in ids]
    config = LadderConfig(**make, num_labels=3, classifier_dropout=0.0)
    yield LadderForTokenClassification, config, data, DataCollatorForTokenClassification(tokenizer), {}
    for smoothing in (0.0, 0.1)[: 1 if tokenizer.padding_side == "left" else 2]:  # Trainer smooths padded places, too
        collator, extra = DataCollatorForLanguageModeling(tokenizer, mlm=False), {"label_smoothing_factor": smoothing}
        yield LadderForCausalLM, LadderConfig(**make), ids, collator, extra


@pytest.mark.parametrize(("variant", "side"), [(v, ["left", "right"][i % 2]) for i, v in enumerate(OF_EACH_KIND)])
def test_trainer_takes_the_same_step_however_it_is_divided(variant, side, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = side
    for head, config, data, collator, extra in heads(tokenizer, variant):
        seen = []
        for rows in (4, 1):
            torch.manual_seed(0)
            seen.append(step(head(config), data, collator, tmp_path, rows, **extra))
        torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-5, msg=f"{head.__name__} {config.problem_type} {extra}")
        if head is LadderForCausalLM and not extra["label_smoothing_factor"]:
            torch.manual_seed(0)
            torch.testing.assert_close(head(config)(**collator(data)).loss, seen[0][0], rtol=1e-3, atol=0)


@every_kind
def test_trainer_smooths_labels_of_the_next_byte_for_every_class_of_ours(variant, tmp_path):
    class Mine(LadderForCausalLM):
        """A user's own."""

    config = tiny(variant).config
    for model in (LadderForCausalLM(config), LadderLM(config), Mine(config)):
        tokens = torch.tensor([list(TEXT[:12])])
        batch = {"input_ids": tokens, "labels": tokens}
        trainer = Trainer(
            model.eval(), TrainingArguments(tmp_path, label_smoothing_factor=1e-9, report_to=[], use_cpu=True)
        )
        with torch.no_grad():
            torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), model(**batch).loss)


@torch.no_grad()
def test_a_batch_without_any_target_has_no_mean_and_moves_nothing():
    model, tokens = tiny("e42"), torch.tensor([list(TEXT[:12])])
    for extra in ({}, {"num_items_in_batch": 7}):
        with torch.enable_grad():
            loss = model(tokens, labels=torch.full_like(tokens, -100), **extra).loss
            loss.backward()
        assert loss.isnan() if not extra else loss == 0
        assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
