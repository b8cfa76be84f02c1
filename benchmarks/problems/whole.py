"""Texts written by a model's program, one launch for several bytes, beside those of its steps recorded as a CUDA graph: random
prompts, lengths, seeds and settings, small models whose bytes are far from uniform.

Texts begin to differ where rounding decides. Both decoders then read the text up to there, from the same state after the
prompt. The difference is `explained` if each decoder's logits, with the noise of that byte, give the byte that it drew, and
the program's logits are never further from float64 than those of the steps in any text: then two candidates were closer than
that error. `error` is that of the logits at the first difference or at the last byte, as a relative L2 norm, the mean over all
texts.

A text in two parts, with its state taken out and put back, must equal the text written at once, bit for bit. Several samples
and rows of a padded batch must be decoded step by step, and one padded row as without padding. For a model without a program,
the row says why.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from elman_megakernel import programs
from elman_megakernel.native import Program, Run
from elman_megakernel.source import COPIES
from harness import Row, Setting
from torch import Tensor

from elman_core.generation import Sampling, decoder, generate_bytes, in_bursts, loop
from elman_core.generation.prefill import prefill
from elman_core.kernels.decode.portable import kept_scores, race
from elman_core.model import LadderForCausalLM, LadderLM, step_graph
from elman_core.nn import scaled_once
from elman_core.registry import list_variants, parse_size

SINGLE = (
    "e42@128x2", "e1@128x2", "lstm@128x2", "gru@128x2", "e88:h4n32@128x2", "e88:conv_h5n128v256@128x2", "e97@128x2",
    "gdn@128x2", "m2rnn@128x2", "gdn*3+e1@128x4", "transformer@128x2",
)  # fmt: skip
HOW = (
    Sampling(), Sampling(temperature=0), Sampling(temperature=0.8), Sampling(top_k=40), Sampling(top_p=0.9),
    Sampling(repetition_penalty=1.3), Sampling(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    prompt: bytes
    count: int
    how: Sampling
    stop: Sequence[int]
    seed: int


def cases(texts: int, most: int) -> list[Case]:
    of = random.Random(0)
    return [
        Case(
            of.randbytes(of.randint(1, most)),
            of.randint(1, most),
            HOW[i % len(HOW)],
            of.choices(range(256), k=i % 3),
            i,
        )
        for i in range(texts)
    ]


def models() -> tuple[str, ...]:
    """Each variant, alone or as a layer beside three others."""
    rest = sorted({*list_variants()} - {name.partition("@")[0].partition(":")[0] for name in SINGLE})
    groups = [rest[at : at + 4] for at in range(0, len(rest), 4)]
    widths = (256 if "slstm" in group else 128 for group in groups)  # kernels of sLSTM take heads of 64
    return (*SINGLE, *(f"{'+'.join(group)}@{width}x{len(group)}" for group, width in zip(groups, widths, strict=True)))


def build(name: str, dtype: torch.dtype, device: torch.device) -> LadderForCausalLM:
    variant, width, depth = parse_size(name)
    torch.manual_seed(0)
    model = LadderLM(variant, dim=width, depth=depth)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(20)
    return model.to(device, dtype).eval()


@dataclass
class Both:
    """A model with its program, and without it. draws: the noise of each launch since `text` began."""

    model: LadderForCausalLM
    program: Program
    draws: list[Tensor | None] = field(default_factory=list)

    def patched(self, program: Program | None) -> Any:
        plain = SimpleNamespace(burst=1, work=nullcontext, record=lambda run, *_: run)  # of a CPU
        recorder = step_graph.recorder_for(self.model) or plain
        return mock.patch.multiple(decoder, program_for=lambda *_: program, recorder_for=lambda *_: recorder)

    def text(self, case: Case, program: Program | None, num: int = 1) -> list[int | None]:
        self.draws.clear()
        given = {"max_new_bytes": case.count, "num": num, "how": case.how, "stop": case.stop, "seed": case.seed}
        with self.patched(program):
            return [row[0] for row in generate_bytes(self.model, case.prompt, **given)]  # type: ignore[arg-type]

    def logits(self, prompt: bytes, text: Sequence[int], program: Program | None) -> Tensor:
        """Logits after both, (V,); the text is read byte after byte."""
        with torch.inference_mode(), scaled_once(self.model):
            cache, logits_1V = prefill(self.model, prompt)
            if program is None:
                for byte in text:
                    token = torch.tensor([[byte]], device=self.model.device)
                    logits_1V = self.model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1]
                return logits_1V[0].double()
            run = Run(program, programs.by_name(cache.states), torch.tensor(text[:1], device=program.device))
            waits_TV = torch.full((len(text), program.source.classes), 1e30)
            for t, byte in enumerate(text[1:]):
                waits_TV[t, byte] = 1.0  # nothing else can win
            given = room(program, len(text), waits_TV.to(program.device))
            run.draw(*given, temperature=1.0, top_k=0, top_p=1.0, penalty=1.0)
            words = run.exchanged[: len(run.exchanged) // COPIES][-program.source.classes :]
            return words.to(torch.int32).view(torch.float32).double()


def room(program: Program, count: int, waits_TV: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """The arguments of a launch of `count` draws: (shown, waits, seen)."""
    shown_T = torch.zeros(count, dtype=torch.long, device=program.device)
    return shown_T, waits_TV, torch.zeros(program.source.classes, dtype=torch.bool, device=program.device)


def exact_logits(model: LadderForCausalLM, texts: Sequence[Sequence[int]]) -> Tensor:
    """Logits after each text, in float64 and plain PyTorch, (B, V)."""
    exact = LadderLM(model.config).double().eval().to(model.device)
    exact.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    at = [(i, len(text) - 1) for i, text in enumerate(texts)]
    most = max(map(len, texts))
    tokens_BT = torch.tensor([[*text, *[0] * (most - len(text))] for text in texts], device=model.device)
    with torch.inference_mode(), mock.patch.dict(os.environ, ELMAN_KERNELS="off"):
        return exact(tokens_BT).logits[*zip(*at, strict=True)]


def drawn(logits_V: Tensor, case: Case, text: Sequence[int], waits_V: Tensor | None) -> int:
    seen_1V = torch.zeros(1, len(logits_V), dtype=torch.bool, device=logits_V.device)
    seen_1V[0, [*case.prompt, *text]] = True
    scores_1V = kept_scores(logits_V[None].float(), seen_1V, **case.how.settings)
    return int(race(scores_1V, None if waits_V is None else waits_V[None]).argmax())


def continues(both: Both) -> bool:
    """Whether a text whose state is taken out and put back is the same, bit for bit."""
    program, steps = both.program, (17, 23)
    with torch.inference_mode():
        cache, _ = prefill(both.model, b"a prompt, ")
        states = programs.by_name(cache.states)
        shown_T, waits_TV, seen_V = room(program, sum(steps), torch.ones(sum(steps), program.source.classes))
        assert waits_TV is not None
        waits_TV = waits_TV.exponential_(generator=torch.Generator().manual_seed(0)).to(program.device)
        how = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "penalty": 1.2}

        def ends(parts: Sequence[int]) -> list[Tensor]:
            saved, token, seen = {k: x.float().clone() for k, x in states.items()}, torch.tensor([97]), seen_V.clone()
            token = token.to(program.device)
            for part, waits in zip(shown_T.split(parts), waits_TV.split(parts), strict=True):
                run = Run(program, saved, token)
                run.draw(part, waits, seen, **how)
                run.save(saved)
                token = part[-1:]
            return [shown_T.clone(), *saved.values()]

        return all(torch.equal(a, b) for a, b in zip(ends([*steps]), ends([sum(steps)]), strict=True))


def falls_back(both: Both) -> bool:
    """Whether several samples and rows of a padded batch are decoded step by step, and one padded row as without padding."""
    both.text(Case(b"a prompt, ", 8, Sampling(), (), 0), both.program, num=3)
    tokens = torch.tensor([[0] * 3 + [*b"short"], [*b"a prompt"]], device=both.model.device)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    given = {"max_new_tokens": 24, "do_sample": False, "custom_generate": in_bursts, "pad_token_id": 0}
    with both.patched(both.program):
        both.model.generate(tokens, attention_mask=mask, **given)
        if both.draws:
            return False
        padded = both.model.generate(tokens[:1], attention_mask=mask[:1], **given)
        plain = both.model.generate(tokens[:1, 3:], **given)
    return len(both.draws) == 2 and torch.equal(padded[:, 3:], plain)


def compared(both: Both, texts: int, most: int) -> Row:
    given, found, points = cases(texts, most), list[tuple[Any, ...]](), list[list[int]]()
    total = 0
    for case in given:
        steps = both.text(case, None)
        made = both.text(case, both.program)
        waits = None if not both.draws or both.draws[0] is None else torch.cat([x for x in both.draws if x is not None])
        same = sum(1 for _ in takewhile(bool, (a == b for a, b in zip(made, steps, strict=False))))
        differs = made != steps
        at = same if differs else max(1, len(made) - 1)
        text = [x for x in made[:at] if x is not None] or [97]
        bytes_ = (made[at : at + 1], steps[at : at + 1])
        logits = [both.logits(case.prompt, text, way) for way in (both.program, None)]
        found.append(
            (case, text, differs, bytes_, None if waits is None or not differs else waits[at - 1].clone(), logits)
        )
        points.append([*case.prompt, *text])
        total += len(made)
    exact_BV = exact_logits(both.model, points)
    norms, furthest = list[list[float]](), list[list[float]]()
    for (*_, logits), exact_V in zip(found, exact_BV, strict=True):
        norms.append([float((x - exact_V).norm() / exact_V.norm()) for x in logits])
        furthest.append([float((x - exact_V).abs().max()) for x in logits])
    bound, differing, explained = max(b for _, b in furthest), 0, 0
    for (case, text, differs, ways, waits_V, logits), (mine, _) in zip(found, furthest, strict=True):
        if not differs:
            continue
        differing += 1
        # A stop byte ends a text: it is not yielded.
        rights = [(drawn(x, case, text, waits_V), way) for x, way in zip(logits, ways, strict=True)]
        right = all([byte] == way or (way == [] and byte in case.stop) for byte, way in rights)
        explained += right and mine <= bound
    error, error_steps = (sum(x) / texts for x in zip(*norms, strict=True))
    continued, fell_back = continues(both), falls_back(both) if both.model.dtype == torch.float32 else None
    worse = both.model.dtype != torch.float32 and error > error_steps
    return {
        "texts": texts, "bytes": total, "equal": texts - differing, "explained": explained,
        "error": float(f"{error:.2e}"), "error_steps": float(f"{error_steps:.2e}"), "continued": continued,
        "falls_back": fell_back, "agrees": explained == differing and continued and fell_back is not False and not worse,
    }  # fmt: skip


def rows(setting: Setting) -> Iterator[Row]:
    names = ("e42@16x2", "transformer@64x1") if setting.tiny else models()
    texts, most = (7, 6) if setting.tiny else (200, 300)
    here = {"blocks": 2} if setting.device.type == "cpu" else {}
    for name in (*names, *(word for word in setting.only if "@" in word and word not in names)):
        for dtype in (torch.float32, torch.bfloat16):
            short = str(dtype).removeprefix("torch.")
            if not setting.wants(model=name, dtype=short):
                continue

            def measured(name: str = name, dtype: torch.dtype = dtype) -> Row:
                started, said = time.perf_counter(), list[str]()
                model = build(name, dtype, setting.device)
                listening = logging.Handler()
                listening.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
                logging.getLogger("elman_core").addHandler(listening)
                try:
                    program = programs.made(model, **here)
                finally:
                    logging.getLogger("elman_core").removeHandler(listening)
                if program is None:
                    return {"no_program": said[-1]}
                both, draw, ready = Both(model, program), Run.draw, time.perf_counter()

                def kept(run: Run, shown_T: Tensor, waits_TV: Tensor | None, *more: Any, **how: Any) -> None:
                    both.draws.append(waits_TV)
                    draw(run, shown_T, waits_TV, *more, **how)

                with mock.patch.object(Run, "draw", kept), mock.patch.object(loop, "least_rows", return_value=1):
                    found = compared(both, texts, most)
                seconds = {"compiled_s": round(ready - started, 1), "s": round(time.perf_counter() - ready, 1)}
                return {**found, **seconds}

            with mock.patch.dict(os.environ, ELMAN_KERNELS="auto"):  # both decoders as users have them
                yield setting.row(measured, model=name, dtype=short, kind="ours")
