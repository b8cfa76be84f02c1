"""A model's program: the launch that decodes the whole model, several bytes at a time, for one sample on a GPU.

The program is recorded, not declared: one step of the model in plain PyTorch on the CPU (`nodes.py`). A model with an operation
that the recorder does not know is decoded step by step, and a line says which operation that is.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call

from elman_core import LadderCache, LadderForCausalLM
from elman_core.extension import (
    DECODED_DTYPES,
    MOST_CLASSES,
    KernelError,
    check_errors,
    is_watched,
    kernel_mode,
    limit_of,
)

from .native import Program, Run, by_name, compiling, extension
from .nodes import UnknownError, record
from .source import write
from .steps.step import fingerprint

log = logging.getLogger("elman_core")

PAYS = 8192
"""Bytes that pay for recording a model's program, which takes up to a second in each process."""

HEAVY = 8 << 20
"""Bytes of weights for each layer from which on recorded steps are taken to be as fast. Half beside matrix states, whose steps
have kernels of their own: at 6.3 MiB, recorded steps of E88 are 1.4 times as fast as a program, of Gated DeltaNet 1.2 times."""

_CHECKED = 3  # steps of a new program that are compared with plain PyTorch
_States = Sequence[Mapping[str, Tensor] | None]
_Run = Callable[[Tensor, _States], tuple[Tensor, Any]]
_known: WeakKeyDictionary[LadderForCausalLM, tuple[Any, Program | threading.Thread | None]] = WeakKeyDictionary()


def program_for(model: LadderForCausalLM, budget: int) -> Program | None:
    """The program of a model on a GPU with its present weights, checked at its first use.

    None if it has none, and, unless ELMAN_WHOLE is "on", for texts that do not pay for it, for models whose recorded steps are
    as fast, and while it is compiled beside the first long text.

    Raises:
        KernelError: with ELMAN_KERNELS=require, it cannot be compiled, or computes something else than plain PyTorch.
    """
    weight, way = model.model.embed_tokens.weight, os.environ.get("ELMAN_WHOLE", "auto")
    fits = weight.is_cuda and weight.dtype in DECODED_DTYPES and model.config.vocab_size <= MOST_CLASSES
    if way == "off" or not fits or is_watched(model) or (way != "on" and (budget < PAYS or not is_quicker(model))):
        return None
    return made(model, way == "on" or kernel_mode() == "require")


def is_quicker(model: LadderForCausalLM) -> bool:
    """Whether one launch writes a byte in less time than recorded steps: the launches of a layer, which it saves, take longer
    than its weights (docs/lab/one-launch.md)."""
    layers = model.model.layers
    mixers = [block.mixer for block in layers]
    states = [sizes for m in mixers for sizes, _ in m.state_spec(m.dim, m.config).values()]
    most = HEAVY // 2 if any(len(sizes) == 3 for sizes in states) else HEAVY  # (heads, rows, columns)
    return sum(p.nbytes for p in model.parameters()) < most * len(layers)


def made(model: LadderForCausalLM, wait: bool = True, **how: Any) -> Program | None:
    """`program_for` a model anywhere. wait: until it is compiled. how: of `Program` and of `write`, for tests."""
    if kernel_mode() == "off":
        return None
    key = fingerprint(model, weighed)
    known, found = _known.get(model, (None, None))
    if known != key or (isinstance(found, threading.Thread) and (wait or not found.is_alive())):
        found = None
        try:
            with torch.device("cpu"):  # whatever the default device is
                found = _make(model, wait, **how)
        except (UnknownError, NotImplementedError) as unknown:  # the latter from a mixer that names a kernel
            _say(f"it has {unknown}")
        except KernelError as error:
            if kernel_mode() == "require":
                raise
            _say(str(error))
        _known[model] = key, found
    return None if isinstance(found, threading.Thread) else found


def weighed(tensors: Sequence[Tensor]) -> list[int]:
    """A sum of the bits of each tensor, weighed by their places, where they are: to copy a model of 80 MB from a GPU and sum it
    up there takes a tenth of a second."""
    sums = []
    for x in tensors:
        places = torch.arange(x.nbytes, device=x.device) * 0x9E3779B1 % 0xFFFFFFFB
        sums.append((x.reshape(-1).view(torch.uint8) * places).sum())
    return [int(each) for each in sums]  # which may be on several devices


def _say(why: str) -> None:
    log.warning("elman: this model is decoded step by step, not by one launch: %s", why)


def _make(model: LadderForCausalLM, wait: bool, blocks: int | None = None, **limits: int) -> Program | threading.Thread:
    """The program, or what compiles it."""
    like, tensors = model.model.embed_tokens.weight, dict([*model.named_parameters(), *model.named_buffers()])
    shared = 227 << 10
    if like.is_cuda:
        found: Any = torch.cuda.get_device_properties(like.device)
        shared = found.shared_memory_per_block_optin
    if any(block.mixer.state_growth != "constant" for block in model.model.layers):
        raise UnknownError("a state that grows")

    def copied(dtype: torch.dtype) -> dict[str, Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            given = {name: dtype if x.is_floating_point() else x.dtype for name, x in tensors.items()}
            return {name: x.detach().to("cpu", given[name], copy=True) for name, x in tensors.items()}

    def step(copies: dict[str, Tensor], token_11: Tensor, states: _States) -> tuple[Tensor, Any]:
        cache = LadderCache.from_states([state if state is None else dict(state) for state in states])
        out = functional_call(model, copies, (token_11,), {"past_key_values": cache, "use_cache": True})
        return out.logits[0, -1], cache.states

    copies = copied(torch.float64)  # the truth of `_check`, and no library has an LSTM for it
    there = {copy.untyped_storage().data_ptr(): tensors[name] for name, copy in copies.items()}

    def placed(x: Tensor) -> Tensor:
        source = there.get(x.untyped_storage().data_ptr())
        if source is not None and source.dtype == like.dtype and source.shape == x.shape and x.is_contiguous():
            return source.detach()
        return x.to(like.device, like.dtype).contiguous()

    blank = [block.mixer.state_spec(block.mixer.dim, block.mixer.config) for block in model.model.layers]
    states = [
        {name: torch.zeros(1, *shape, dtype=torch.float64) for name, (shape, _) in spec.items()} for spec in blank
    ]
    exact = partial(step, copies)
    try:
        # Forward-mode derivatives, of which there are none, keep kernels out; with gradients no product is padded.
        with torch.inference_mode(False), torch.enable_grad(), forward_ad.dual_level():
            logits, changed = record(exact, states)
        source = write(logits, changed, like.element_size(), shared, **limits)
    except (UnknownError, NotImplementedError, KernelError):
        raise
    except Exception as fault:  # steps write the text without it
        raise KernelError(f"its program cannot be written ({type(fault).__name__}: {fault}): report it") from fault
    module = extension(source.text, like.dtype, like.device)
    if not wait and (thread := compiling(module)) is not None:
        return thread
    program = Program(source, module, like.device, placed, blocks)
    # It computes in float32, from weights that are rounded to the model's dtype where they are made from others.
    stored = all(torch.equal(w.to(like.dtype).to(w.dtype), w) for w in source.weights)
    dtype = torch.float32 if stored else like.dtype
    with torch.inference_mode():
        _check(program, exact, states, partial(step, copied(dtype)), dtype)
    return program


def _check(program: Program, exact: _Run, states: _States, near: _Run, dtype: torch.dtype) -> None:
    """Compare a few steps of a new program with the recorded function.

    Args:
        near: the same in this dtype, whose error says how much rounding costs.

    Raises:
        KernelError: a state, or the logit of a byte that it drew, is further off than rounding takes it.
    """

    def off(x: Tensor, right: Tensor) -> float:
        return float((x - right).norm() / (right.norm() or 1))

    token = torch.zeros(1, 1, dtype=torch.long)
    run, truth, rounded = Run(program, by_name(states), token.to(program.device)), states, [None] * len(states)
    shown = torch.zeros(1, dtype=torch.long, device=program.device)
    seen = torch.zeros(program.source.classes, dtype=torch.bool, device=program.device)
    usual = 0.0  # the largest error by rounding, of any state: a single one can be small by chance
    for _ in range(_CHECKED):
        run.draw(shown, None, seen, penalty=1.0, temperature=0.0, top_k=0, top_p=1.0)
        (logits, truth), (others, rounded) = exact(token, truth), near(token, rounded)
        if (drawn := int(shown)) < 0:
            check_errors(program.device)
        found = by_name(rounded)
        usual = max(usual, off(others, logits), *(off(found[key], right) for key, right in by_name(truth).items()))
        most = 2 * limit_of(dtype, usual) * float(logits.norm())  # two logits, each as far off as all
        if drawn < 0 or float(logits.max() - logits[drawn]) > most:
            raise KernelError(f"the program of this model drew byte {drawn}, which plain PyTorch does not: report it")
        token = torch.tensor([[drawn]])
    saved = {key: torch.empty_like(x, device=program.device) for key, x in by_name(states).items()}
    run.save(saved)
    for key, right in by_name(truth).items():
        error = off(saved[key].cpu(), right)
        if not error <= limit_of(dtype, usual):
            raise KernelError(
                f"the program of this model computes another state {key[1]} of layer {key[0]}: {error:.1e} off"
            )
