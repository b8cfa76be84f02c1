"""The contract of a variant inside a ladder: checkpoints compute the same, and generation equals the forward.

B batch, T time, V vocabulary.
"""

from __future__ import annotations

import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import elman_core
from elman_core import ConfigError

from .harness import Harness, Options, assert_close, stir_

LAYERS = 2
PROMPT = 5
NEW = 6


@cache
def _elsewhere() -> ProcessPoolExecutor:
    """Another process, which has drawn nothing and holds no model; one for all variants, since starting it takes seconds."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _logits_of(folder: str, tokens: list[list[int]]) -> bytes:
    """The logits of the model in `folder`, as the bytes of a safetensors file."""
    torch.set_num_threads(1)
    model = elman_core.LadderForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        return save({"logits": model(torch.tensor(tokens)).logits})


class ModelContract(Harness):
    def build(self, opts: Options, dtype: torch.dtype = torch.float32, *, seed: int = 1, **config: Any) -> Any:
        """A tiny `LadderForCausalLM` of this variant, in evaluation mode, off its initial values."""
        torch.manual_seed(seed)
        settings = elman_core.LadderConfig(
            variant=self.variant, options=dict(opts), hidden_size=self.dim, num_hidden_layers=LAYERS, **config
        )
        model = elman_core.LadderForCausalLM(settings)
        stir_(model)
        with torch.no_grad():
            model.train()(self.tokens())  # what follows the weights in training follows them
        model.generation_config.eos_token_id = None  # bytes are random here: none ends a text
        model.to(dtype=dtype)  # type: ignore[call-arg]  # transformers' annotation
        return model.eval()

    def tokens(self, rows: int = 2, length: int = 12) -> Tensor:
        return torch.arange(rows * length).view(rows, length) * 7 % 256

    # generation -------------------------------------------------------------------------------------------------------

    def test_generate_equals_argmax_of_the_full_forward(self, opts: Options) -> None:
        model, prompt_BT = self.build(opts, torch.float64), self.tokens(2, PROMPT)
        with torch.inference_mode():
            inside_BT = model.generate(prompt_BT, max_new_tokens=NEW, do_sample=False)
        with torch.no_grad():
            out_BT = model.generate(prompt_BT, max_new_tokens=NEW, do_sample=False)
            assert torch.equal(out_BT, inside_BT), "under inference mode"
            assert out_BT.shape == (2, PROMPT + NEW)
            for t in range(PROMPT, PROMPT + NEW):
                assert torch.equal(model(out_BT[:, :t]).logits[:, -1].argmax(-1), out_BT[:, t]), f"token {t}"

    def test_left_padded_generate_equals_single_rows(self, opts: Options) -> None:
        model = self.build(opts, torch.float64)
        rows = [self.tokens(1, n)[0] + n for n in (PROMPT, 2, 1)]
        padded_BT = torch.stack([torch.nn.functional.pad(r, (PROMPT - len(r), 0), value=17) for r in rows])
        mask_BT = torch.stack([torch.arange(PROMPT) >= PROMPT - len(r) for r in rows]).long()
        with torch.no_grad():
            out_BT = model.generate(padded_BT, attention_mask=mask_BT, max_new_tokens=NEW, do_sample=False)
            for b, row in enumerate(rows):
                alone_BT = model.generate(row[None], max_new_tokens=NEW, do_sample=False)
                assert torch.equal(out_BT[b, PROMPT:], alone_BT[0, len(row) :]), f"row {b}"

    # checkpoints ------------------------------------------------------------------------------------------------------

    def test_a_checkpoint_computes_the_same_bit_for_bit(self, tmp_path: Path) -> None:
        """Saved, loaded here and in another process: the same logits, in 32 and in 16 bits."""
        expected: dict[str, Tensor] = {}
        for i, opts in enumerate(self.options):
            for dtype in (torch.float32, torch.bfloat16):
                model = self.build(opts)
                model.train()(self.tokens())  # what training moves must be saved too
                folder = str(tmp_path / f"{i}-{dtype.itemsize}")
                model.eval().save_pretrained(folder)
                if dtype != torch.float32:
                    model = elman_core.LadderForCausalLM.from_pretrained(folder, dtype=dtype).eval()
                    model.save_pretrained(folder)
                loaded = elman_core.LadderForCausalLM.from_pretrained(folder, dtype="auto").eval()
                with torch.no_grad():
                    expected[folder] = model(self.tokens()).logits
                    assert torch.equal(loaded(self.tokens()).logits, expected[folder]), f"{opts} in {dtype}"
                assert all(a.dtype == b.dtype for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
        for folder, logits_BTV in expected.items():
            elsewhere = load(_elsewhere().submit(_logits_of, folder, self.tokens().tolist()).result())
            assert torch.equal(elsewhere["logits"], logits_BTV), Path(folder).name

    def test_training_does_not_depend_on_a_reload(self, opts: Options, tmp_path: Path) -> None:
        """The loss and every gradient in training mode are the same bit for bit after save and load."""
        model = self.build(opts).train()
        model(self.tokens())
        model.save_pretrained(tmp_path)
        loaded = elman_core.LadderForCausalLM.from_pretrained(tmp_path).train()
        for one in (model, loaded):
            one(self.tokens(), labels=self.tokens()).loss.backward()
        for (name, p), q in zip(model.named_parameters(), loaded.parameters(), strict=True):
            assert p.grad is not None, f"no gradient reaches {name}"
            assert torch.equal(p.grad, q.grad), f"the gradient of {name} differs after a reload"

    def test_one_missing_tensor_reinitialises_only_itself(self, tmp_path: Path) -> None:
        """Every parameter of a layer's mixer that a set of options has, once."""
        tried: set[str] = set()
        for opts in self.options:
            model = self.build(opts)
            model.save_pretrained(tmp_path)
            file = tmp_path / "model.safetensors"
            whole = load_file(file)
            parameters = dict(model.named_parameters())
            first = {n for n in whole if ".mixer." in n and n.startswith("model.layers.0.") and n in parameters}
            for gone in sorted(first - tried):
                save_file({n: t for n, t in whole.items() if n != gone}, file, metadata={"format": "pt"})
                loaded = dict(elman_core.LadderForCausalLM.from_pretrained(tmp_path).named_parameters())
                for name, p in parameters.items():
                    if name == gone:
                        assert torch.isfinite(loaded[name]).all(), f"{name} was missing and is now garbage"
                    else:
                        assert torch.equal(loaded[name], p), f"{gone} was missing, and {name} changed"
            tried |= first

    # training ---------------------------------------------------------------------------------------------------------

    def test_training_lowers_the_loss(self, opts: Options) -> None:
        model, tokens_BT = self.build(opts).train(), self.tokens()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(12):
            loss = model(tokens_BT, labels=tokens_BT).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0], losses

    def test_packed_documents_train_as_documents_alone(self, opts: Options) -> None:
        """Logits and every gradient in float32 and under bfloat16, beside float64: no further off than documents alone."""
        model, tokens_BT = self.build(opts, torch.float64), self.tokens(1, 24)
        alone = [{"input_ids": part, "labels": part} for part in tokens_BT.split([5, 12, 7], 1)]
        row = {name: torch.cat([a[name] for a in alone], 1) for name in ("input_ids", "labels")}
        row["labels"][:, [5, 17]] = -100  # nothing predicts the first token of a document
        row["position_ids"] = torch.cat([torch.arange(a["input_ids"].shape[1]) for a in alone])[None]

        def made(*rows: dict[str, Tensor]) -> list[Tensor]:
            outs = [model(**given, num_items_in_batch=1) for given in rows]  # which divides the sums of the loss
            grads = torch.autograd.grad(torch.stack([out.loss for out in outs]).sum(), [*model.parameters()])
            return [x.double() for x in (torch.cat([out.logits for out in outs], 1).detach(), *grads)]

        def error(found: list[Tensor]) -> float:
            return max(((x - y).norm() / y.norm()).item() for x, y in zip(found, truth, strict=True) if y.norm() > 1e-9)

        truth = made(*alone)
        for one, alike in zip(made(row), truth, strict=True):  # also what is zero, which `error` leaves out
            assert_close(one, alike, what="packed documents in float64")
        model.float()
        for name, eps in (("float32", 2.0**-23), ("bfloat16", 2.0**-8)):
            with torch.autocast("cpu", torch.bfloat16, enabled=name == "bfloat16"):
                limit, found = 2 * error(made(*alone)) + 8 * eps, error(made(row))
            assert found <= limit, f"{name}: relative error {found:.2e}, limit {limit:.2e}"

    def test_a_pickled_copy_and_a_dispatch_mode_train_the_same(self, opts: Options) -> None:
        """Spawned processes get the model as a pickle; counters of operations are dispatch modes, which switch autograd off."""
        model, tokens_BT = self.build(opts, torch.float64).train(), self.tokens()
        copied = pickle.loads(pickle.dumps(model))
        with FlopCounterMode(display=False):
            model(tokens_BT, labels=tokens_BT).loss.backward()
        copied(tokens_BT, labels=tokens_BT).loss.backward()
        for (name, p), q in zip(model.named_parameters(), copied.parameters(), strict=True):
            assert p.grad is not None, f"no gradient reaches {name} under a dispatch mode"
            assert_close(p.grad, q.grad, what=f"the gradient of {name}")

    # errors -----------------------------------------------------------------------------------------------------------

    def test_a_model_with_bad_options_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="no_such_option"):
            self.build({"no_such_option": 1})
