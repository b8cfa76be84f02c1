"""The contract of a kernel as tests: equal to float64, on the host build here, on the GPU where there is one.

It is part of `VariantContract`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from elman_authors import grids
from elman_core import Variant, list_variants
from elman_core.extension import (
    Case,
    Inputs,
    KernelError,
    KernelSpec,
    failures,
    find_host_compiler,
    find_nvcc,
    is_missing,
    registered,
    verify_kernel,
)

from .harness import Guarded


def need_host_compiler() -> None:
    """Skip the test where C++ cannot be compiled, or fail it if ELMAN_REQUIRE_HOST=1 (CI) says that it must be."""
    try:
        find_host_compiler()
    except KernelError as error:
        if os.environ.get("ELMAN_REQUIRE_HOST") == "1":
            pytest.fail(f"ELMAN_REQUIRE_HOST=1, but {error}")
        pytest.skip(f"the host build is not checked: {error}")


def need_nvcc() -> None:
    """Skip the test where CUDA cannot be compiled."""
    try:
        find_nvcc()
    except KernelError as error:
        pytest.skip(f"CUDA code is not compiled: {error}")
    if shutil.which("g++") is None:
        pytest.skip("CUDA code is not compiled: nvcc needs g++")


def need_gpu() -> None:
    """Skip the test without an NVIDIA GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")


class KernelContract(Guarded):
    """Part of `VariantContract`, for every kernel that the variant declares; or subclass it and set `kernels`.

    Cases and limits are those of `elman verify` (see `elman_core.kernels.verify`), recorded errors among them.
    """

    kernels: ClassVar[Sequence[KernelSpec] | None] = None
    """The kernels to test; those of the variant by default."""

    @classmethod
    def specs(cls) -> Sequence[KernelSpec]:
        return cls.declared().kernels if cls.kernels is None else cls.kernels  # type: ignore[attr-defined]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each kernel, and each of its cases, back ends or inputs, as the test's arguments ask."""
        if hasattr(super(), "pytest_generate_tests"):
            super().pytest_generate_tests(metafunc)  # type: ignore[misc]
        wanted: dict[str, Callable[[KernelSpec], Iterable[Any]]] = {
            "on_host": lambda spec: _on_host(spec, self.specs()),
            "on_cpu": lambda spec: grids.cases(spec, "cpu")[1:2] if "cpu" in spec.targets else (),
            "on_cuda": lambda spec: grids.cases(spec, "cuda") if "cuda" in spec.targets else (),
            "portable": lambda spec: spec.portable,
            "refused": lambda spec: _inputs(spec)[1] if "host" in spec.targets else (),
            "kernel": lambda spec: ("",) if "host" in spec.targets else (),
        }
        for fixture in wanted.keys() & set(metafunc.fixturenames):
            rows = [(spec, value) for spec in self.specs() for value in wanted[fixture](spec)]
            metafunc.parametrize(fixture, rows, ids=[f"{spec.name} {value}".strip() for spec, value in rows])

    def test_host_build_equals_the_float64_reference(self, on_host: tuple[KernelSpec, Case]) -> None:
        """The cases of `_on_host`; `elman verify` has all."""
        need_host_compiler()
        _assert_passes(on_host[0], "host", [on_host[1]])

    def test_cpu_kernel_equals_the_float64_reference(self, on_cpu: tuple[KernelSpec, Case]) -> None:
        """One case, with masks and starts of documents; `elman verify` has the others."""
        need_host_compiler()
        _assert_passes(on_cpu[0], "cpu", [on_cpu[1]])

    def test_portable_backend_equals_the_float64_reference(self, portable: tuple[KernelSpec, str]) -> None:
        spec, backend = portable
        _assert_passes(spec, backend, list(grids.cases(spec, "host")))

    @pytest.mark.gpu
    def test_cuda_kernel_equals_the_float64_reference(
        self, on_cuda: tuple[KernelSpec, Case], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        need_gpu()
        monkeypatch.setenv("ELMAN_KERNELS", "require")
        _assert_passes(on_cuda[0], "cuda", [on_cuda[1]])

    def test_operator_passes_opcheck(self, kernel: tuple[KernelSpec, str]) -> None:
        """Schema, fake tensors, autograd registration, and tracing by `torch.compile`'s front end."""
        need_host_compiler()
        spec, _ = kernel
        smallest = sorted(grids.cases(spec, "host"), key=lambda c: sum(c.sizes.values()))
        _assert_passes(spec, "host", [next(c for c in smallest if c.masked)], opcheck=True)
        whole = next(c for c in smallest if not c.masked)
        for backend in spec.portable:
            _assert_passes(spec, backend, [whole], opcheck=True)

    def test_every_kernel_and_header_of_the_package_is_declared(self) -> None:
        """A kernel that no `Variant` names is neither built nor verified."""
        if not hasattr(self, "declared"):
            pytest.skip("not of a variant")
        package = _package(self.declared())
        variants = [i.variant for i in list_variants().values() if _package(i.variant) == package]
        specs = [spec for variant in variants for spec in variant.kernels]
        for name, module in registered(package).items():
            assert name in {s.name for s in specs}, f"{module} makes kernel {name}, and no Variant(kernels=…) names it"
        if is_missing("elman_csrc"):
            pytest.skip("headers are not looked for: elman-csrc is not installed")
        held = {path for spec in specs for target in spec.targets for path in spec.extension(target).sources()}
        folder = Path(str(sys.modules[package].__file__)).parent
        for path in sorted({*folder.rglob("*.h"), *folder.rglob("*.cuh")}):
            assert path.resolve() in held, f"{path.relative_to(folder)} is in no kernel that Variant(kernels=…) names"

    def test_float64_and_every_special_case_is_in_the_quick_grid(self, kernel: tuple[KernelSpec, str]) -> None:
        cases = grids.cases(kernel[0], "host")
        assert torch.float64 in {c.dtype for c in cases}
        for special in ("masked", "strided", "bare"):
            assert any(getattr(c, special) for c in cases), special
            assert not all(getattr(c, special) for c in cases), special
        times = {c.sizes["T"] for c in cases}
        assert 1 in times, "T = 1"
        assert any(t % 2 and t > 1 for t in times), "odd T"
        assert any(c.sizes["B"] > 1 for c in cases), "B > 1"

    def test_a_wrong_input_is_refused_by_name(self, refused: tuple[KernelSpec, str]) -> None:
        """A wrong dtype, a wrong shape, another device."""
        spec, name = refused
        case, inputs = _inputs(spec)
        given = inputs[name]
        assert given is not None
        for wrong in (given.to(torch.int32), torch.cat([given, given]), given[..., None], given.to("meta")):
            _assert_refused(spec, name, {**inputs, name: wrong}, case)


def _on_host(spec: KernelSpec, specs: Sequence[KernelSpec]) -> Sequence[Case]:
    """All cases for the first kernel of a skeleton, every other one for those that share it: each costs a compilation."""
    if "host" not in spec.targets:
        return ()
    skeletons = [each.extension("host").binding for each in specs[: specs.index(spec) + 1] if "host" in each.targets]
    before = skeletons.count(skeletons[-1]) - 1
    return grids.cases(spec, "host")[before % 2 :: 2 if before else 1]


def _package(variant: Variant) -> str:
    return variant.branch(0).__module__.partition(".")[0]


def _assert_passes(spec: KernelSpec, backend: str, cases: list[Case], opcheck: bool = False) -> None:
    report = verify_kernel(spec, backend, cases=cases, opcheck=opcheck)
    assert report.passed, "\n".join(failures(report))


def _assert_refused(spec: KernelSpec, name: str, inputs: Inputs, case: Case) -> None:
    """On every back end, with a message that names the input, or the first one, beside which it is wrong."""
    first = next(iter(inputs))
    for backend in ("auto", *spec.targets, *spec.portable):
        with pytest.raises((ValueError, KernelError)) as caught:
            spec.call(backend, inputs, case.options)
        message = str(caught.value)
        assert "\n" not in message
        assert name in message or first in message, message


def _inputs(spec: KernelSpec) -> tuple[Case, dict[str, Tensor | None]]:
    """A small case of the kernel, and its inputs, the mask among them."""
    cases = sorted(grids.cases(spec, "host"), key=lambda c: sum(c.sizes.values()))
    case = next(c for c in cases if c.masked and c.dtype == torch.float32)
    return case, {k: x for k, x in spec.make_inputs(case, torch.Generator().manual_seed(0)).items() if x is not None}
