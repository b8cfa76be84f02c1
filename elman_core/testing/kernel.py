"""The contract of a kernel as tests: equal to float64, on the host build here, on the GPU where there is one.

class TestE99Kernel(KernelContract):
    spec = dense.spec()
"""

from __future__ import annotations

import os
import shutil
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from elman_core.kernels import toolchain
from elman_core.kernels.spec import Case, Inputs, KernelSpec, Target
from elman_core.kernels.verify import failures, verify
from elman_core.registry import KernelError

from .guard import Guarded


def need_host_compiler() -> None:
    """Skip the test where C++ cannot be compiled, or fail it if ELMAN_REQUIRE_HOST=1 (CI) says that it must be."""
    try:
        toolchain.find_host_compiler()
    except KernelError as error:
        if os.environ.get("ELMAN_REQUIRE_HOST") == "1":
            pytest.fail(f"ELMAN_REQUIRE_HOST=1, but {error}")
        pytest.skip(f"the host build is not checked: {error}")


def need_nvcc() -> None:
    """Skip the test where CUDA cannot be compiled."""
    try:
        toolchain.find_nvcc()
    except KernelError as error:
        pytest.skip(f"CUDA code is not compiled: {error}")
    if shutil.which("g++") is None:
        pytest.skip("CUDA code is not compiled: nvcc needs g++")


def need_gpu() -> None:
    """Skip the test without an NVIDIA GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")


class KernelContract(Guarded):
    """Subclass it in a plugin's tests and set `spec`.

    The cases are those of `elman verify` and so are the limits: for every output and gradient, 2 times (bf16: 3 times) the
    error of the reference in the same dtype plus 4 eps, and 1e-12 in float64; with memory poisoned, twice the same bits.
    """

    spec: ClassVar[KernelSpec]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for fixture, target in (("host_case", "host"), ("cuda_case", "cuda")):
            if fixture in metafunc.fixturenames:
                there = target in self.spec.targets
                cases = self.spec.cases(target, "quick") if there else []  # type: ignore[arg-type]
                metafunc.parametrize(fixture, cases, ids=str)
        if "portable" in metafunc.fixturenames:
            metafunc.parametrize("portable", self.spec.portable)
        if "refused" in metafunc.fixturenames:
            metafunc.parametrize("refused", list(_inputs(self.spec)))

    def test_host_build_equals_the_float64_reference(self, host_case: Case) -> None:
        need_host_compiler()
        self._assert_passes("host", [host_case])

    def test_portable_backend_equals_the_float64_reference(self, portable: str) -> None:
        self._assert_passes(portable, list(self.spec.cases("host", "quick")))

    @pytest.mark.gpu
    def test_cuda_kernel_equals_the_float64_reference(self, cuda_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        need_gpu()
        monkeypatch.setenv("ELMAN_KERNELS", "require")
        self._assert_passes("cuda", [cuda_case])

    def test_operator_passes_opcheck(self) -> None:
        """Schema, fake tensors, autograd registration, and tracing by `torch.compile`'s front end."""
        need_host_compiler()
        smallest = sorted(self.spec.cases("host", "quick"), key=lambda c: sum(c.sizes.values()))
        for backend in ("host", *self.spec.portable):
            whole = next(c for c in smallest if not c.masked)
            masked = next(c for c in smallest if c.masked)
            self._assert_passes(backend, [whole, masked], opcheck=True)

    def test_float64_and_every_special_case_is_in_the_quick_grid(self) -> None:
        cases = self.spec.cases("host", "quick")
        assert torch.float64 in {c.dtype for c in cases}
        for special in ("masked", "strided", "bare"):
            assert any(getattr(c, special) for c in cases), special
            assert not all(getattr(c, special) for c in cases), special
        times = {c.sizes["T"] for c in cases}
        assert 1 in times, "T = 1"
        assert any(t % 2 and t > 1 for t in times), "odd T"
        assert any(c.sizes["B"] > 1 for c in cases), "B > 1"

    def test_wrong_dtype_is_refused_by_name(self, refused: str) -> None:
        inputs = _inputs(self.spec)
        self._assert_refused(refused, {**inputs, refused: _present(inputs[refused]).to(torch.int32)})

    def test_wrong_shape_is_refused_by_name(self, refused: str) -> None:
        inputs = _inputs(self.spec)
        given = _present(inputs[refused])
        self._assert_refused(refused, {**inputs, refused: torch.cat([given, given])})
        self._assert_refused(refused, {**inputs, refused: given[..., None]})

    def test_mixed_devices_are_refused_by_name(self, refused: str) -> None:
        inputs = _inputs(self.spec)
        self._assert_refused(refused, {**inputs, refused: _present(inputs[refused]).to("meta")})

    def _assert_passes(self, backend: str, cases: list[Case], opcheck: bool = False) -> None:
        report = verify(self.spec, backend, cases=cases, opcheck=opcheck)
        assert report.passed, "\n".join(failures(report))

    def _assert_refused(self, name: str, inputs: Inputs) -> None:
        """On every back end, with a message that names the input, or the first one, beside which it is wrong."""
        first = next(iter(inputs))
        for backend in ("auto", *self.spec.targets, *self.spec.portable):
            with pytest.raises((ValueError, KernelError)) as caught:
                self.spec.call(backend, inputs, {})
            message = str(caught.value)
            assert "\n" not in message
            assert name in message or first in message, message


def _inputs(spec: KernelSpec) -> dict[str, Tensor | None]:
    """Small inputs of the kernel, the mask among them."""
    target: Target = "host"
    cases = sorted(spec.cases(target, "quick"), key=lambda c: sum(c.sizes.values()))
    case = next(c for c in cases if c.masked and c.dtype == torch.float32)
    return {k: x for k, x in spec.make_inputs(case, torch.Generator().manual_seed(0)).items() if x is not None}


def _present(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
