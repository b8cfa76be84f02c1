"""Check a kernel: every output and every gradient against a float64 reference; for decoding kernels, every output.

The error of a tensor is relative, in the L2 norm, against a float64 truth computed from the same rounded inputs. Two limits
apply, and the smaller decides:

* 2 times (bf16: 3 times) the error of the PyTorch reference in the same storage dtype (with float32 state and accumulation;
  see `KernelSpec.rounded`), plus one eps of the dtype (float32: 4, which the order of a sum alone can cost);
* on an architecture for which the plugin ships recorded errors (see verify_cache.py), twice the error recorded for that tensor,
  unless the reference itself errs by more: such a case is worse conditioned than all that were recorded (a sum that cancels).

In float64, where reference and truth are the same, the limit is 1e-12. A tensor that is zero in theory (its truth is 1e-12 of
the others) is measured against them. Few sums may all cancel by chance, which does not make rounding smaller: an error beyond
its limit is measured again, against the median norm of further draws of the same problem if that is larger, as the row says.
At a kink, such as that of relu, rounding may choose the side: if elements of the truth jump when the inputs move by one
rounding, each element may be wrong by as much as it moved, and the row says which share jumps; a tensor without jumps, which
may sum them, by as much as it moved as a whole. In addition, memory from torch.empty is filled with NaN before the call, two
calls must agree in every bit, inputs must be unchanged, every value must be finite (also at masked positions), and
`torch.library.opcheck` must pass. Where the reference itself is not finite, the inputs are unsuitable, and nothing is said
about the kernel.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from elman_core.registry.checks import one_line, ran_out
from elman_core.registry.errors import KernelError, KernelTimeoutError, KernelUnavailableError
from elman_core.storage import read_json

from . import build, launch
from .build import Extension
from .runtime import compute_dtype
from .spec import Case, Inputs, KernelSpec, Outputs, Target

FACTOR = {torch.bfloat16: 3.0}
DEFAULT_FACTOR = 2.0
EPS = {torch.float32: 4}
FLOAT64_LIMIT = 1e-12
RECORDED_FACTOR = 2.0
ZERO = 1e-12
DRAWS = 8  # of which the median is a usual norm
JUMP = 1 / 3  # of an element, and at least 0.05 of the tensor's root mean square
NUDGES = 4  # each with its mirror image: what lies within one rounding of a kink crosses it in one of the two
_OPCHECK_ELEMENTS = 1 << 16
Errors = Mapping[str, float]  # by dtype and tensor: {"bfloat16 d w": 1.9e-3}


def limit_of(dtype: torch.dtype, reference: float) -> float:
    """The largest error that may be rounding, on every machine, where plain PyTorch in this dtype has that of `reference`."""
    if dtype == torch.float64:
        return FLOAT64_LIMIT
    return FACTOR.get(dtype, DEFAULT_FACTOR) * reference + EPS.get(dtype, 1) * torch.finfo(dtype).eps


class InputsError(KernelError):
    """The inputs that were drawn are not the cell's: nothing is known about the kernel."""


@dataclass(frozen=True)
class Row:
    """One tensor of one case.

    Attributes:
        tensor: name of an output ("y"), or of the gradient of an input ("d w").
        error: ‖kernel - truth‖ / (usual ‖truth‖), beyond what a kink allows. worst: the largest error of an element / the
            largest element of the truth.
        reference: the error of the reference in the same dtype. limit: the largest allowed `error`.
        recorded: the error that the plugin has recorded for this architecture, if any.
        usual: the norm against which the error is measured / ‖truth‖; 1 unless few sums cancel.
        dtype: of the case's storage. kink: the share of elements, of this tensor or of another, that one rounding of the inputs
            makes jump; 0 unless it decides.
    """

    case: str
    dtype: str
    tensor: str
    error: float
    worst: float
    reference: float
    limit: float
    recorded: float | None = None
    kink: float = 0.0
    usual: float = 1.0

    @property
    def ratio(self) -> float:
        """error / limit; up to 1 passes."""
        if self.limit == 0:  # recorded as exact
            return 0.0 if self.error == 0 else math.inf
        return self.error / self.limit

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # False for NaN


@dataclass
class Report:
    """What `verify` found.

    Attributes:
        faults: failures other than large errors: not finite, not repeatable, opcheck, an exception.
        unsuitable: cases whose inputs the reference itself does not take, which say nothing about the kernel.
        left_out: cases that this GPU is too small for. `cases` does not count them.
    """

    name: str
    target: str
    grid: str
    cases: int = 0
    rows: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    unsuitable: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        wrong = self.faults or self.unsuitable or not all(row.passed for row in self.rows)
        return self.cases > 0 and not wrong

    def worst(self) -> list[Row]:
        """For each dtype and tensor, the row with the largest ratio."""
        found: dict[tuple[str, str], Row] = {}
        for row in self.rows:
            key = (row.dtype, row.tensor)
            if key not in found or not row.ratio <= found[key].ratio:
                found[key] = row
        return list(found.values())


def verify(
    spec: KernelSpec,
    target: str,
    cases: Sequence[Case],
    progress: Callable[[int, int], None] | None = None,
    opcheck: bool = True,
    recorded: bool = True,
    grid: str = "quick",
) -> Report:
    """Run cases on one back end.

    Args:
        target: one of the spec's `backends`. Portable ones run on the CPU.
        progress: called with (cases done, all cases).
        opcheck: whether to run `torch.library.opcheck`, on one small case of each kind.
        recorded: whether recorded errors limit this run; False to record new ones. grid: the name of the cases' grid.

    Raises:
        KernelError: there is no such kernel, it cannot be built, there is no GPU, or no case is left.
        KernelUnavailableError: the driver refuses the kernel, or the GPU is too small for every case.
        KernelTimeoutError, or an error that memory `ran_out`: from a case; the kernel may be right or wrong.
    """
    if target not in spec.backends:
        known = ", ".join(spec.backends) or "none"
        raise KernelError(f"{spec.name} has no back end {target!r}; it has: {known}")
    if target == "cuda" and not torch.cuda.is_available():
        others = [*spec.portable, *(t for t in spec.targets if t != "cuda")]
        there = f"; type `elman verify {spec.name} --backend {others[0]}`" if others else ", and it runs nowhere else"
        raise KernelError(f"{spec.name}: no GPU here{there}")
    if not cases:
        raise KernelError(f"{spec.name}: no case of the {grid} grid is left for {target}; choose other dtypes")
    report = Report(spec.name, target, grid)
    records = recorded_errors(spec, target) if target in spec.targets else {}
    if target in (*spec.targets, "emulated"):
        if modules := modules_of(spec, target, cases):
            modules.append(launch.extension())
        build.build_all([(e, build.local_arch(e)) for e in modules])
    checked: set[tuple[torch.dtype, bool, str]] = set()
    with _full_precision_products():
        for number, case in enumerate(cases, 1):
            kind = (case.dtype, case.masked, str(sorted(case.options.items())))
            try:
                inputs = _run_case(spec, target, case, report, records, recorded)
                elements = sum(x.numel() for x in inputs.values() if x is not None)
                if opcheck and kind not in checked and elements <= _OPCHECK_ELEMENTS:
                    checked.add(kind)
                    _opcheck(spec, "cuda" if target == "emulated" else target, case, inputs)
            except InputsError as error:
                report.unsuitable.append(f"{case}: {error}")
            except KernelUnavailableError as error:
                report.left_out.append(f"{case}: {error}")
            except Exception as error:  # every fault of a kernel belongs in its report
                if isinstance(error, KernelTimeoutError) or ran_out(error):  # says nothing about the kernel
                    raise
                if target == "cuda":
                    made = spec.extension("cuda")
                    launch.check_driver(made.name, build.find(made, build.local_arch(made)), error)
                report.faults.append(f"{case}: {one_line(error)}")
            report.cases = number - len(report.left_out)
            if target == "cuda" and torch.cuda.memory_reserved() > 4 << 30:  # others may verify on the same GPU
                torch.cuda.empty_cache()
            if progress is not None:
                progress(number, len(cases))
    if not report.cases:
        raise KernelUnavailableError(report.left_out[0])
    return report


def modules_of(spec: KernelSpec, target: str, cases: Sequence[Case]) -> list[Extension]:
    """What the cases compile, each once. A case that is not supported reports that itself."""
    found: dict[Extension, None] = {}
    for case in cases if spec.module is not None else ():
        with contextlib.suppress(KernelError):
            made = cast(Any, spec.module)("cuda" if target == "emulated" else target, case)
            found[build.emulated(made) if target == "emulated" else made] = None
    return list(found)


def recorded_errors(spec: KernelSpec, target: Target) -> Errors:
    """The errors that the plugin has recorded for this kernel on this machine's architecture."""
    if not (known := read_record(spec)):
        return {}
    errors = known.get(build.local_arch(spec.extension(target)), {}).get("errors", {})
    return cast(Errors, errors.get(spec.name, {}))


def read_record(spec: KernelSpec) -> dict[str, Any]:
    """The whole file of recorded errors, by architecture; empty if there is none. Raises `CheckpointError` if it is damaged."""
    return read_json(spec.record) if spec.record is not None and spec.record.is_file() else {}


def check_inputs(spec: KernelSpec, cases: Sequence[Case]) -> None:
    """Draw the inputs of cases on the CPU, and compute the reference, forward and backward.

    Raises:
        InputsError: it is not finite.
    """
    with _full_precision_products():
        for case in cases:
            generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
            inputs, visible, incoming = _draw(spec, case, generator, torch.device("cpu"))
            try:
                _check_finite(case.dtype, _run(spec, case, spec.rounded, inputs, incoming), visible)
            except InputsError as error:
                raise InputsError(f"{case}: {error}") from None


def _draw(
    spec: KernelSpec, case: Case, generator: torch.Generator, device: torch.device
) -> tuple[Inputs, Outputs, Outputs]:
    """Inputs, where outputs are visible, and the incoming gradient of each output: 0 where it is not visible."""
    inputs = {k: None if x is None else x.to(device) for k, x in spec.make_inputs(case, generator).items()}
    visible, incoming = spec.visible(inputs), {}
    for name, x in (spec.call("reference", inputs, case.options) if spec.differentiable else {}).items():
        dtype = compute_dtype(case.dtype) if name in spec.states else case.dtype
        drawn = torch.randn(x.shape, generator=generator).to(x.device).to(dtype)
        incoming[name] = torch.where(visible[name], drawn, 0.0) if name in visible else drawn
    return inputs, visible, incoming


def _run(spec: KernelSpec, case: Case, backend: str, given: Inputs, gradients: Outputs) -> Outputs:
    """Outputs, and gradients of the inputs by name ("d u"), from those of the outputs."""
    if not spec.differentiable:
        with torch.no_grad():
            return spec.call(backend, given, case.options)
    leaves = {
        k: x.detach().requires_grad_() if x is not None and x.is_floating_point() else x for k, x in given.items()
    }
    outputs = spec.call(backend, leaves, case.options)
    wanted = [k for k in outputs if not (case.bare and k in spec.states)]
    named = {k: x for k, x in leaves.items() if x is not None and x.requires_grad}
    made = torch.autograd.grad(
        [outputs[k] for k in wanted],
        list(named.values()),
        [gradients[k].to(outputs[k].dtype) for k in wanted],
        materialize_grads=True,  # of a flag among the inputs: 0
    )
    return {k: x.detach() for k, x in outputs.items()} | {f"d {k}": g for k, g in zip(named, made, strict=True)}


def _check_finite(dtype: torch.dtype, found: Outputs, visible: Outputs) -> None:
    """Raises `InputsError`: a tensor of the reference is not finite where it is visible."""
    for name, x in found.items():
        if not torch.isfinite(x if name not in visible else torch.where(visible[name], x, 0)).all():
            raise InputsError(
                f"inputs unsuitable: the reference in {str(dtype).removeprefix('torch.')} gives {name} that is not finite; "
                "adjust= of the kernel says which inputs it takes"
            )


def _run_case(spec: KernelSpec, target: str, case: Case, report: Report, known: Errors, recorded: bool) -> Inputs:
    device = torch.device("cuda", torch.cuda.current_device()) if target == "cuda" else torch.device("cpu")
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    draw, run = partial(_draw, spec, case, generator, device), partial(_run, spec, case)
    inputs, visible, incoming = draw()
    truth = run("reference", _wide(inputs), _wide(incoming))
    same = run(spec.rounded, inputs, incoming)
    _check_finite(torch.float64, truth, visible)
    _check_finite(case.dtype, same, visible)
    given = {k: None if x is None else _with_gaps(x) for k, x in inputs.items()} if case.strided else inputs
    arriving = {k: _with_gaps(g) for k, g in incoming.items()} if case.strided else incoming
    handed = {**given, **{f"gradient of {k}": g for k, g in arriving.items()}}
    before = {k: x.clone() for k, x in handed.items() if x is not None}
    with _poisoned():
        first, second = (run(target, given, arriving) for _ in range(2))
    if device.type == "cuda":
        torch.cuda.synchronize()
    spec.after(device)
    for name, was in before.items():
        if not torch.equal(cast(Tensor, handed[name]), was):
            report.faults.append(f"{case}: the {name} that was handed in has been changed")
    scale = max(_size(x) for x in (*truth.values(), *incoming.values()))

    def compare(name: str, known: Errors, *more: Any) -> Row:
        return _compare(case, name, first, same, truth, visible.get(name), known, scale, *more)

    rows = {name: compare(name, known) for name in truth}
    wrong = [n for n, row in rows.items() if not row.passed and torch.isfinite(first[n]).all()]
    moved, norms, shifts = dict.fromkeys(truth, torch.zeros((), device=device)), *torch.zeros(2, 1, len(wrong))
    kink, again = 0.0, run("reference", _wide(inputs), _wide(incoming)) if wrong or not report.cases else truth
    if any(
        _size(_shown(again[n].double() - x.double(), visible.get(n))) > FLOAT64_LIMIT * scale for n, x in truth.items()
    ):
        report.faults.append(f"{case}: the reference differs between two identical calls: it must draw no numbers")
    elif wrong and case.dtype != torch.float64 and spec.differentiable:
        gaps = []
        for inexact in _nudged(_wide(inputs), case.dtype, generator):
            again = run("reference", inexact, _wide(incoming))
            gap = {n: _shown((again[n] - x).abs(), visible.get(n)) for n, x in truth.items()}
            moved = {n: torch.maximum(most, gap[n]) for n, most in moved.items()}
            gaps.append([gap[n].norm().item() for n in wrong])
        shifts = torch.tensor(gaps)
        kink = max(_jumps(moved[n], _shown(x, visible.get(n))).double().mean().item() for n, x in truth.items())
        others = ((seen, run("reference", _wide(x), _wide(g))) for x, seen, g in (draw() for _ in range(DRAWS)))
        norms = torch.tensor([[_shown(x[n], seen.get(n)).norm().item() for n in wrong] for seen, x in others])
    for n, usual, shift in zip(wrong, norms.median(0).values.tolist(), shifts.amax(0).tolist(), strict=True):
        rows[n] = compare(n, known if recorded else {}, moved[n], usual, kink, shift)
    if not all(rows[n].passed for n in wrong):
        _vote(spec, target, case, report, {n: first[n] for n in wrong}, rows, lambda other: run(other, given, arriving))
    report.rows += rows.values()
    for name in truth:
        made = first[name]
        if not torch.isfinite(made).all():
            report.faults.append(f"{case}: {name} is not finite")
        elif not torch.equal(made, second[name]):
            report.faults.append(f"{case}: {name} differs between two identical calls")
    return inputs


def _wide(tensors: Inputs) -> Inputs:
    """The same in float64, beside what is not a floating-point tensor."""
    return {k: x.double() if x is not None and x.is_floating_point() else x for k, x in tensors.items()}


def _shown(x: Tensor, seen: Tensor | None) -> Tensor:
    return x if seen is None else torch.where(seen, x, 0.0)


def _size(x: Tensor) -> float:
    """The root mean square."""
    return x.double().square().mean().sqrt().item()


def _nudged(inputs: Inputs, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Inputs]:
    """Inputs of which every number has moved by one rounding of the dtype, up or down."""
    floats = {k: x for k, x in inputs.items() if x is not None and x.is_floating_point()}
    for _ in range(NUDGES):
        signs = {k: torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1 for k, x in floats.items()}
        for half in (torch.finfo(dtype).eps / 2, -torch.finfo(dtype).eps / 2):
            yield inputs | {k: x * (1 + half * signs[k]) for k, x in floats.items()}


def _vote(
    spec: KernelSpec, target: str, case: Case, report: Report, made: Outputs, rows: Mapping[str, Row],
    run: Callable[[str], Outputs],
) -> None:  # fmt: skip
    """Say so if another back end agrees with this one against the reference."""
    for other in spec.portable if target != "torch" else ("host",) if "host" in spec.targets else ():
        with contextlib.suppress(KernelError):
            found = run(other)
            gaps = {n: (x.double() - found[n].double()).norm() / (x.double().norm() or 1.0) for n, x in made.items()}
            if all(gap <= rows[n].limit for n, gap in gaps.items()):
                report.faults.append(f"{case}: {target} and {other} agree: the reference is what differs")


def _compare(
    case: Case, name: str, made: Outputs, same: Outputs, truth: Outputs, seen: Tensor | None, known: Errors,
    scale: float, moved: Tensor | float = 0.0, usual: float = 0.0, kink: float = 0.0, shift: float = 0.0,
) -> Row:  # fmt: skip
    right = truth[name].double()  # a drawn class is a whole number, and must be equal
    shown, gap, same_gap = (_shown(x, seen) for x in (right, made[name].double() - right, same[name].double() - right))
    norm, largest = shown.norm().item() or 1.0, shown.abs().max().item() or 1.0
    if _size(shown) < ZERO * scale:  # zero in theory: what is left is rounding
        norm, largest = scale * math.sqrt(shown.numel()), scale
    usual = max(1.0, usual / norm)  # and 1 if a draw is not finite
    norm, gap = norm * usual, gap.abs()
    reference = same_gap.norm().item() / norm
    limit = limit_of(case.dtype, reference)
    dtype = str(case.dtype).removeprefix("torch.")
    recorded = known.get(f"{dtype} {name}")
    if recorded is not None and reference <= RECORDED_FACTOR * recorded:
        limit = min(limit, RECORDED_FACTOR * recorded)
    if (jumps := _jumps(moved, shown)).any():
        gap, kink = (gap - moved).relu(), jumps.double().mean().item()
    elif kink and shift / norm > limit:  # a sum of what jumps elsewhere
        limit = shift / norm
    else:
        kink = 0.0
    return Row(
        case=str(case), dtype=dtype, tensor=name, error=gap.norm().item() / norm, worst=gap.max().item() / largest,
        reference=reference, limit=limit, recorded=recorded, kink=kink, usual=usual,
    )  # fmt: skip


def _jumps(moved: Tensor | float, shown: Tensor) -> Tensor:
    return (moved > JUMP * shown.abs()) & (moved > 0.05 * _size(shown))


def _opcheck(spec: KernelSpec, target: str, case: Case, inputs: Inputs) -> None:
    leaves: Inputs = {
        k: x.clone().requires_grad_(spec.differentiable) if x is not None and x.is_floating_point() else x
        for k, x in inputs.items()
    }
    found = spec.op(target, leaves, case.options)
    if found is not None:
        torch.library.opcheck(*found)


def _with_gaps(x: Tensor) -> Tensor:
    """The same values in memory with gaps, the first two dimensions swapped there."""
    swapped = x.transpose(0, 1) if x.dim() >= 2 else x
    wide = swapped.new_zeros(*swapped.shape[:-1], 2 * swapped.shape[-1] + 3)
    part = wide[..., 1 : 1 + swapped.shape[-1]]
    part.copy_(swapped)
    return part.transpose(0, 1) if x.dim() >= 2 else part


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """Inside, torch.empty and its relatives return NaN (255 for bytes), so memory that a kernel does not write shows."""
    on, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@contextlib.contextmanager
def _full_precision_products() -> Iterator[None]:
    """Inside, float32 products are float32 (no TF32), 16-bit products accumulate in float32, and autocast is off."""
    matmul = torch.backends.cuda.matmul
    inside: dict[str, Any] = {f"allow_{dtype}_reduced_precision_reduction": False for dtype in ("bf16", "fp16")}
    try:
        _ = matmul.allow_tf32
        inside["allow_tf32"] = False
    except RuntimeError:  # torch refuses this name to a program that has set the newer one
        inside["fp32_precision"] = "ieee"
    before = {name: getattr(matmul, name) for name in inside}
    try:
        for name, value in inside.items():
            setattr(matmul, name, value)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), torch.enable_grad():
            yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def failures(report: Report) -> Iterable[str]:
    """One line for each failure, the worst first."""
    for row in sorted((r for r in report.rows if not r.passed), key=lambda r: -r.ratio):
        yield f"{row.tensor}: error {row.error:.2e} beside the reference, limit {row.limit:.2e} ({row.case})"
    yield from (*report.faults, *report.unsuitable)
