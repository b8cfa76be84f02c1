"""A recorded step of a model, T = 1 and B = 1, as pointwise operations and reductions, whatever its variant.

Every operation that depends on the token or on a state becomes a `Node`; whatever depends on weights alone is a constant. An
operation without a rule here raises `UnknownError`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .tape import POINTWISE, SAME, Operation, Tape, memory

Index = list[str]
"""C expressions, one for each dimension."""
Shape = tuple[int, ...]
Value = Callable[["Node", Index], str]
"""The C expression of an element."""


class UnknownError(Exception):
    """The step does something that has no rule; the text names it."""


@dataclass(eq=False)
class Node:
    """A tensor of the step.

    Attributes:
        expr: `expr(value, index)` is an element, where `value` gives those of other nodes.
        args: the nodes that it reads.
        view: whether it renames elements of args[0], or is a number.
        combine: of a reduction, "sum" or "max" of `expr` over a further, last index below `over`; else "".
        weight: of a product with a constant matrix (N, K): x is args[0], (M, K), and the node (M, N). Where the node is
            (H, 1, N), x (H, 1, K), there are H blocks, and the weight is (H N, K).
        terms: of a sum of vectors, these vectors.
        moves: whether each element is one of an argument's, as in a concatenation.
        leaf: a constant's tensor, or whatever names an input.
    """

    shape: Shape
    expr: Callable[[Value, Index], str] = lambda _value, _index: ""
    args: Sequence[Node] = ()
    view: bool = False
    combine: str = ""
    over: int = 1
    weight: Tensor | None = None
    terms: Sequence[Node] = ()
    moves: bool = False
    leaf: Any = None
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = math.prod(self.shape)

    @property
    def constant(self) -> bool:
        return isinstance(self.leaf, Tensor)


def flat(index: Index, shape: Shape) -> str:
    """The place of an element of a contiguous tensor."""
    terms, step = list[str](), 1
    for i, size in zip(reversed(index), reversed(shape), strict=True):
        if size != 1 and i != "0":
            terms.insert(0, i if step == 1 else f"{i} * {step}")
        step *= size
    return f"({' + '.join(terms)})" if terms and (len(terms) > 1 or "*" in terms[0]) else (terms or ["0"])[0]


def unflat(place: str, shape: Sequence[int]) -> Index:
    """The index of the element at a place."""
    made, step, left = list[str](), 1, math.prod(shape)
    for size in reversed(shape):
        left //= size
        i = place if step == 1 else f"({place} / {step})"
        made.insert(0, "0" if size == 1 else i if left == 1 else f"({i} % {size})")
        step *= size
    return made


@functools.lru_cache(256)  # a model asks for about a hundred; each has as many numbers as a vector
def values(text: str, name: str = "", count: int = 1) -> list[int] | None:
    """The numbers that an index of C takes where `name` is each number below `count`; None if it depends on more. Without a
    name, it is that of the row in the index, which says how many there are."""
    if not name and (row := re.search(r"\brow(\d+)\b", text)):
        name, count = row[0], int(row[1])
    try:
        place = compile(text.replace("/", "//"), "place", "eval")
        return [eval(place, {"within": lambda i, size: min(max(i, 0), size - 1), name: i}) for i in range(count)]
    except (NameError, SyntaxError):
        return None


def same(text: str, name: str, count: int) -> bool:
    """Whether an index of C is `name`, for all numbers below `count`."""
    return text == name or (name in re.findall(r"\w+", text) and values(text, name, count) == [*range(count)])


def _reshaped(x: Node, shape: Shape) -> Node:
    if [s for s in shape if s != 1] == [s for s in x.shape if s != 1]:

        def move(index: Index) -> Index:
            rest = iter(i for i, size in zip(index, shape, strict=True) if size != 1)
            return ["0" if size == 1 else next(rest) for size in x.shape]
    else:

        def move(index: Index) -> Index:
            return unflat(flat(index, shape), x.shape)

    return _view(x, shape, move)


def _view(x: Node, shape: Shape, move: Callable[[Index], Index]) -> Node:
    return Node(shape, lambda value, index: value(x, move(index)), [x], view=True)


def _broadcast(index: Index, shape: Shape) -> Index:
    return ["0" if size == 1 else i for i, size in zip(index[len(index) - len(shape) :], shape, strict=True)]


def number(x: float) -> Node:
    """A number as a tensor without dimensions."""
    text = f"{float(x)!r}f" if math.isfinite(x) else f"({'-' * (x < 0)}INFINITY)"
    return Node((), lambda _value, _index: f"({text})" if x < 0 else text, view=True)


def pointwise(form: str, shape: Shape, *args: Any) -> Node:
    """An operation on nodes and numbers, of elements at the same index."""
    if len(args) != len(set(re.findall(r"{(\d)}", form))):
        raise TypeError("an argument that the form does not have")
    nodes = [x if isinstance(x, Node) else number(x) for x in args]
    return Node(shape, lambda value, i: f"({form.format(*(value(n, _broadcast(i, n.shape)) for n in nodes))})", nodes)


def _added(shape: Shape, a: Any, b: Any) -> Node:
    """a + b. Two products of vectors with the same weights become one: W x + W h = W (x + h), so W is read once."""
    if not (isinstance(a, Node) and isinstance(b, Node) and a.count == b.count == max(shape)):
        return pointwise("{0} + {1}", shape, a, b)
    terms, known = [*_terms(a), *_terms(b)], dict[tuple[Any, ...], Node]()
    for term in terms:
        if (w := term.weight) is None:
            continue
        first = known.setdefault((w.data_ptr(), w.shape, w.stride()), term)
        if first is not term:
            x = pointwise("{0} + {1}", term.args[0].shape, first.args[0], term.args[0])
            both = Node(term.shape, args=[x], combine="sum", over=term.over, weight=w)
            a, *rest = (_reshaped(t, shape) for t in (both, *(t for t in terms if t not in (first, term))))
            return functools.reduce(lambda x, y: _added(shape, x, y), rest, a)
    made = pointwise("{0} + {1}", shape, a, b)
    made.terms = terms
    return made


def _terms(x: Node) -> Sequence[Node]:
    """The vectors of which a vector is the sum."""
    while x.view and x.args and x.args[0].count == x.count == max(x.args[0].shape):
        x = x.args[0]
    return x.terms or [x]


def _reduced(combine: str, x: Node, shape: Shape, dims: Any = None) -> Node:
    rank = len(x.shape)
    dims = [d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))]
    kept, sizes = [d for d in range(rank) if d not in dims], [x.shape[d] for d in dims]

    def expr(value: Value, index: Index) -> str:
        at = dict(zip(kept, index[:-1], strict=True)) | dict(zip(dims, unflat(index[-1], sizes), strict=True))
        return value(x, [at[d] for d in range(rank)])

    small = tuple(x.shape[d] for d in kept)
    return _reshaped(Node(small, expr, [x], combine=combine, over=math.prod(sizes)), shape)


def _product(a: Node, b: Node, shape: Shape) -> Node:
    """(…, M, K) times (…, K, N); a product with weights where a factor is constant."""
    if len(shape) == 2 and b.constant and not a.constant:
        return Node(shape, args=[a], combine="sum", over=a.shape[1], weight=b.leaf.t())
    if len(shape) == 2 and a.constant and not b.constant:
        return _turned(Node(shape[::-1], args=[_turned(b)], combine="sum", over=a.shape[1], weight=a.leaf))

    if len(shape) == 3 and shape[1] == 1 and b.constant and not a.constant:  # a block of weights for each vector
        return Node(shape, args=[a], combine="sum", over=a.shape[-1], weight=b.leaf.mT.flatten(0, 1))

    def expr(value: Value, index: Index) -> str:
        *group, m, n, k = index
        return f"{value(a, [*group, m, k])} * {value(b, [*group, k, n])}"

    return Node(shape, expr, [a, b], combine="sum", over=a.shape[-1])


def _turned(x: Node) -> Node:
    return _view(x, x.shape[::-1], lambda i: i[::-1])


def _part(x: Node, whole: Tensor, part: Tensor) -> Node:
    """A view whose dimensions each step along one of `whole`, which is the tensor of x."""
    at = int(part.storage_offset() - whole.storage_offset())
    starts, steps = [0] * whole.dim(), dict[int, list[tuple[int, int]]]()
    walked = sorted((step, d) for d, step in enumerate(whole.stride()) if step and whole.shape[d] > 1)
    for step, d in reversed(walked):
        starts[d], at = divmod(at, step)
    for i, step in enumerate(part.stride()):
        if step and part.shape[i] > 1:
            least, d = max((s for s in walked if s[0] <= step), default=(step + 1, 0))
            if step % least:
                raise UnknownError("a view across dimensions")
            steps.setdefault(d, []).append((i, step // least))

    def along(index: Index, d: int) -> str:
        terms = [index[i] if step == 1 else f"({index[i]} * {step})" for i, step in steps.get(d, [])]
        terms = [str(starts[d]), *terms] if starts[d] or not terms else terms
        return terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"

    return _view(x, tuple(part.shape), lambda index: [along(index, d) for d in range(whole.dim())])


def _repeated(shape: Shape, x: Node, _times: Sequence[int]) -> Node:
    def move(index: Index) -> Index:
        whole = _broadcast(index, x.shape)
        return [
            i if size == n else f"({i} % {size})"
            for i, size, n in zip(whole, x.shape, shape[len(shape) - len(whole) :], strict=True)
        ]

    return _view(x, shape, move)


def _cat(shape: Shape, parts: Sequence[Node], dim: int = 0) -> Node:
    dim %= len(shape)

    def expr(value: Value, index: Index) -> str:
        made, end, i = "", shape[dim], index[dim]
        if len(parts) > 1 and (known := values(i)):  # of one part alone
            start = 0
            for part in parts:
                if start <= min(known) and max(known) < start + part.shape[dim]:
                    return value(part, [*index[:dim], f"({i} - {start})" if start else i, *index[dim + 1 :]])
                start += part.shape[dim]
        for part in reversed(parts):
            end -= part.shape[dim]
            at = "0" if part.shape[dim] == 1 else i if len(parts) == 1 else f"within({i} - {end}, {part.shape[dim]})"
            one = value(part, [*index[:dim], at, *index[dim + 1 :]])
            made = f"({i} < {end + part.shape[dim]} ? {one} : {made})" if made else one
        return made

    return Node(shape, expr, parts, moves=True)


def _stack(shape: Shape, parts: Sequence[Node], dim: int = 0) -> Node:
    dim %= len(shape)
    one = (*shape[:dim], 1, *shape[dim + 1 :])
    return _cat(shape, [_view(p, one, lambda i: [*i[:dim], *i[dim + 1 :]]) for p in parts], dim)


def _softmax(shape: Shape, x: Node, dim: int, _half: bool) -> Node:
    thin = tuple(1 if d == dim % len(shape) else s for d, s in enumerate(shape))
    power = pointwise("expf({0} - {1})", shape, x, _reduced("max", x, thin, dim))
    return pointwise("{0} / {1}", shape, power, _reduced("sum", power, thin, dim))


def _norm(shape: Shape, x: Node, order: float = 2, dims: Any = None, _keep: bool = False) -> Node:
    if order != 2:
        raise UnknownError(f"aten::linalg_vector_norm of order {order}")
    return pointwise("sqrtf({0})", shape, _reduced("sum", pointwise("{0} * {0}", x.shape, x), shape, dims))


def _affine(shape: Shape, x: Node, gain: Node | None, bias: Node | None) -> Node:
    x = x if gain is None else pointwise("{0} * {1}", shape, x, gain)
    return x if bias is None else pointwise("{0} + {1}", shape, x, bias)


def _layer_norm(shape: Shape, x: Node, sizes: Sequence[int], gain: Any, bias: Any, eps: float) -> Node:
    thin, dims = (*shape[: -len(sizes)], *[1] * len(sizes)), list(range(-len(sizes), 0))

    def mean(y: Node) -> Node:
        return pointwise("{0} / {1}", thin, _reduced("sum", y, thin, dims), math.prod(sizes))

    apart = pointwise("{0} - {1}", shape, x, mean(x))
    made = pointwise("{0} / sqrtf({1} + {2})", shape, apart, mean(pointwise("{0} * {0}", shape, apart)), eps)
    return _affine(shape, made, gain, bias)


def _group_norm(
    shape: Shape, x: Node, gain: Any, bias: Any, rows: int, channels: int, each: int, groups: int, eps: float
) -> Node:
    grouped = (rows, groups, channels // groups * each)
    made = _layer_norm(grouped, _reshaped(x, grouped), grouped[2:], None, None, eps)
    column = (channels, *[1] * (len(shape) - 2))
    return _affine(shape, _reshaped(made, shape), *(w and _reshaped(w, column) for w in (gain, bias)))


def _clamp(shape: Shape, x: Node, low: Any = None, high: Any = None) -> Node:
    made = x if low is None else pointwise("fmaxf({0}, {1})", shape, x, low)
    return made if high is None else pointwise("fminf({0}, {1})", shape, made, high)


_POINTWISE = {
    **POINTWISE, "rsqrt": "rsqrtf({0})", "expm1": "expm1f({0})", "log1p": "log1pf({0})", "cos": "cosf({0})",
    "sin": "sinf({0})", "round": "rintf({0})", "rsub": "{1} - {0}", "lerp": "{0} + {2} * ({1} - {0})",
    "log_sigmoid_forward": POINTWISE["log_sigmoid"], "clamp_min": "fmaxf({0}, {1})", "clamp_max": "fminf({0}, {1})",
    "where": "{0} != 0.f ? {1} : {2}", "eq": "{0} == {1} ? 1.f : 0.f", "ne": "{0} != {1} ? 1.f : 0.f",
    "lt": "{0} < {1} ? 1.f : 0.f", "le": "{0} <= {1} ? 1.f : 0.f", "gt": "{0} > {1} ? 1.f : 0.f",
    "ge": "{0} >= {1} ? 1.f : 0.f",
}  # fmt: skip
_RULES: dict[str, Callable[..., Node]] = {
    **{name: functools.partial(pointwise, form) for name, form in _POINTWISE.items()},
    **{name: lambda shape, x, *_: _reshaped(x, shape) for name in SAME},
    "add": _added,
    "cat": _cat, "stack": _stack, "repeat": _repeated,
    "sum": lambda shape, x, dims=None, _keep=False: _reduced("sum", x, shape, dims),
    "amax": lambda shape, x, dims=None, _keep=False: _reduced("max", x, shape, dims),
    "mean": lambda shape, x, dims=None, _keep=False: pointwise(
        "{0} / {1}", shape, _reduced("sum", x, shape, dims), x.count / math.prod(shape)
    ),
    "linalg_vector_norm": _norm, "_softmax": _softmax, "native_layer_norm": _layer_norm, "native_group_norm": _group_norm,
    "pow": lambda shape, x, y: pointwise("{0} * {0}", shape, x) if y == 2 else pointwise("powf({0}, {1})", shape, x, y),
    "clamp": _clamp,
    "mm": lambda shape, a, b: _product(a, b, shape), "bmm": lambda shape, a, b: _product(a, b, shape),
    "mv": lambda shape, a, x: _reshaped(_product(a, _reshaped(x, (*x.shape, 1)), (*shape, 1)), shape),
    "addmm": lambda shape, bias, a, b: _added(
        shape, _product(a, b, shape), _reshaped(bias, shape) if math.prod(shape) == bias.count else bias
    ),
    "embedding": lambda shape, table, token: Node(
        shape, lambda value, i: value(table, ["token", i[-1]]), [table, token]
    ),
}  # fmt: skip
_LAYOUT = {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format", "implicit"}


def _results(operation: Operation, of: Callable[[Tensor], Node]) -> dict[int, Node | None]:
    """The nodes of what an operation returned, by id; None for what nothing may read. of: gives those of its arguments."""
    func, args, kwargs, out = operation
    name, keywords = operation.name, kwargs.keys() - _LAYOUT
    first, *others = out if isinstance(out, list | tuple) else [out]
    if name not in SAME and isinstance(first, Tensor) and not operation.makes and not operation.writes:
        return {id(x): _part(of(args[0]), args[0], x) for x in (first, *others)}
    cut = name == "_to_copy" and not first.is_floating_point()
    if cut or keywords or func.namespace != "aten" or name not in _RULES or not isinstance(first, Tensor):
        raise UnknownError(" ".join([func.name(), *keywords]))
    try:
        made = _RULES[name](tuple(first.shape), *tree_map_only(Tensor, of, args))
    except (TypeError, IndexError) as error:
        raise UnknownError(f"{func.name()} with {len(args)} arguments") from error
    return {id(first): made, **dict.fromkeys(map(id, others))}


def record(
    step: Callable[[Tensor, Sequence[Mapping[str, Tensor]]], tuple[Tensor, Sequence[Mapping[str, Tensor]]]],
    states: Sequence[Mapping[str, Tensor]],
) -> tuple[Node, dict[tuple[int, str], tuple[Node, Node]]]:
    """(logits (V,), {(layer, name): (state before, state after)}) of `step(token (1, 1), states) -> (logits, states)`.

    The step runs once, on a processor and in plain PyTorch.

    Raises:
        UnknownError: the step does something that has no rule.
    """
    token = torch.zeros(1, 1, dtype=torch.long)
    before = {(i, name): x for i, state in enumerate(states) for name, x in state.items()}
    with Tape(host=True) as tape:
        logits, after = step(token, states)
    nodes: dict[int, Node | None] = {
        id(x): Node(tuple(x.shape), leaf=leaf) for leaf, x in [("token", token), *before.items()]
    }

    def of(x: Tensor) -> Node:
        if id(x) not in nodes:  # a constant
            nodes[id(x)] = Node(tuple(x.shape), leaf=x.detach()) if x.dim() else number(x.item())
        if (found := nodes[id(x)]) is None:
            raise UnknownError("a result that only a backward reads")
        return found

    for operation, varies in zip(tape.operations, tape.varying(memory([token, *before.values()])), strict=True):
        if varies:
            nodes |= _results(operation, of)
    return _reshaped(of(logits), (logits.numel(),)), {
        key: (of(x), of(after[key[0]][key[1]])) for key, x in before.items()
    }
