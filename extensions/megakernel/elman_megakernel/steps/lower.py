"""Operations as instructions of `elman/program_cpu.h`: lists of whole numbers. They compute in float32, whatever is stored."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elman_core.extension import CPU_DTYPES, DTYPE_CODES
from elman_megakernel.tape import POINTWISE, SAME, Operation

CODES = {name: i for i, name in enumerate([*POINTWISE, "sum", "vecdot", "embedding", "linear", "matmul", "draw"])}
LOWERED = {
    *POINTWISE, *SAME, "rsub", "_foreach_copy", "cat", "stack", "sum", "mean", "linalg_vecdot", "embedding", "linear",
    "addmm", "matmul", "mm", "bmm",
}  # fmt: skip
STORED = {dtype: DTYPE_CODES[dtype] for dtype in CPU_DTYPES}
INT8 = 4  # of weights alone, with a factor for each row
WORDS = 38  # of an instruction

Instruction = list[int]


class UnknownOperationError(Exception):
    """There is no instruction for an operation."""


def name_of(func: Any) -> str | None:
    """The name of an operator that may have instructions, the same in place."""
    name = str(func.overloadpacket.__name__).rstrip("_")
    return name if name in {"aten": LOWERED, "elman": {"draw"}}.get(func.namespace, ()) else None


def lower(operation: Operation, held: list[Tensor]) -> list[Instruction]:
    """The instructions that repeat an operation.

    Args:
        held: receives what they read and nobody else keeps.

    Raises:
        UnknownOperationError: it must be repeated in Python.
    """
    func, args, kwargs, out = operation
    name = name_of(func)
    if name == "draw":
        return [_draw(*args)]
    if name == "_foreach_copy":
        return [_pointwise("copy", to, of) for to, of in zip(args[0], args[1], strict=True)]
    if name is None or not isinstance(out, Tensor):
        raise UnknownOperationError
    if name == "copy" and operation.writes:
        return [_pointwise("copy", out, args[1])]
    if name in (*SAME, "copy"):
        return [_pointwise("copy", out.view(args[0].shape), args[0])]
    if name == "rsub":
        name, args = "sub", args[1::-1]
    if form := POINTWISE.get(name):
        if len(args) != len(set(re.findall(r"{\d}", form))) or kwargs.keys() - {"alpha", "value", "out"}:
            raise UnknownOperationError
        numbers = [torch.tensor(float(x)) for x in args if not isinstance(x, Tensor)]
        held += numbers
        inputs = [x if isinstance(x, Tensor) else numbers.pop(0) for x in args]
        return [_pointwise(name, out, *inputs, number=kwargs.get("alpha", kwargs.get("value", 1)))]
    if name in ("cat", "stack"):
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        parts = args[0] if name == "cat" else [x.unsqueeze(dim) for x in args[0]]
        places = out.split([x.shape[dim] for x in parts], dim)
        return [_pointwise("copy", to, of) for to, of in zip(places, parts, strict=True)]
    if name in ("sum", "mean"):
        dim = args[1][0] if len(args) > 1 and args[1] is not None and len(args[1]) == 1 else None
        return [_reduced("sum", out, dim, args[2:] == (True,), *args[:1], mean=name == "mean")]
    if name == "linalg_vecdot":
        return [_reduced("vecdot", out, kwargs.get("dim", -1), False, *args)]
    if name == "embedding":
        return [_embedding(out, *args[:2])]
    if name == "linear":
        return [_linear(out, *args)]
    if kwargs.keys() - {"out"}:
        raise UnknownOperationError
    if name == "addmm":
        return [_linear(out, args[1], args[2].mT, args[0])]
    x, y = args
    if y.dim() == 2 and y.stride(0) == 1:
        return [_linear(out, x, y.mT)]
    return _matmul(out, x, y)


def _made(
    code: str, sizes: Sequence[int], *operands: tuple[Tensor, Sequence[int]], numbers: Sequence[float] = (1, 0, 0)
) -> Instruction:
    """An instruction of these sizes; each operand with its strides."""
    words = [CODES[code], *sizes, *struct.unpack("3q", struct.pack("3d", *numbers))]
    for x, steps in operands:
        if x.device.type != "cpu" or (x.dtype not in STORED and code not in ("embedding", "draw")):
            raise UnknownOperationError
        words += [x.data_ptr(), STORED.get(x.dtype, 0), *steps]
    return words + [0] * (WORDS - len(words))


def read_narrow(
    instruction: Instruction, narrow: Mapping[int, int], int8: Mapping[tuple[int, ...], tuple[Tensor, Tensor]]
) -> Instruction:
    """A product that reads the bfloat16 of which its weight is a float32 copy, or its weight in int8; others as they are.

    Args:
        narrow: the address of the bfloat16, by that of the copy. int8: numbers and factors, by address, rows, columns, step.
    """
    made, weight, factors = list(instruction), 8 + 2 * 6, 8 + 4 * 6  # words of the third operand and the fifth
    if made[0] != CODES["linear"]:
        return made
    if found := int8.get((made[weight], *made[2:4], made[weight + 3])):
        made[weight : weight + 2] = found[0].data_ptr(), INT8
        made[factors : factors + 2] = found[1].data_ptr(), STORED[torch.float32]
    elif made[weight] in narrow:
        made[weight : weight + 2] = narrow[made[weight]], STORED[torch.bfloat16]
    return made


def _lined(sizes: Sequence[int], xs: Sequence[Tensor], most: int = 4) -> tuple[list[int], list[list[int]]]:
    """The sizes, `most` of them, and the strides of each tensor: dimensions that lie evenly in all tensors are joined."""
    made: list[tuple[int, list[int]]] = []
    for i, size in enumerate(sizes):
        steps = [x.stride(i) for x in xs]
        if size == 1:
            continue
        if made and all(before == step * size for before, step in zip(made[-1][1], steps, strict=True)):
            made[-1] = made[-1][0] * size, steps
        else:
            made.append((size, steps))
    if len(made) > most:
        raise UnknownOperationError
    made = [(1, [0] * len(xs))] * (most - len(made)) + made
    return [size for size, _ in made], [[steps[k] for _, steps in made] for k in range(len(xs))]


def _pointwise(code: str, out: Tensor, *given: Tensor, number: float = 1) -> Instruction:
    operands = [out, *(x.expand(out.shape) for x in given)]
    sizes, steps = _lined(out.shape, operands)
    return _made(code, sizes, *zip(operands, steps, strict=True), numbers=(number, 0, 0))


def _reduced(code: str, out: Tensor, dim: int | None, keepdim: bool, *given: Tensor, mean: bool = False) -> Instruction:
    if dim is None or len({x.shape for x in given}) != 1:
        raise UnknownOperationError
    last = [x.movedim(dim, -1) for x in given]
    size, operands = given[0].shape[dim], [out.squeeze(dim) if keepdim else out, *(x.select(-1, 0) for x in last)]
    sizes, steps = _lined(operands[0].shape, operands, 3)
    along = [0, *(x.stride(-1) for x in last)]
    each = [(x, [*step, s]) for x, step, s in zip(operands, steps, along, strict=True)]
    return _made(code, [*sizes, size], *each, numbers=(1 / size if mean else 1, 0, 0))


def _embedding(out: Tensor, table: Tensor, numbers: Tensor) -> Instruction:
    width = table.shape[1]
    if table.stride(1) != 1 or numbers.dtype != torch.int64 or not numbers.is_contiguous() or not out.is_contiguous():
        raise UnknownOperationError
    steps = [(out, [0, 0, width, 1]), (table, [0, 0, table.stride(0), 1]), (numbers, [0, 0, 1, 0])]
    return _made("embedding", [1, 1, numbers.numel(), width], *steps)


def _draw(logits: Tensor, waits: Tensor | None, seen: Tensor, drawn: Tensor, shown: Tensor, *how: float) -> Instruction:
    (rows, classes), (*numbers, top_k) = logits.shape, how
    given = [drawn, shown, logits, seen, *([] if waits is None else [waits])]
    if any(x.stride(-1) != 1 for x in given):
        raise UnknownOperationError
    operands = [(x, [0, x.stride(0), 0, 1]) for x in given]
    return _made("draw", [1, rows, int(top_k), classes], *operands, numbers=numbers)


def _linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Instruction:
    if weight.dim() != 2 or weight.stride(1) != 1 or x.shape[-1:] != weight.shape[1:]:
        raise UnknownOperationError
    ends = [out, x, *([] if bias is None else [bias.expand(out.shape)])]
    (rows,), steps = _lined(x.shape[:-1], ends, 1)
    operands = [(part, [*step, 0, 0, part.stride(-1)]) for part, step in zip(ends, steps, strict=True)]
    if any(end[-1] != 1 for _, end in operands[:2]):
        raise UnknownOperationError
    operands.insert(2, (weight, [0, weight.stride(0), 0, 1]))
    return _made("linear", [rows, *weight.shape, 1], *operands)


def _matmul(out: Tensor, x: Tensor, y: Tensor) -> list[Instruction]:
    if min(x.dim(), y.dim()) < 2 or {t.dtype for t in (out, x, y)} != {torch.float32}:
        raise UnknownOperationError
    x, y = (t.expand(*out.shape[:-2], *t.shape[-2:]) for t in (x, y))
    try:
        (count,), steps = _lined(out.shape[:-2], [out, x, y], 1)
    except UnknownOperationError:
        return [
            each for parts in zip(out.unbind(-3), x.unbind(-3), y.unbind(-3), strict=True) for each in _matmul(*parts)
        ]
    operands = [(t, [*step, *t.stride()[-2:], 1]) for t, step in zip((out, x, y), steps, strict=True)]
    return [_made("matmul", [count, *out.shape[-2:], x.shape[-1]], *operands)]
