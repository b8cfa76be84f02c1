"""The tools of the contract's tests: building a tiny mixer, random states, and the one meaning of "equal".

B batch, T time, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from elman_core import Mixer, State, Variant
from elman_core.extension import resolve

CONTRACTS = __name__.rpartition(".")[0] + "."
EXACT = 1e-10
"""Relative to the largest element: float64 keeps 1e-16, and the shortest chain of roundings here loses three digits."""

Options = Mapping[str, Any]


def rounded(error: float) -> str:
    """What a relative error of float64 means that has the size of a rounding to float32."""
    return ", as if a number passed float32: make it compute_dtype(x), not float()" if 1e-10 < error < 1e-6 else ""


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = EXACT, what: str = "result") -> None:
    """Same shape, and the largest difference within `tolerance` of the largest element (or of 1e-3 if all are smaller)."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{what} is not finite"
    if actual.numel():
        scale = max(expected.abs().max().item(), 1e-3)
        error = (actual.double() - expected.double()).abs().max().item() / scale
        assert error <= tolerance, f"{what}: relative error {error:.2e}, limit {tolerance:.0e}{rounded(error)}"


def assert_identical(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal in every bit, for what the same code computes from the same numbers."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not torch.equal(actual, expected):
        error = (actual.double() - expected.double()).abs().max().item()
        raise AssertionError(f"{what}: must be equal in every bit, differs by up to {error:.1e}")


def assert_same_state(actual: State, expected: State, tolerance: float = EXACT) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_close(actual[name], expected[name], tolerance, f"state {name!r}")


def clone(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


def leaves(state: State) -> State:
    """A copy whose floating-point tensors are leaves that want a gradient."""
    return {n: v.detach().clone().requires_grad_(v.is_floating_point()) for n, v in state.items()}


@torch.no_grad()
def stir_(module: nn.Module) -> None:
    """Move every parameter off its value by about a third of its size, or by 0.1 where all of it is zero."""
    for p in module.parameters():
        size = p.float().square().mean().sqrt().item()
        p.add_(torch.randn_like(p), alpha=0.3 * size or 0.1)


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


class Harness(Guarded):
    """Knobs of a contract, and how its tests get a mixer. A plugin's test class sets the knobs and nothing else."""

    variant: ClassVar[str]
    """The name under which the plugin is installed."""
    options: ClassVar[Sequence[Options]] = ({},)
    """Sets of options; every test runs with each. Between them they should reach every branch of the code."""
    dim: ClassVar[int] = 16
    """Model width of the tests: small."""
    values: ClassVar[Mapping[str, Any]] = {}
    """Another legal value for an option, where no neighbour of its default is one."""

    @pytest.fixture(autouse=True)
    def _reproducible(self) -> Iterator[None]:
        """Seeded, one thread (tiny matmuls are faster so), and `torch.empty` full of NaN: unwritten memory is a failure."""
        threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(0)
        yield
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Tests that take `opts` run once for each set of options; those that take `branch` once for each mixer of a layer."""
        if "opts" in metafunc.fixturenames:
            ids = [",".join(f"{k}={v}" for k, v in o.items()) or "default" for o in self.options]
            metafunc.parametrize("opts", self.options, ids=ids)
        if "branch" in metafunc.fixturenames:
            metafunc.parametrize("branch", range(self.declared().branches))

    @classmethod
    def declared(cls) -> Variant:
        """The variant under test, as its plugin declares it."""
        return resolve(cls.variant).variant

    def make(
        self, opts: Options, branch: int = 0, dtype: torch.dtype = torch.float64, *, seed: int = 1, stir: bool = True
    ) -> Mixer:
        """A mixer in evaluation mode.

        Args:
            stir: move every parameter off its initial value, so that nothing hides behind zeros (a zero bias, a zero
                output projection).
        """
        torch.manual_seed(seed)
        variant = self.declared()
        mixer = variant.branch(branch)(self.dim, variant.make_config(opts), branch)
        if stir:
            stir_(mixer)
            with torch.no_grad():
                mixer.train()(self.input(4, 1, torch.float32))  # what follows the weights in training follows them
        return mixer.to(dtype).eval()

    def input(self, length: int, rows: int = 3, dtype: torch.dtype = torch.float64, *, seed: int = 2) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, length, self.dim, generator=generator, dtype=torch.float64).to(dtype)

    def state(self, mixer: Mixer, rows: int = 3, dtype: torch.dtype = torch.float64, *, seed: int = 3) -> State:
        """A state that can occur: the one after a few random inputs."""
        with torch.no_grad():
            return clone(mixer(self.input(4, rows, dtype, seed=seed))[1])
