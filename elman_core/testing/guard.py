"""A contract that is not weakened in silence."""

from __future__ import annotations

from typing import Any

CONTRACTS = __name__.rpartition(".")[0] + "."


class Guarded:
    """Base of the contracts: a plugin sets the knobs (what a contract annotates) and replaces nothing else.

    A test may be replaced only by one marked `xfail(reason=...)`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "test_contract_is_not_weakened" in vars(cls):
            raise TypeError(f"{cls.__name__} replaces test_contract_is_not_weakened")

    def test_contract_is_not_weakened(self) -> None:
        contract = [c for c in type(self).__mro__ if c.__module__.startswith(CONTRACTS)]
        knobs = {name for c in contract for name in vars(c).get("__annotations__", {})}
        for owner in type(self).__mro__:
            if owner in contract or owner is object:
                continue
            for name, value in vars(owner).items():
                if name in knobs or name.startswith("__") or not any(name in vars(c) for c in contract):
                    continue
                marks = [m for m in getattr(value, "pytestmark", ()) if m.name == "xfail" and m.kwargs.get("reason")]
                assert marks, f"{owner.__name__}.{name} replaces a part of the contract without xfail(reason=...)"
