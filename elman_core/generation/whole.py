"""A model's program: the launch that decodes the whole model, several bytes at a time, for one sample on a GPU.

The program is recorded, not declared: one step of the model in plain PyTorch on the CPU (`elman_core.kernels.whole`). A model
with an operation that the recorder does not know is decoded step by step, and a line says which operation that is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call

from elman_core.kernels.decode.op import MOST_CLASSES
from elman_core.kernels.decode.spec import DTYPES
from elman_core.kernels.dense.native import check_errors
from elman_core.kernels.runtime import mode
from elman_core.kernels.whole.native import Program, Run, State
from elman_core.kernels.whole.nodes import UnknownError, record
from elman_core.kernels.whole.source import write
from elman_core.model import LadderCache, LadderForCausalLM
from elman_core.model.step_graph import is_watched
from elman_core.registry import KernelError

log = logging.getLogger("elman_core")

PAYS = 1024
"""Bytes that pay for recording a model's program, which takes a second."""

_CHECKED = 3  # steps of a new program that are compared with plain PyTorch
_TOLERANCE = 0.02  # of a state's norm: far above what rounded weights cost, far below what a wrong number costs
_known: WeakKeyDictionary[LadderForCausalLM, tuple[Any, Program | None]] = WeakKeyDictionary()


def program_for(model: LadderForCausalLM, budget: int) -> Program | None:
    """The program of a model on a GPU with its present weights, compiled and checked at its first use; None if ELMAN_WHOLE is
    not "on", if it has none, or if it has not been made yet and so few bytes do not pay for it.

    Raises:
        KernelError: with ELMAN_KERNELS=require, it cannot be compiled, or computes something else than plain PyTorch.
    """
    if os.environ.get("ELMAN_WHOLE") != "on":  # until it has been measured on a GPU
        return None
    weight = model.model.embed_tokens.weight
    fits = weight.is_cuda and weight.dtype in DTYPES and model.config.vocab_size <= MOST_CLASSES
    return made(model) if fits and not is_watched(model) and (budget >= PAYS or model in _known) else None


def made(model: LadderForCausalLM, **how: Any) -> Program | None:
    """`program_for` a model anywhere. how: of `Program` and of `write`, for tests."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    key = [(name, x.data_ptr(), -1 if x.is_inference() else x._version) for name, x in tensors]
    if mode() == "off":
        return None
    if model not in _known or _known[model][0] != key:
        program = None
        try:
            program = _make(model, dict(tensors), **how)
        except (UnknownError, NotImplementedError) as unknown:  # the latter from a mixer that names a kernel
            _say(f"it has {unknown}")
        except KernelError as error:
            if mode() == "require":
                raise
            _say(str(error))
        _known[model] = key, program
    return _known[model][1]


def _say(why: str) -> None:
    log.warning("elman: this model is decoded step by step, not by one launch: %s", why)


def _make(model: LadderForCausalLM, tensors: Mapping[str, Tensor], blocks: int | None = None, **limits: int) -> Program:
    like = model.model.embed_tokens.weight
    shared = 227 << 10
    if like.is_cuda:
        found: Any = torch.cuda.get_device_properties(like.device)
        shared = found.shared_memory_per_block_optin
    with torch.inference_mode(False), torch.no_grad():
        copies = {
            name: x.detach().to("cpu", torch.float64 if x.is_floating_point() else x.dtype, copy=True)
            for name, x in tensors.items()
        }  # float64: the truth of `_check`, and no library has an LSTM for it
    there = {copy.untyped_storage().data_ptr(): tensors[name] for name, copy in copies.items()}

    def step(token_11: Tensor, states: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, Any]:
        cache = LadderCache.from_states([dict(state) for state in states])
        out = functional_call(model, copies, (token_11,), {"past_key_values": cache, "use_cache": True})
        return out.logits[0, -1], cache.states

    def placed(x: Tensor) -> Tensor:
        source = there.get(x.untyped_storage().data_ptr())
        if source is not None and source.dtype == like.dtype and source.shape == x.shape and x.is_contiguous():
            return source.detach()
        return x.to(like.device, like.dtype).contiguous()

    if any(block.mixer.state_growth != "constant" for block in model.model.layers):
        raise UnknownError("a state that grows")
    blank = [block.mixer.state_spec(block.mixer.dim, block.mixer.config) for block in model.model.layers]
    states = [
        {name: torch.zeros(1, *shape, dtype=torch.float64) for name, (shape, _) in spec.items()} for spec in blank
    ]
    # Forward-mode derivatives, of which there are none, keep kernels out; with gradients no product is padded.
    with torch.inference_mode(False), torch.enable_grad(), forward_ad.dual_level():
        logits, changed = record(step, states)
    source = write(logits, changed, like.element_size(), shared, **limits)
    program = Program(source, like.device, like.dtype, placed, blocks)
    with torch.inference_mode():
        _check(program, step, states)
    return program


def _check(program: Program, step: Any, states: Sequence[Mapping[str, Tensor]]) -> None:
    """Compare a few steps of a new program with the recorded function.

    Raises:
        KernelError: a state, or the logit of a byte that it drew, is further off than rounding takes it.
    """
    cache: Any = states
    token = torch.zeros(1, 1, dtype=torch.long)
    run = Run(program, by_name(states), token.to(program.device))
    shown = torch.zeros(1, dtype=torch.long, device=program.device)
    seen = torch.zeros(program.source.classes, dtype=torch.bool, device=program.device)
    for _ in range(_CHECKED):
        run.draw(shown, None, seen, penalty=1.0, temperature=0.0, top_k=0, top_p=1.0)
        logits, cache = step(token, cache)
        if (drawn := int(shown)) < 0:
            check_errors(program.device)
        spread = float(logits.max() - logits.min())
        if drawn < 0 or float(logits.max() - logits[drawn]) > _TOLERANCE * spread:
            raise KernelError(
                f"the program of this model drew the byte {drawn}, which plain PyTorch does not: report it"
            )
        token = torch.tensor([[drawn]])
    saved = {key: torch.empty_like(x, device=program.device) for key, x in by_name(states).items()}
    run.save(saved)
    for (layer, name), wanted in by_name(cache).items():
        error = float((saved[layer, name].cpu() - wanted).norm() / (wanted.norm() + 1e-6))
        if not error < _TOLERANCE:
            raise KernelError(
                f"the program of this model computes another state {name} of layer {layer}: {error:.1e} off"
            )


def by_name(states: Sequence[Mapping[str, Tensor] | None]) -> dict[State, Tensor]:
    """States by layer and name."""
    return {(layer, name): x for layer, state in enumerate(states) for name, x in (state or {}).items()}
