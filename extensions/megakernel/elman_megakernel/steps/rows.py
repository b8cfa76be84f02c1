"""A recorded step for any number of rows.

Recordings of two rows and of three differ where something depends on the rows: in words of instructions, shapes of tensors and
sizes of memory, all of them linear in the number. So one pair serves every batch, and a row gets the same bits in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from elman_megakernel.tape import Operation, memory, tensors

from .lower import WORDS
from .program import Program, call

_NUMBERS, _ADDRESSES = slice(5, 8), slice(8, WORDS, 6)  # of an instruction's words
_CHECKED = (1, 5)

Storages = dict[int, torch.UntypedStorage]  # by the first address


class Recorded(NamedTuple):
    """given: the tensors (rows, …) that a caller fills and reads, each with memory of its own."""

    program: Program
    given: Sequence[Tensor]


class RowsProgram:
    """The step of `two` and `three`, which are recordings of as many rows, for any number of them.

    Raises:
        RuntimeError: an operation depends on the number of rows in another way.
    """

    def __init__(self, two: Recorded, three: Recorded) -> None:
        self.module, self.given = two.program.module, two.given
        self.parts = [*zip(two.program.parts, three.program.parts, strict=False)]
        if [_kind(part) for part in two.program.parts] != [_kind(part) for part in three.program.parts]:
            raise RuntimeError("its operations depend on the number of rows")
        mine, other = (program.storages() for program, _ in (two, three))
        self.code, self.starts = _code(two.program, mine)
        code, starts = _code(three.program, other)
        self.slope = code - self.code
        pairs = {*zip(self.starts.flatten().tolist(), starts.flatten().tolist(), strict=True)}
        for both in self.parts:
            pairs |= {*zip(*([_start(x) for x in tensors([part])] for part in both), strict=True)}
        if len(pairs) != len(dict(pairs)):
            raise RuntimeError("its memory depends on the number of rows")
        sizes = {a: (mine[a].nbytes(), other[b].nbytes()) for a, b in pairs if a in mine}
        self.sizes = {start: (size, more - size) for start, (size, more) in sizes.items() if more != size}
        self.held = [mine[start] for start in sizes.keys() - self.sizes.keys()]
        same = all(
            torch.equal(_bytes(mine[a]), _bytes(other[b]))
            for a, b in pairs
            if a != b and a not in self.sizes and a in mine
        )
        if not same or self.slope[:, _NUMBERS].any():
            raise RuntimeError("its numbers depend on the number of rows")
        operations = [part for part, _ in self.parts if isinstance(part, Operation)]
        made = {*self.starts[:, 0].tolist()} | memory([[each.makes, each.writes] for each in operations])
        made |= memory(self.given)
        self.rows = {
            start: _bytes(mine[start])[:more].clone() for start, (_, more) in self.sizes.items() if start not in made
        }
        self._check(two.program)

    def _check(self, two: Program) -> None:
        """Compare bits in other batches with those of two rows."""
        before = [x.clone() for x in self.given]
        two()
        for rows in _CHECKED:
            batch, same = Batch(self, rows), slice(max(0, rows - 2), rows)
            for x, value in zip(batch.given, before, strict=True):
                x[same] = value[:rows]
            batch.run(rows)
            for x, right in zip(batch.given, self.given, strict=True):
                if not torch.allclose(x[same], right[:rows], rtol=0, atol=0, equal_nan=True):
                    raise RuntimeError("the bits of a row depend on the number of rows")


class Batch:
    """Memory of a program for up to `most` rows.

    Attributes:
        given: (most, …), as of the recordings; of zeros.
    """

    def __init__(self, program: RowsProgram, most: int) -> None:
        self.program, self._rows, self._steps = program, 0, list[Callable[[], None]]()
        self.given = [x.new_zeros(most, *x.shape[1:]) for x in program.given]
        own = {_start(x): mine.untyped_storage() for x, mine in zip(program.given, self.given, strict=True)}
        self._memory = {
            start: own[start] if start in own else torch.UntypedStorage(size + (most - 2) * more)
            for start, (size, more) in program.sizes.items()
        }
        for start, row in program.rows.items():
            _bytes(self._memory[start]).view(-1, len(row))[:] = row
        self._starts = program.starts.clone()
        for start, mine in self._memory.items():
            self._starts[program.starts == start] = mine.data_ptr()

    def run(self, rows: int) -> None:
        """Run the step on the first rows of `given`."""
        if rows != self._rows:
            program, self._steps, at = self.program, [], 0
            code = program.code + (rows - 2) * program.slope
            code[:, _ADDRESSES] += self._starts
            for part, more in program.parts:
                if isinstance(part, Operation):
                    self._steps.append(tree_map(partial(self._sized, rows), part, more).again())
                else:
                    self._steps.append(call(program.module, code[at : at + len(part)], torch.get_num_threads()))
                    at += len(part)
            self._rows = rows
        for step in self._steps:
            step()

    def _sized(self, rows: int, two: Any, three: Any) -> Any:
        """What an operation of so many rows has in the place of these."""
        if type(two) is int:
            return two + (rows - 2) * (three - two)
        if not isinstance(two, Tensor) or _start(two) not in self._memory:
            return two
        size, step = (
            [self._sized(rows, *each) for each in zip(a, b, strict=True)]
            for a, b in ((two.shape, three.shape), (two.stride(), three.stride()))
        )
        offset = self._sized(rows, two.storage_offset(), three.storage_offset())
        return torch.empty(0, dtype=two.dtype).set_(self._memory[_start(two)], offset, size, step)  # type: ignore[call-overload]


def _start(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _bytes(memory: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(memory)  # type: ignore[call-overload]


def _kind(part: list[Any] | Operation) -> Any:
    return part.func if isinstance(part, Operation) else len(part)


def _code(program: Program, storages: Storages) -> tuple[Tensor, Tensor]:
    """All instructions, with offsets for addresses, and the starts of the memory that each operand is in."""
    code = torch.tensor([each for part in program.parts if not isinstance(part, Operation) for each in part])
    code = code.view(-1, WORDS)
    known = [(0, 1), *sorted((start, each.nbytes()) for start, each in storages.items())]
    starts, sizes = torch.tensor(known).mT.contiguous()
    places = torch.searchsorted(starts, code[:, _ADDRESSES].contiguous(), right=True) - 1
    code[:, _ADDRESSES] -= starts[places]
    if (code[:, _ADDRESSES] >= sizes[places]).any():
        raise RuntimeError("it reads memory that no operation shows")
    return code, starts[places]
