"""What a variant promises that an optional library speeds up."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from elman_authors.testing import VariantContract

from elman_core.registry import KernelError

MASK_BT = torch.tensor([[c == "1" for c in row] for row in ("1111111", "0011111", "1011001")])
STARTS_BT = torch.tensor([[c == "1" for c in row] for row in ("0001001", "0010000", "0100010")])


class LibraryContract(VariantContract):
    op: ClassVar[Any]
    """The variant's module with the calls of the library."""
    library: ClassVar[str]
    """The module to import."""
    extra: ClassVar[str]
    """What installs it, of elman-baselines."""
    ways: ClassVar[Sequence[Any]]
    """`op.Kernels` of functions in plain PyTorch, as the library documents its own: what is checked is how they are called. On
    a GPU the real ones take their place."""
    by_hand: ClassVar[Callable[..., tuple[np.ndarray, ...]]]
    """(config, weights, x, *states) of one row of real positions to its outputs and last states, in NumPy, head by head."""
    states: ClassVar[Sequence[str]]
    """The names of these states."""
    error: ClassVar[float] = 1e-12

    def test_the_mixer_follows_its_equations(self, opts: Any) -> None:
        mixer = self.make(opts)
        x, state = self.input(7), self.state(mixer)
        with torch.no_grad():
            y, end = mixer(x, state, MASK_BT)
        weights = {n: p.detach().numpy() for n, p in mixer.named_parameters()}
        for b, on in enumerate(MASK_BT):
            before, after = ([s[name][b].numpy() for name in self.states] for s in (state, end))
            expected = self.by_hand(mixer.config, weights, x[b, on].numpy(), *before)
            for actual, wanted in zip((y[b, on].numpy(), *after), expected, strict=True):
                np.testing.assert_allclose(actual, wanted, rtol=0, atol=self.error)

    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("masked", [False, True])
    def test_every_way_through_the_library_means_the_same(
        self, opts: Any, masked: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mixer = self.make(opts)
        for found, start, length in itertools.product(self.ways, (None, self.state(mixer)), (1, 2, 7)):
            mask_BT, starts_BT = MASK_BT[:, :length] if masked else None, STARTS_BT[:, :length] if packed else None
            x_BTD = self.input(length)
            y_BTD, end = mixer(x_BTD, start, mask_BT, starts_BT)
            with monkeypatch.context() as patch, torch.set_grad_enabled(length > 1):
                patch.setattr(self.op, "kernels", lambda *_, found=found: found)
                y_lib_BTD, end_lib = mixer(x_BTD, start, mask_BT, starts_BT)
            assert end.keys() == end_lib.keys()
            if masked:
                y_BTD, y_lib_BTD = y_BTD[mask_BT], y_lib_BTD[mask_BT]
            torch.testing.assert_close(y_lib_BTD, y_BTD, rtol=0, atol=1e-12)
            for name in end:  # states are kept in float32 by the library
                torch.testing.assert_close(end_lib[name].double(), end[name], rtol=1e-6, atol=1e-6)

    def test_torch_func_goes_through_plain_pytorch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found, seen = object(), list[Any]()
        monkeypatch.setitem(vars(self.op.library), "found", found)
        torch.func.grad(lambda x: (seen.append(self.op.library.chosen()), x)[1])(torch.ones(()))
        assert (seen, self.op.library.chosen()) == ([None], found)

    def test_without_the_library_the_reason_says_what_to_type(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, self.library, None)
        vars(self.op.library).pop("found", None)
        try:
            with pytest.raises(KernelError, match=rf"pip install './baselines\[{self.extra}\]'"):
                self.op.library.functions()
        finally:
            vars(self.op.library).pop("found", None)
