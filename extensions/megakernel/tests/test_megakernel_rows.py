"""What becomes of a row of a product before it is published: what a program may and may not take for a row's own."""

import functools

import pytest
import torch
from elman_megakernel.nodes import Node, pointwise, values
from elman_megakernel.rows import OPERANDS
from elman_megakernel.source import _AcrossError, _Writer

SHAPE = (1, 8)
GIVEN = Node(SHAPE, leaf=torch.ones(SHAPE))


def product(x):
    return Node(SHAPE, args=[x], combine="sum", over=8, weight=torch.zeros(8, 8))


def tanh(x):
    return pointwise("tanhf({0})", SHAPE, x)


def plus(*given):
    return functools.reduce(lambda a, b: pointwise("{0} + {1}", SHAPE, a, b), given)


def backwards(x):
    return Node(SHAPE, lambda value, index: value(x, [index[0], f"(7 - {index[1]})"]), [x], view=True)


def summed(x):
    return Node(SHAPE, lambda value, index: value(x, index[:2]), [x], combine="sum", over=2)


def rows(logits, **states):
    return _Writer(logits, {(0, name): both for name, both in states.items()}, set()).rows


def state():
    return Node(SHAPE, leaf="state")


def test_what_depends_on_a_row_alone_is_the_rows():
    p, before = product(GIVEN), state()
    after = tanh(plus(p, before))
    row = rows(product(after), h=(before, after))[p]
    assert (row.states, row.local) == ([(after, 0)], False)
    assert row.end.args == [after], "the product's vector, a copy of the state"


def test_what_later_rows_alone_read_is_not_published():
    gate, p = product(GIVEN), product(GIVEN)
    first = tanh(gate)
    end = pointwise("{0} * {1}", SHAPE, first, p)
    found = rows(product(end))
    assert [(found[x].end, found[x].local) for x in (gate, p)] == [(first, True), (end, False)]


@pytest.mark.parametrize(
    "end",
    [
        lambda p: plus(p, backwards(p)),
        lambda p: plus(p, summed(p)),
    ],
    ids=["reads another row", "a reduction in between"],
)
def test_a_row_keeps_to_itself(end):
    p = product(GIVEN)
    assert rows(product(end(p))) == {}


def test_a_row_reads_no_more_numbers_than_registers_hold():
    p = product(GIVEN)
    for more in (0, 1):
        end = plus(p, *(Node(SHAPE, leaf=torch.ones(SHAPE)) for _ in range(OPERANDS + more)))
        assert (rows(product(end))[p].end is end) == (not more)


def test_what_two_read_is_published():
    p = product(GIVEN)
    assert rows(product(plus(product(tanh(p)), product(p)))).get(p) is None


def test_the_row_of_another_number_is_published():
    gate, p = product(GIVEN), product(GIVEN)
    first = tanh(gate)
    found = rows(product(pointwise("{0} * {1}", SHAPE, backwards(first), p)))
    assert (found[gate].local, p in found) == (False, False)


@pytest.mark.parametrize("how", ["read by a product", "read at another row", "read after it was written"])
def test_a_state_that_more_than_its_row_reads_is_every_blocks(how):
    p, before = product(GIVEN), state()
    after = tanh(plus(p, backwards(before) if how == "read at another row" else before))
    logits = [product(after)]
    if how == "read by a product":
        logits.append(product(before))
    if how == "read after it was written":
        logits.append(product(plus(product(GIVEN), before)))
    found = rows(product(plus(*logits)), h=(before, after))
    assert not any(row.states for row in found.values())


def test_what_an_index_takes_is_not_remembered_for_every_model_that_ever_was():
    assert [values(f"(i + {n})", "i", 2) for n in range(1000)] == [[n, n + 1] for n in range(1000)]
    assert values.cache_info().currsize < 1000


def test_a_row_that_another_row_reads_too_is_published():
    gate = product(GIVEN)
    first = tanh(gate)
    second, third = product(tanh(product(GIVEN))), product(tanh(product(GIVEN)))
    same_row = pointwise("{0} * {1}", SHAPE, first, second)
    other_row = pointwise("{0} * {1}", SHAPE, backwards(first), third)
    found = rows(product(plus(product(same_row), product(other_row))))
    assert (found[gate].end, found[gate].local) == (first, False)
    assert {second, third} <= found.keys()


def test_what_each_block_computes_for_a_row_is_no_rows_own():
    p, before = product(GIVEN), state()
    after = tanh(plus(p, before))
    both = tanh(before)  # kept, since two read it
    second = product(after)
    end = pointwise("{0} * {1} * {1}", SHAPE, second, both)
    third = pointwise("{0} * {1}", SHAPE, product(end), both)
    assert not any(row.states for row in rows(product(third), h=(before, after)).values())


def test_a_state_that_reads_a_sum_of_its_rows_is_every_blocks():
    p, before = product(GIVEN), state()
    end = tanh(p)
    after = plus(p, tanh(summed(end)), before)
    assert not any(row.states for row in rows(product(end), h=(before, after)).values())


def test_a_large_state_that_a_product_becomes_is_every_blocks():
    before = state()
    p = product(tanh(product(GIVEN)))
    _Writer(product(tanh(p)), {(0, "S"): (before, p)}, set())
    for after in (p, tanh(p), before):
        with pytest.raises(_AcrossError):
            _Writer(product(tanh(p)), {(0, "S"): (before, after)}, {before})


def test_what_a_row_that_is_not_published_reads_is_computed_first():
    mean = pointwise(
        "{0} / 8", (1, 1), Node((1, 1), lambda value, i: value(GIVEN, [i[0], i[2]]), [state()], combine="sum", over=8)
    )
    gate, p = product(GIVEN), product(GIVEN)
    end = pointwise("{0} * {1}", SHAPE, pointwise("{0} * {1}", SHAPE, gate, mean), p)
    writer = _Writer(product(end), {}, set())
    assert writer.rows[gate].local
    assert writer.beside(gate) == mean.args
