"""`elman verify`: kernels against float64."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from decimal import ROUND_UP, Context
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from elman_core.extension import ConfigError, KernelError, dump, print, table, write_text

from .build import NAMES_HELP, chosen_dtypes, chosen_kernels

if TYPE_CHECKING:
    from elman_core.extension import KernelSpec, Report, Row

_THREE_DIGITS = Context(prec=3, rounding=ROUND_UP)


def verify(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help=NAMES_HELP)] = None,
    grid: Annotated[Literal["quick", "full"], typer.Option(help="About 20 or 200 cases for each kernel.")] = "quick",
    dtype: Annotated[str, typer.Option(help="Only these: fp32, bf16, fp16, fp64, separated by commas.")] = "",
    backend: Annotated[
        Literal["auto", "torch", "cpu", "host", "cuda", "emulated"],
        typer.Option(
            help="auto: what this machine runs: cuda with a GPU; torch, cpu and the C++ build host without. "
            "emulated: the GPU's source on a CPU."
        ),
    ] = "auto",
    all_: Annotated[bool, typer.Option("--all", help="Every kernel that is installed.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Write the errors of a full grid on this GPU into the kernel's package.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare kernels with float64. Every output and every gradient; exits with 5 if one is wrong."""
    import torch

    from elman_authors import grids
    from elman_core.extension import save_stamp

    if not names and not all_:
        raise ConfigError("name a variant, or type `elman verify --all`")
    here: Literal["host", "cuda"] = "cuda" if torch.cuda.is_available() else "host"
    if record:
        grid, backend = "full", "cuda"
    dtypes = chosen_dtypes(dtype)
    pairs, reports, unchecked = [], [], []
    for spec in chosen_kernels(names or [], None if backend == "auto" else backend):
        targets = _targets(spec, here) if backend == "auto" else [backend]
        if "cuda" in spec.targets and here == "host":
            types = dict.fromkeys(str(case.dtype).removeprefix("torch.") for case in grids.cases(spec, "cuda", grid))
            unchecked.append(f"{spec.name}: cuda: not checked, no GPU here ({', '.join(types)})")
        pairs += [(spec, target) for target in targets]
    with_cases = [pair for pair in pairs if has_case(*pair, grid, dtypes)]
    for spec, target in with_cases or pairs:  # where none has such a case, `verify` says so
        progress = None if json_ else _progress(spec.name)
        report = grids.verify(spec, target, grid, dtypes, progress=progress, recorded=not record)
        reports.append(report)
        if not json_:
            _print(report)
        if target in spec.targets and not report.unsuitable:
            try:
                save_stamp(spec, report)
            except (KernelError, OSError) as error:  # a read-only cache: the verdict holds
                unchecked.append(f"{spec.name}: {target}: the result is not kept: {error}")
        if record and report.passed:
            for tensor, (was, now) in record_errors(spec, report).items():
                print(f"  {tensor}: the recorded error grew from {was:.2e} to {now:.2e}", file=sys.stderr)
    if json_:
        print(dump([_as_dict(report) for report in reports]))
    for line in unchecked:
        print(line, file=sys.stderr if json_ else sys.stdout)
    if not reports:
        raise KernelError("nothing was checked: none of these kernels runs on this machine")
    if wrong := [_wrong(report) for report in reports if not report.passed]:
        raise KernelError(f"verification failed: {', '.join(wrong)}")


def _wrong(report: Report) -> str:
    """Return the name of what did not pass, and whether the reference may be wrong instead."""
    rows = all(row.passed for row in report.rows)
    if report.unsuitable and rows and not report.faults:
        return f"{report.name} (inputs unsuitable, {report.target} not judged)"
    return f"{report.name} ({report.target}{'' if rows else ' and the reference differ'})"


def _targets(spec: KernelSpec, here: Literal["host", "cuda"]) -> list[str]:
    """The back ends of a kernel that this machine can run: its GPU's, or plain PyTorch's and those of the C++ compiler."""
    from elman_core.extension import find_host_compiler

    if here == "cuda" and "cuda" in spec.targets:
        return ["cuda"]
    targets, compiled = list(spec.portable), [target for target in ("host", "cpu") if target in spec.targets]
    if compiled:
        try:
            find_host_compiler()
            targets += compiled
        except KernelError as error:
            print(f"{spec.name}: {' and '.join(compiled)} are not checked: {error}", file=sys.stderr)
    return targets


def has_case(spec: KernelSpec, target: str, grid: Literal["quick", "full"], dtypes: list[Any]) -> bool:
    """Whether the kernel has a case of one of these dtypes; a variant's kernels do not all take the same."""
    from elman_authors import grids

    return not dtypes or bool(grids.problems(spec, target, grid, dtypes))


def _progress(name: str) -> Any:
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        sys.stderr.write(f"\r{name}: case {done} of {total}" + "\n" * (done == total))
        sys.stderr.flush()

    return show


def _print(report: Report) -> None:
    from elman_core.extension import failures

    verdict = "passed" if report.passed else "UNDECIDED" if "not judged" in _wrong(report) else "FAILED"
    checked = f"{report.name} on {report.target}, {report.grid} grid, {report.cases} cases"
    print(f"{checked}: {verdict}; worst case of each tensor:")
    heads = ("dtype", "tensor", "error", "largest", "same dtype", "recorded", "limit", "of limit", "verdict", "case")
    print(table([_cells(row) for row in report.worst()], heads))
    if left := report.left_out:
        print(f"  {len(left)} cases are left out, as this GPU is too small for them; the first: {left[0]}")
    alike: dict[str, list[str]] = {}  # the same tensor, or the same fault, in other cases
    for line in failures(report):
        where, _, what = line.partition(": ")
        alike.setdefault(where if what.startswith("error ") else what, []).append(line)
    for line, *others in list(alike.values())[:10]:
        print(f"  {line}" + (f"; and {len(others)} more like it" if others else ""))


def _cells(row: Row) -> list[str]:
    given = (row.error, row.worst, row.reference, row.recorded, row.limit)
    numbers = ["-" if x is None else f"{x:.1e}" for x in given]
    cells = [row.dtype, row.tensor, *numbers, f"{row.ratio:.2f}", "ok" if row.passed else "WRONG"]
    kink = f", {row.kink:.2%} at a kink" if row.kink else ""
    return [*cells, f"{row.case}{kink}" + (f", usually {row.usual:.1f} times as large" if row.usual > 1 else "")]


def _as_dict(report: Report) -> dict[str, Any]:
    rows = [{**asdict(row), "ratio": row.ratio, "passed": row.passed} for row in report.rows]
    return {**asdict(report), "passed": report.passed, "rows": rows}


def record_errors(spec: KernelSpec, report: Report) -> dict[str, tuple[float, float]]:
    """Record the report's worst error of each dtype and tensor for this machine's architecture. Cases in which the reference
    errs by more than the earlier record allows are left out: that record does not limit them, nor does it have to.

    Returns:
        the errors that grew: `{"bfloat16 d w": (before, now)}`.

    Raises:
        KernelError: the report is not of a compiled kernel's full grid, or it failed.
        StorageError: the file cannot be written.
    """
    import torch

    from elman_core.extension import RECORDED_FACTOR, local_arch, read_record

    target = report.target
    if target not in spec.targets or report.grid != "full" or not report.passed or spec.record is None:
        raise KernelError(f"{spec.name}: only a full grid that a compiled kernel passed is recorded")
    arch = local_arch(spec.extension(target))
    known = read_record(spec)
    before = known.get(arch, {}).get("errors", {})
    was = before.get(spec.name, {})
    errors: dict[str, float] = {}
    for row in report.rows:
        key = f"{row.dtype} {row.tensor}"
        if row.reference <= RECORDED_FACTOR * was.get(key, math.inf):
            errors[key] = max(errors.get(key, 0.0), float(_THREE_DIGITS.create_decimal(row.error)))
    known[arch] = {
        "device": torch.cuda.get_device_name() if target == "cuda" else arch,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "errors": {**before, spec.name: dict(sorted({**was, **errors}.items()))},
    }
    write_text(spec.record, json.dumps(known, indent=1) + "\n")
    return {key: (was[key], now) for key, now in errors.items() if key in was and now > was[key]}
