"""The checker itself: right kernels pass, and every deliberate fault is caught. Stamps, first use, and the commands."""

import contextlib
import dataclasses
import io
import json
import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import elman_csrc
import pytest
import torch
from elman_authors import grids
from elman_authors.cli.verify import record_errors
from elman_authors.testing.kernel import need_host_compiler, need_nvcc
from elman_e1.op import e1 as e1_dense
from elman_e42.op import e42 as e42_dense
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from elman_core.cli import main
from elman_core.kernels import Case, DenseKernel, KernelSpec, build, dispatch, launch, runtime, toolchain, verify_cache
from elman_core.kernels.dense import portable
from elman_core.kernels.dense.spec import FAMILY
from elman_core.kernels.verify import Report, Row, failures, verify
from elman_core.nn import full_precision
from elman_core.registry import KernelError, get_variant
from elman_core.registry.errors import KernelTimeoutError, KernelUnavailableError

SMALL = Case({"T": 7, "B": 3, "d": 5}, torch.float64)
MASKED = dataclasses.replace(SMALL, masked=True)
SINGLE = dataclasses.replace(SMALL, dtype=torch.float32)

# A cell with everything the contract allows: it leaks its state past the product, and reads a retain gate and an output gate.
LEAKY_CELL = """
#pragma once
#include <elman/dense_cell.h>
namespace leaky {
struct Cell {
  static constexpr int extras = 2;
  static constexpr bool uses_prev = true;
  template <class Math, class T>
  static ELMAN_HD elman::DenseOut<T> forward(T a, T prev, const T* e) {
    const T keep = Math::sigmoid(e[0]), h = keep * prev + (T(1) - keep) * a;
    return {h, h * Math::tanh(e[1]) + prev};
  }
  template <class Math, class T>
  static ELMAN_HD elman::DenseGrad<T, extras> backward(T gy, T gh, T h, T prev, const T* e) {
    const T keep = Math::sigmoid(e[0]), gate = Math::tanh(e[1]), total = gh + gy * gate;
    const T a = (h - keep * prev) / (T(1) - keep);
    const T dkeep = total * (prev - a) * keep * (T(1) - keep), dgate = gy * h * (T(1) - gate * gate);
    return {total * (T(1) - keep), total * keep + gy, {dkeep, dgate}};
  }
};
}  // namespace leaky
"""


@full_precision
def leaky_reference(u, keep, gate, w, h0, mask=None, starts=None):
    h, states, earlier = h0, [], []
    for t in range(u.shape[0]):
        h = h if starts is None else torch.where(starts[t, :, None], 0.0, h)
        new = keep[t].sigmoid() * h + (1 - keep[t].sigmoid()) * (h @ w.T + u[t])
        earlier.append(h)
        h = new if mask is None else torch.where(mask[t, :, None], new, h)
        states.append(h)
    return torch.stack(states) * torch.tanh(gate) + torch.stack(earlier), h


@pytest.fixture(scope="session")  # an operator's name is taken for the life of a process
def leaky(tmp_path_factory: pytest.TempPathFactory) -> DenseKernel:
    header = tmp_path_factory.mktemp("leaky") / "leaky_cell.h"
    header.write_text(LEAKY_CELL)
    return DenseKernel(
        "made_up_leaky",
        header=header,
        cell="leaky::Cell",
        reference=leaky_reference,
        update=lambda a, h, keep, _gate: keep.sigmoid() * h + (1 - keep.sigmoid()) * a,
        readout=lambda h, before, _keep, gate: h * torch.tanh(gate) + before,
        extras=("keep", "gate"),
    )


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_a_leaky_cell_with_two_gates_passes_the_whole_quick_grid(leaky, backend):
    need_host_compiler()
    report = grids.verify(leaky.spec(), backend, opcheck=False)
    assert report.passed, list(failures(report))
    assert {row.tensor for row in report.rows} == {"y", "h_T", "d u", "d keep", "d gate", "d w", "d h0"}


# Deliberate faults in a copy of the sources, each switched on by its number at run time, so that one compilation serves them
# all: the file, what stands there, and what stands there instead.
SWITCH = """#include <cstdlib>
namespace elman {
inline bool fault(int n) {
  const char* chosen = std::getenv("ELMAN_TEST_FAULT");
  return chosen != nullptr && std::atoi(chosen) == n;
}
}  // namespace elman
"""
EDITS = [
    ("dense_host.h", "run.w[k * run.block + i - begin]", "run.w[fault(1) ? i * d + k : k * d + i]"),
    ("dense_host.h", "run.w[i * run.block + k]", "run.w[fault(2) ? k * d + i : i * d + k]"),
    ("dense_host.h", "t >= 0; --t", "t >= (fault(3) ? 1 : 0); --t"),
    ("e1_cell.h", "{gy * h * silu_derivative(z, s)}", "{fault(4) ? T(0) : gy * h * silu_derivative(z, s)}"),
    ("e1_cell.h", "const T total = gy * silu(z, s) + gh;", "const T total = gy * (fault(5) ? T(1) : silu(z, s)) + gh;"),
    ("dense_host.h", "dh0[i] = g_last[i]", "dh0[i] = fault(6) ? T(0) : g_last[i]"),
    ("dense_host.h", "run.state(0, b)[i] = h0[b * d + i]", "run.state(0, b)[i] = fault(7) ? T(0) : h0[b * d + i]"),
    ("e1_cell.h", "(T(1) - h * h)", "(T(1) - (fault(8) ? h : h * h))"),
    ("dense_host.h", "out[i] = made.y;", "if (!(fault(9) && t == 3)) out[i] = made.y;"),
    ("dense_host.h", "after[i] = before[i];", "after[i] = fault(10) ? T(0) : before[i];"),
    ("dense_host.h", "out[i] = T(0);", "out[i] = fault(11) ? T(NAN) : T(0);"),
]

# The faults that make numbers wrong: what each must spoil, and what it cannot reach.
SPOILS = {
    "a transposed W in the backward": (1, {"d u", "d h0", "d w"}, {"y", "h_T"}),
    "a transposed W in the forward": (2, {"y", "h_T"}, set()),
    "a missing last step back": (3, {"d u", "d z", "d h0", "d w"}, {"y", "h_T"}),
    "a missing gradient of the gate": (4, {"d z"}, {"y", "h_T", "d u", "d w", "d h0"}),
    "a dropped gate": (5, {"d u", "d w"}, {"y", "d z"}),
    "a dropped final-state gradient": (6, {"d u", "d h0"}, {"y"}),
    "an ignored initial state": (7, {"y", "h_T", "d w"}, set()),
    "a wrong derivative of tanh": (8, {"d u", "d w"}, {"y", "h_T", "d z"}),
}


@pytest.fixture(scope="session")  # an operator's name is taken for the life of a process
def altered(tmp_path_factory: pytest.TempPathFactory) -> tuple[KernelSpec, Path]:
    """E1's kernel with the faults, all off; and the folder of the copied sources."""
    need_host_compiler()
    folder = tmp_path_factory.mktemp("altered")
    shutil.copytree(elman_csrc.get_include(), folder / "include")
    shutil.copytree(elman_csrc.get_bindings(), folder / "bind")
    header = Path(shutil.copy(e1_dense.cell.header, folder / "e1_cell.h"))
    first = (
        folder / "include" / "elman" / "dense_cell.h"
    )  # which the launcher does not include: it is not compiled again
    first.write_text(first.read_text().replace("#pragma once\n", "#pragma once\n" + SWITCH, 1))
    for file, old, new in EDITS:
        path = header if file == "e1_cell.h" else folder / "include" / "elman" / file
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} must occur once in {file}"
        path.write_text(text.replace(old, new))
    cell = e1_dense.cell
    kernel = DenseKernel(
        "altered_on_purpose",
        header=header,
        cell=cell.type,
        reference=cell.reference,
        update=cell.update,
        readout=cell.readout,
        extras=cell.extras,
    )
    return kernel.spec(), folder


@pytest.fixture
def report_of(altered: tuple[KernelSpec, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """`report_of(fault, *cases)`: what the checker says with that fault on."""
    spec, folder = altered
    monkeypatch.setattr(elman_csrc, "get_include", lambda: folder / "include")
    monkeypatch.setattr(elman_csrc, "get_bindings", lambda: folder / "bind")

    def run(fault: int, *cases: Case) -> Report:
        monkeypatch.setenv("ELMAN_TEST_FAULT", str(fault))
        return verify(spec, "host", cases=cases, opcheck=False)

    return run


def with_y(change: Callable[[Tensor], Tensor]) -> KernelSpec:
    """E1's kernel, whose output of the back end torch is changed."""
    right = e1_dense.spec()

    def call(backend: str, inputs: Any, options: Any) -> dict[str, Tensor]:
        outputs = right.call(backend, inputs, options)
        return {**outputs, "y": change(outputs["y"])} if backend == "torch" else outputs

    return dataclasses.replace(right, call=call)


def wrong_tensors(report: Report) -> set[str]:
    return {row.tensor for row in report.rows if not row.passed}


def test_the_altered_sources_are_right_while_no_fault_is_on(report_of):
    report = report_of(0, SMALL, MASKED, SINGLE)
    assert report.passed, list(failures(report))


@pytest.mark.parametrize("fault", SPOILS)
def test_a_deliberate_fault_is_caught_where_it_is(fault, report_of):
    number, spoiled, untouched = SPOILS[fault]
    for case in (SMALL, SINGLE):
        report = report_of(number, case)
        assert not report.passed
        assert spoiled <= wrong_tensors(report)
        assert not untouched & wrong_tensors(report)


def test_an_output_that_is_not_written_is_caught(report_of):
    assert any("y is not finite" in fault for fault in report_of(9, SMALL).faults)


def test_a_masked_position_that_is_not_held_is_caught(report_of):
    assert report_of(10, SMALL).passed
    assert "h_T" in wrong_tensors(report_of(10, MASKED))


def test_garbage_at_a_masked_position_is_caught(report_of):
    assert any("y is not finite" in fault for fault in report_of(11, MASKED).faults)


@pytest.fixture
def _transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of W is transposed."""
    need_host_compiler()
    right = portable.product
    monkeypatch.setattr(portable, "product", lambda a, b, dtype: right(a, b, dtype).T)


@pytest.mark.usefixtures("_transposed")
def test_a_transposed_weight_gradient_is_caught():
    assert wrong_tensors(verify(e1_dense.spec(), "host", cases=[SMALL], opcheck=False)) == {"d w"}


PORTABLE_FAULTS = {
    "the gradient of the final state": ("total[-1] += g_last_Bd", "pass", "d u"),
    "the gradient through a held step": ("else carry, 1.0)", "else carry, 0.0)", "d h0"),
    "the mask": ("torch.where(mask_TB[t, :, None], new_Bd, h_Bd)", "new_Bd", "h_T"),
}


@pytest.mark.parametrize("forgotten", PORTABLE_FAULTS)
def test_what_plain_pytorch_forgets_is_caught(forgotten, monkeypatch):
    right, wrong, spoiled = PORTABLE_FAULTS[forgotten]
    source = Path(portable.__file__).read_text()
    assert source.count(right) == 1
    altered = types.ModuleType("altered")
    altered.__package__ = portable.__package__
    exec(compile(source.replace(right, wrong), portable.__file__, "exec"), altered.__dict__)
    for name in ("forward", "backward"):
        monkeypatch.setattr(portable, name, getattr(altered, name))
    assert spoiled in wrong_tensors(verify(e1_dense.spec(), "torch", cases=[MASKED], opcheck=False))
    tied = next(spec for spec in e42_dense.specs() if "tied" in spec.name)
    assert not verify(tied, "torch", cases=[MASKED], opcheck=False).passed


def test_an_update_in_pytorch_that_differs_from_the_cell_is_caught(leaky):
    """Keep and write are swapped."""
    cell = leaky.cell
    swapped = DenseKernel(
        "made_up_swapped",
        header=cell.header,
        cell=cell.type,
        reference=cell.reference,
        update=lambda a, h, keep, _gate: keep.sigmoid() * a + (1 - keep.sigmoid()) * h,
        readout=cell.readout,
        extras=cell.extras,
    )
    for spec in swapped.specs():
        case = next(c for c in grids.cases(spec, "host") if not c.bare)
        assert not verify(spec, "torch", cases=[case], opcheck=False).passed


def test_results_that_change_between_calls_are_caught():
    calls = iter(range(100))
    report = verify(with_y(lambda y: y * (1 + 1e-15 * next(calls))), "torch", cases=[SMALL], opcheck=False)
    assert not wrong_tensors(report)
    assert not report.passed
    assert any("y differs between two identical calls" in fault for fault in report.faults)


def test_a_backward_that_works_in_the_gradient_handed_to_it_is_caught():
    class Wiping(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(_ctx: Any, gy: Tensor) -> Tensor:
            wanted = gy.clone()
            gy.zero_()
            return wanted

    report = verify(with_y(Wiping.apply), "torch", cases=[SMALL], opcheck=False)
    assert any("gradient of y that was handed in has been changed" in fault for fault in report.faults)


def test_an_operator_that_changes_its_input_fails_opcheck():
    library = torch.library.Library("elman_tests", "FRAGMENT")
    library.define("overwrites(Tensor x) -> Tensor")
    library.impl("overwrites", lambda x: x.mul_(2).clone(), "CompositeExplicitAutograd")
    spec = dataclasses.replace(
        e1_dense.spec(), op=lambda _b, inputs, _o: (torch.ops.elman_tests.overwrites.default, (inputs["u"].detach(),))
    )
    report = verify(spec, "torch", cases=[SMALL])
    assert len(report.faults) == 1
    assert not report.passed


def test_a_case_whose_every_value_is_zero_passes():
    """As one masked step of a decoding kernel, from no state: nothing is there to measure an error against."""
    right = e1_dense.spec()

    def zeros(case: Case, generator: torch.Generator) -> dict[str, Tensor | None]:
        return {k: None if x is None else torch.zeros_like(x) for k, x in right.make_inputs(case, generator).items()}

    spec = dataclasses.replace(right, make_inputs=zeros, differentiable=False)
    assert verify(spec, "torch", cases=[SMALL], opcheck=False).passed


def test_16_bit_storage_is_judged_against_the_reference_in_16_bits():
    """What rounds once more than the reference passes; an error of a few percent does not, although the dtype is coarse."""
    case = dataclasses.replace(SMALL, dtype=torch.bfloat16)
    assert verify(e1_dense.spec(), "torch", cases=[case], opcheck=False).passed
    wrong = verify(with_y(lambda y: y * 1.05), "torch", cases=[case], opcheck=False)
    assert "y" in wrong_tensors(wrong)
    [row] = [r for r in wrong.rows if r.tensor == "y"]
    assert row.limit == pytest.approx(3 * row.reference + torch.finfo(torch.bfloat16).eps)
    assert 0 < row.reference < torch.finfo(torch.bfloat16).eps


def test_recorded_errors_are_the_limit_where_they_were_recorded(tmp_path):
    """The rule for every machine lets an error of three times float32's rounding pass; the record does not."""
    need_host_compiler()
    single = [c for c in grids.cases(e1_dense.spec(), "host") if c.dtype == torch.float32]
    right = dataclasses.replace(e1_dense.spec(), record=tmp_path / "errors.json")

    def check(spec: KernelSpec, **options: Any) -> Report:
        return dataclasses.replace(verify(spec, "host", cases=single, opcheck=False, **options), grid="full")

    def off_by_a_little(backend: str, inputs: Any, options: Any) -> dict[str, Tensor]:
        outputs = right.call(backend, inputs, options)
        return {**outputs, "y": outputs["y"] * (1 + 3e-7)} if backend == "host" else outputs

    wrong = dataclasses.replace(right, call=off_by_a_little)
    assert check(wrong).passed
    assert record_errors(right, check(right)) == {}
    [row] = [r for r in check(right).worst() if r.tensor == "y"]
    assert 0.49 < row.ratio <= 0.5
    assert "y" in wrong_tensors(check(wrong))
    grown = record_errors(wrong, check(wrong, recorded=False))
    assert "float32 y" in grown
    record = json.loads(right.record.read_text())
    for errors in record.values():  # as if the grid that was recorded had been better conditioned than this one
        errors["errors"][right.name]["float32 y"] = row.reference / 3
    right.record.write_text(json.dumps(record))
    for each in (r for r in check(right).rows if r.tensor == "y" and r.reference >= row.reference):
        assert each.limit == 2 * each.reference + 4 * torch.finfo(torch.float32).eps
    record_errors(right, check(right, recorded=False))
    again = json.loads(right.record.read_text())
    assert all(each["errors"][right.name]["float32 y"] < row.error for each in again.values())
    with pytest.raises(KernelError, match="only a full grid"):
        record_errors(right, verify(right, "host", cases=single, opcheck=False))


def test_cases_of_a_family_say_where_they_are():
    with pytest.raises(KernelError, match=r"cases of this family is elman_authors\.grids\.cases now"):
        e1_dense.spec().cases("host", "quick")


def test_a_report_without_cases_and_an_error_of_nan_do_not_pass():
    assert not Report("x", "host", "quick").passed
    nan = Row("case", "float32", "y", float("nan"), 0.0, 0.0, 1e-6)
    assert not nan.passed
    fine = dataclasses.replace(nan, error=0.0)
    report = Report("x", "host", "quick", cases=1, rows=[fine, nan])
    assert not report.passed
    assert report.worst() == [nan]


def test_a_back_end_that_is_not_there_is_named(leaky):
    with pytest.raises(KernelError, match=r"no back end 'tpu'; it has: .*host.*torch"):
        grids.verify(leaky.spec(), "tpu")
    with pytest.raises(KernelError, match="no case of the quick grid"):
        grids.verify(leaky.spec(), "torch", dtypes=[torch.bfloat16])


# Stamps ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own for stamps, with the compiled kernels of the common one behind it."""
    common = build.cache_dirs()
    monkeypatch.setenv("ELMAN_CACHE", ":".join(map(str, [tmp_path / "stamps", *common])))
    return tmp_path / "stamps"


def test_a_stamp_is_read_back_and_goes_out_of_date_with_its_sources(cache, monkeypatch):
    spec = e1_dense.spec()
    report = Report("e1", "host", "quick", cases=1, rows=[Row("c", "float64", "y", 1e-16, 1e-16, 0.0, 1e-12)])
    written = verify_cache.save(spec, report)
    assert verify_cache.stamp(spec, "host") == written
    assert written.passed
    assert written.worst == {"float64 y": 0.0001}
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert verify_cache.stamp(spec, "host") is None
    monkeypatch.undo()
    monkeypatch.setenv("ELMAN_CACHE", str(cache))
    other = dataclasses.replace(spec, python=())
    assert verify_cache.stamp(other, "host") is None


def unverified(monkeypatch):
    """A kernel without a stamp, plain PyTorch in the place of its CUDA; and thread and cases of each verification."""
    spec, verified = e1_dense.spec(), []

    def on_cpu(spec: KernelSpec, _target: str, cases: list[Case], opcheck: bool) -> Report:
        assert opcheck is spec.differentiable
        verified.append((threading.get_ident(), cases))
        return dataclasses.replace(verify(spec, "torch", cases=cases, opcheck=False), target="host")

    right_stamp = verify_cache.stamp
    monkeypatch.setattr(torch, "__version__", "of no stamp")
    monkeypatch.setattr(verify_cache, "verify", on_cpu)
    monkeypatch.setattr(verify_cache, "stamp", lambda spec, _target="host", arch=None: right_stamp(spec, "host", arch))
    monkeypatch.setattr(verify_cache, "_used", {})
    monkeypatch.delenv("ELMAN_VERIFY", raising=False)
    return spec, verified


def test_a_size_is_verified_at_its_first_use_and_a_wrong_kernel_is_refused(cache, monkeypatch):
    spec, verified = unverified(monkeypatch)
    cache.mkdir()
    (cache / "verified").touch()  # no stamp can be written: the kernel is used all the same
    verify_cache.ensure_verified(spec, SINGLE, "plan A")
    verified.clear()
    (cache / "verified").unlink()
    verify_cache.ensure_verified(spec, SINGLE, "plan A")
    verify_cache.ensure_verified(spec, SINGLE, "plan A")
    assert [cases for _, cases in verified] == [[SINGLE]]
    [(name, use)] = verify_cache.used().items()
    assert (name, use["plan"], use["skipped"]) == (f"e1 {SINGLE}", "plan A", False)
    assert use["stamp"]["passed"]
    assert use["stamp"]["extra"] == (str(SINGLE),)

    broken, other = with_y(lambda y: y * 1.1), dataclasses.replace(SINGLE, masked=True)
    with pytest.raises(KernelError, match=r"wrong numbers .*elman verify e1.*ELMAN_VERIFY=skip"):
        verify_cache.ensure_verified(broken, other, "plan A")
    with pytest.raises(KernelError, match=r"its stamp of .* says that it failed"):
        verify_cache.ensure_verified(spec, SINGLE, "plan A")
    grid = dataclasses.replace(verify(spec, "torch", cases=[SMALL], opcheck=False), target="host")
    verify_cache.save(spec, grid)  # it passed, without the problem that failed
    with pytest.raises(KernelError, match="wrong numbers"):
        verify_cache.ensure_verified(broken, other, "plan A")
    monkeypatch.setenv("ELMAN_VERIFY", "skip")
    verify_cache.ensure_verified(broken, other, "plan A")
    assert verify_cache.used()[f"e1 {other}"] == {"plan": "plan A", "skipped": True, "stamp": None}


def test_what_several_processes_verify_at_once_is_all_in_the_stamp(cache, monkeypatch):
    """Each reads the stamp before the others have written theirs, if it can; only one of the kernels is right."""
    spec, made, met = unverified(monkeypatch)[0], verify_cache.make, threading.Barrier(2)

    def slowly(*given: Any, **more: Any) -> verify_cache.Stamp:
        stamp = made(*given, **more)
        with contextlib.suppress(threading.BrokenBarrierError):
            met.wait(0.3)
        return stamp

    def found(_spec: KernelSpec, _target: str, cases: list[Case], **_: Any) -> Report:
        return Report("e1", "host", "quick", cases=1, faults=["it is wrong"] * cases[0].masked)

    monkeypatch.setattr(verify_cache, "make", slowly)
    monkeypatch.setattr(verify_cache, "verify", found)
    cases = SINGLE, dataclasses.replace(SINGLE, masked=True)
    with ThreadPoolExecutor(2) as pool:
        for use in [pool.submit(verify_cache.ensure_verified, spec, case, "plan A") for case in cases]:
            use.exception()
    stamp = verify_cache.stamp(spec, "host")
    assert ({*stamp.extra}, stamp.passed, stamp.faults) == ({*map(str, cases)}, False, ("it is wrong",))


@pytest.mark.parametrize("around", ["checkpointing", "fake tensors", "autocast", "meta"])
def test_what_surrounds_a_first_use_does_not_reach_its_verification(around, cache, monkeypatch):
    """Under gradient checkpointing, the backward of a verification in the same thread would recompute the layer."""
    spec, verified = unverified(monkeypatch)
    weight = torch.ones(3, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        verify_cache.ensure_verified(spec, SINGLE, "plan A")
        return (x * weight).tanh()

    if around == "checkpointing":
        checkpoint(layer, torch.ones(3), use_reentrant=False).sum().backward()
        assert weight.grad is not None
    else:
        modes = {
            "fake tensors": FakeTensorMode,
            "autocast": lambda: torch.autocast("cpu"),
            "meta": lambda: torch.device("meta"),
        }
        with modes[around]():
            verify_cache.ensure_verified(spec, SINGLE, "plan A")
    [(thread, _)] = verified
    assert thread != threading.get_ident()
    assert verify_cache.stamp(spec, "host").passed


@pytest.mark.parametrize(("name", "value", "off"), [("allow_tf32", True, False), ("fp32_precision", "tf32", "none")])
def test_a_program_that_allows_tf32_by_either_name_is_verified_without_it(name, value, off):
    spec = e1_dense.spec()
    matmul, seen, real = torch.backends.cuda.matmul, set(), spec.call
    spec = dataclasses.replace(spec, call=lambda *given: (seen.add(matmul.fp32_precision), real(*given))[1])
    setattr(matmul, name, value)
    try:
        assert verify(spec, "torch", cases=[SMALL], opcheck=False).passed
        assert (seen, getattr(matmul, name)) == ({"ieee"}, value)
    finally:
        setattr(matmul, name, off)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        KernelTimeoutError("busy"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        KernelError("kernel e1_dense_cuda_grid_bfloat16_64: launch: out of memory"),
    ],
    ids=["memory", "busy", "cublas", "launch"],
)
def test_a_gpu_that_others_use_is_not_stamped_as_a_wrong_kernel(error, cache, monkeypatch):
    spec, _ = unverified(monkeypatch)
    with pytest.raises(type(error)):
        verify_cache.ensure_verified(dataclasses.replace(spec, call=Mock(side_effect=error)), SINGLE, "plan A")
    assert verify_cache.stamp(spec, "host") is None


@pytest.fixture
def gpu(monkeypatch):
    """As far as torch says. A case of a verification there calls the mock that is returned."""
    answers = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0)}
    answers |= {
        "memory_reserved": 5 << 30,
        "empty_cache": None,
        "is_current_stream_capturing": False,
        "set_device": None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, Mock(return_value=answer))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    case = Mock(return_value={})
    monkeypatch.setattr(sys.modules["elman_core.kernels.verify"], "_run_case", case)
    return case


def test_memory_is_given_back_between_cases(gpu):
    spec, emptied = dataclasses.replace(e1_dense.spec(), module=None), cast(Any, torch.cuda.empty_cache)
    assert verify(spec, "cuda", cases=[SINGLE, SINGLE], opcheck=False).passed
    assert (gpu.call_count, emptied.call_count) == (2, 2)


@pytest.mark.parametrize(
    ("words", "driver"),
    [
        ("CUDA driver version is insufficient for CUDA runtime version", "13.0"),
        ("device kernel image is invalid", "13.0"),
        ("no kernel image is available for execution on the device", "13.0"),
        ("the provided PTX was compiled with an unsupported toolchain.", "13.0"),
        ("", "12.8"),  # known before anything is compiled
    ],
    ids=[35, 200, 209, 222, "an older major"],
)
def test_a_module_that_the_driver_refuses_is_not_stamped_and_plain_pytorch_runs(
    words, driver, gpu, cache, monkeypatch, caplog
):
    spec = dataclasses.replace(e1_dense.spec(), module=None)
    monkeypatch.setattr(torch, "__version__", "of no stamp")
    monkeypatch.setattr(runtime, "_warned", set())
    monkeypatch.delenv("ELMAN_VERIFY", raising=False)
    version = int(driver[:2]) * 1000 + int(driver[3:]) * 10
    monkeypatch.setattr(launch, "driver_version", lambda: version)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: Path("nvcc"))
    monkeypatch.setattr(build, "version", lambda _: "Cuda compilation tools, release 13.2, V13.2.51")
    monkeypatch.setattr(build, "build", lambda *_: pytest.fail("it is compiled"))
    monkeypatch.setattr(launch, "_native", lambda: None)
    gpu.side_effect = KernelError(f"kernel e1_dense_cuda_grid: launch: {words}")
    kernel: Any = types.SimpleNamespace(name="e1", spec=lambda: spec, cases=lambda *_: [SINGLE])
    kernel.prepare = lambda *_: "plan" if words else launch.opened(spec.extension("cuda"), FAMILY)
    for policy in ("auto", "require"):
        monkeypatch.setenv("ELMAN_KERNELS", policy)
        with (
            contextlib.nullcontext() if policy == "auto" else pytest.raises(KernelUnavailableError, match="update the")
        ):
            assert dispatch._prepare(kernel, 0, torch.float32, ()) is False
    [said] = [record.getMessage() for record in caplog.records if "NO KERNEL" in record.getMessage()]
    for part in (
        "nvcc is of release 13.2",
        f"the driver runs CUDA {driver}",
        words,
        "update the driver, or set CUDA_HOME",
    ):
        assert part in said
    assert verify_cache.stamp(spec, "cuda") is None


def test_a_case_that_a_gpu_is_too_small_for_is_left_out_and_said():
    spec = e1_dense.spec()

    def call(backend, inputs, options):
        if backend == "torch" and inputs["mask"] is not None:
            raise KernelUnavailableError("needs 232832 bytes")
        return spec.call(backend, inputs, options)

    small = dataclasses.replace(spec, call=call)
    report = verify(small, "torch", cases=[SMALL, MASKED])
    assert report.passed
    assert (report.cases, report.left_out) == (1, [f"{MASKED}: needs 232832 bytes"])
    with pytest.raises(KernelUnavailableError, match="needs 232832 bytes"):
        verify(small, "torch", cases=[MASKED])


# Commands -------------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_command_checks_what_a_cpu_runs_and_names_the_rest(cache, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["verify", "e1", "decode", "--dtype", "fp64"]) == 0
    said = capsys.readouterr().out
    assert "e1 on torch, quick grid" in said
    assert "e1: cuda: not checked, no GPU here (bfloat16, float16, float32)" in said
    assert "decode: cuda: not checked, no GPU here (bfloat16, float16" in said


def test_the_command_prints_a_row_for_each_tensor_and_stamps(cache, capsys):
    need_host_compiler()
    assert main(["verify", "e1", "--backend", "host", "--dtype", "fp64"]) == 0
    said = capsys.readouterr().out
    assert "passed" in said.splitlines()[0]
    for tensor in ("y", "h_T", "d u", "d z", "d w", "d h0"):
        assert any(line.split()[:1] == ["float64"] and f" {tensor} " in line for line in said.splitlines()), tensor
    stamp = verify_cache.stamp(e1_dense.spec(), "host")
    assert stamp is not None
    assert stamp.passed
    assert stamp.dtypes == ("float64",)


@pytest.mark.usefixtures("_transposed")
def test_a_wrong_kernel_makes_the_command_leave_with_5(cache, capsys):
    cache.mkdir()
    (cache / "verified").touch()  # no stamp can be written: the verdict is told all the same
    assert main(["verify", "e1", "--backend", "host", "--dtype", "fp64", "--json"]) == 5
    said = capsys.readouterr()
    assert not json.loads(said.out)[0]["passed"]
    assert "e1: host: the result is not kept: cannot write to" in said.err
    assert "verification failed" in said.err
    (cache / "verified").unlink()
    assert main(["verify", "e1", "--backend", "host", "--dtype", "fp64"]) == 5
    said = capsys.readouterr()
    assert "WRONG" in said.out
    wrong = [line.partition(":")[0] for line in said.out.splitlines() if " beside the reference" in line]
    assert len(wrong) == len(set(wrong)) > 0, "a line for each tensor, however many cases are wrong"
    assert " more like it" in said.out
    assert "verification failed" in said.err
    stamp = verify_cache.stamp(e1_dense.spec(), "host")
    assert stamp is not None
    assert not stamp.passed


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["verify"], 2, "--all"),
        (["verify", "nothing_like_it"], 2, "no variant 'nothing_like_it'"),
        (["verify", "e1", "--dtype", "int8"], 2, "no dtype 'int8'; use fp32"),
        (["build", "e1", "--arch", "sm_70"], 5, "not an architecture"),
        (["build", "e1", "--arch", "sm_90", "--width", "wide"], 2, "--width takes numbers"),
        (["build", "e1", "--arch", "sm_90", "--width", "6²"], 2, "--width takes numbers"),
        (["build", "e1", "--arch", "sm_90", "--backend", "host"], 2, "--arch names GPUs"),
        (["build", "nowhere.toml", "--arch", "sm_90"], 2, "there is no recipe nowhere.toml"),
        (["build", "e1@64x2", "--backend", "cpu"], 2, "--backend cpu builds variants, not the model e1@64x2"),
        (
            ["build", "e1@64x2", "--arch", "sm_90", "--width", "64"],
            2,
            "e1@64x2 says which sizes it launches: leave --width",
        ),
        (
            ["build", "e1", "e1@64x2", "--arch", "sm_90", "--grid", "quick"],
            2,
            "leave --grid out, or give it with variants",
        ),
        (["build", "e1", "--arch", "sm_90", "--grid", "quick", "--width", "64"], 2, "--grid has sizes of its own"),
        (["build", "e1", "--arch", "sm_90", "--width", "1000"], 5, "multiples of 16"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_commands_say_what_is_wrong_in_one_line(argv, code, says, capsys):
    assert main(argv) == code
    assert says in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Modules that `elman build` makes into one folder, in which the launcher is."""
    folder = tmp_path_factory.mktemp("built")
    launcher = build.build(launch.extension(), toolchain.host_architecture())
    for path in (launcher, launcher.with_suffix(".json")):
        shutil.copy(path, folder)

    def run(*words):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["build", *words, "--out", str(folder), "--json"]) == 0
        found = json.loads(out.getvalue())
        assert all(Path(b["path"]).parent == folder and Path(b["path"]).is_file() for b in found)
        return found

    return run


def test_the_command_builds_for_the_host_into_a_folder(built):
    need_host_compiler()
    assert [b["kernel"] for b in built("e42", "--backend", "host")] == ["e42", "launcher"]


def test_the_command_builds_what_the_cases_of_a_grid_run(capsys):
    words = ["--grid", "quick", "--dtype", "bf16", "--arch", "sm_90", "--dry-run", "--json"]
    assert main(["build", "e42", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len({b["path"] for b in found}) == len(found)
    chosen = [s for s in get_variant("e42").kernels if "cuda" in s.targets]
    cases = [(s, c) for s in chosen for c in grids.cases(s, "cuda", "quick") if c.dtype == torch.bfloat16]
    wanted = {s.module("cuda", c).file_name("sm_90") for s, c in cases}
    assert {Path(b["path"]).name for b in found if b["kernel"] in {s.name for s in chosen}} == wanted
    assert len(wanted) > len(chosen)


def test_the_command_cross_builds_every_kind_of_launch_for_a_gpu_that_is_not_here(built):
    need_nvcc()
    modules = {b["kernel"]: b["module"] for b in built("e42", "--arch", "sm_90", "--width", "64", "--dtype", "bf16")}
    dense = [modules.pop(name).removeprefix(f"{name}_").split("_")[2] for name in ("e42", "e42_tied_silu")]
    assert dense == ["cluster", "cluster"]
    assert modules == {
        "e42_step": "e42_step_decode_bfloat16", "decode": "shared_decode_bfloat16",
        "causal_conv": "causal_conv_cuda_bfloat16_4", "launcher": "elman_launch",
    }  # fmt: skip


def test_a_recipe_builds_what_its_options_launch(tmp_path, capsys):
    (tmp_path / "small.toml").write_text(
        '[model]\nvariant = "gru+lstm"\nhidden_size = 128\nnum_hidden_layers = 2\noptions.lstm.expansion = 1.5\n'
    )
    assert main(["build", str(tmp_path / "small.toml"), "--arch", "sm_90", "--dry-run", "--json"]) == 0
    modules = {b["module"] for b in json.loads(capsys.readouterr().out)}
    assert {"gru_gates_cuda_bfloat16_128_1", "lstm_gates_cuda_bfloat16_192_1"} <= modules


def test_a_plugin_is_built_from_the_folder_that_holds_it(tmp_path, capsys, monkeypatch):
    (tmp_path / "e1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["build", "e1", "--arch", "sm_90", "--dry-run", "--json"]) == 0
    assert "e1" in {b["kernel"] for b in json.loads(capsys.readouterr().out)}


def test_there_are_no_clusters_before_sm_90(built):
    need_nvcc()
    found = built("e42_tied_silu", "--arch", "sm_80", "--width", "64", "--dtype", "bf16")
    assert [b["module"].split("_")[5] for b in found if b["kernel"] == "e42_tied_silu"] == ["grid"]
