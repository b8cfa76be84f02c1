"""Check the inputs of operators against a table of names, sizes and dtypes; a tensor that does not fit is a one-line error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from elman_core.registry.errors import ConfigError

from .runtime import DTYPE_CODES, compute_dtype

_MOST_PASSED = 4096
_passed: dict[tuple[Any, ...], dict[str, int]] = {}


class Wanted(NamedTuple):
    """What one tensor must be.

    Attributes:
        shape: a letter for each size; equal letters are equal sizes, and "1" is one.
        dtype: "first": that of the first tensor; "computed": that or the dtype of its computation; "stored": any storage dtype.
        optional: whether it may be None.
    """

    shape: str
    dtype: Literal["first", "computed", "stored", "bool"] = "first"
    optional: bool = False


def check(
    kernel: str, wanted: Mapping[str, Wanted], given: Sequence[Any], sizes: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """Compare tensors with a table, in its order. The first one sets the dtype and the device.

    Comparing takes longer than a launch, so passed checks are remembered by kernel, shapes, dtypes and devices.

    Args:
        sizes: known sizes by their letters.

    Returns:
        all sizes by their letters.

    Raises:
        ConfigError: a tensor does not fit; names the first.
    """
    if torch.compiler.is_compiling():
        return _compare(kernel, wanted, given, sizes)
    try:
        key = (kernel, *[x is None or (x.shape, x.dtype, x.device) for x in given], *sizes.values())
    except AttributeError:  # not a tensor
        return _compare(kernel, wanted, given, sizes)
    if (found := _passed.get(key)) is None:
        if len(_passed) >= _MOST_PASSED:
            _passed.clear()
        found = _passed[key] = _compare(kernel, wanted, given, sizes)
    return found


def _compare(
    kernel: str, wanted: Mapping[str, Wanted], given: Sequence[Any], sizes: Mapping[str, int]
) -> dict[str, int]:
    first_name, first, known = next(iter(wanted)), given[0], {"1": 1, **sizes}

    def words(shape: str) -> str:
        return f"({', '.join(str(known.get(letter, letter)) for letter in shape)})"

    for (name, (shape, dtype, optional)), x in zip(wanted.items(), given, strict=True):
        if x is None and optional:
            continue
        if not isinstance(x, Tensor):
            raise ConfigError(f"{kernel}: {name} must be a tensor {words(shape)}, not {x!r}")
        if (
            x.dim() != len(shape)
            or 0 in x.shape
            or any(known.get(n, s) != s for n, s in zip(shape, x.shape, strict=True))
        ):
            beside = "" if x is first else f" beside {first_name} {tuple(first.shape)}"
            raise ConfigError(
                f"{kernel}: {name} must be {words(shape)}{beside} with every size at least 1, not {tuple(x.shape)}"
            )
        known.update(zip(shape, x.shape, strict=True))
        if x.dtype not in (dtypes := _dtypes(dtype, first)):
            names = ", ".join(str(each).removeprefix("torch.") for each in dtypes)
            beside = "" if x is first else f" beside {first_name} in {first.dtype}"
            raise ConfigError(f"{kernel}: {name} must be {names}{beside}, not {x.dtype}")
        if x.device != first.device:
            raise ConfigError(f"{kernel}: {name} is on {x.device}, {first_name} on {first.device}; move them together")
    return known


def _dtypes(kind: str, first: Tensor) -> Sequence[torch.dtype]:
    if kind == "stored":
        return tuple(DTYPE_CODES)
    if kind == "bool":
        return (torch.bool,)
    return (first.dtype,) if kind == "first" else (first.dtype, compute_dtype(first))
