"""Kernels: `elman build` compiles them ahead of their first use, `elman verify` checks them against float64."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ._text import dump, table

if TYPE_CHECKING:
    from elman_core.kernels.spec import KernelSpec
    from elman_core.kernels.verify import Report, Row

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...",
        help="Variants, or kernels as `verify` names them (few_rows: what all decode with); all if none.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def register(app: typer.Typer) -> None:
    app.command("build")(build)
    app.command("verify")(verify)


def build(
    names: Names = None,
    arch: Annotated[str, typer.Option(help="GPU architectures, as in sm_80,sm_90; this machine's if none.")] = "",
    width: Annotated[str, typer.Option(help="Inner widths, as in 1024,1536; the usual ones if none.")] = "",
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, with commas; bf16 if none.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder to fill; the cache if none.")] = None,
    backend: Annotated[Literal["cuda", "host"], typer.Option(help="host: the C++ build that tests use.")] = "cuda",
    json: Json = False,
) -> None:
    """Compile kernels ahead of first use, also for GPUs that are not here: copy the folder and point ELMAN_CACHE to it."""
    from elman_core.kernels import build as builder

    widths, dtypes = _widths(width), _dtypes(dtype)
    wanted = []
    for spec in _specs(names or [], backend, shared=True):
        bare = spec.extension(backend)
        for one in [a.strip() for a in arch.split(",") if a.strip()] or [builder.local_arch(bare)]:
            extensions = [bare] if spec.builds is None else spec.builds(backend, one, widths, dtypes)
            wanted += [(spec.name, one, extension) for extension in extensions]
    paths = builder.build_all([(extension, one) for _, one, extension in wanted], out)
    built = [
        {"kernel": name, "module": extension.name, "arch": one, "path": str(path)}
        for (name, one, extension), path in zip(wanted, paths, strict=True)
    ]
    print(dump(built) if json else table([[b["module"], b["arch"], b["path"]] for b in built]))


def verify(
    names: Names = None,
    grid: Annotated[
        Literal["quick", "full"], typer.Option(help="About 20 or about 200 cases for each kernel.")
    ] = "quick",
    dtype: Annotated[str, typer.Option(help="Only these: fp32, bf16, fp16, fp64, with commas.")] = "",
    backend: Annotated[
        Literal["auto", "host", "cuda"], typer.Option(help="auto: cuda where there is a GPU, else host.")
    ] = "auto",
    all_: Annotated[bool, typer.Option("--all", help="Every kernel that is installed.")] = False,
    json: Json = False,
) -> None:
    """Compare kernels with a float64 reference: every output, every gradient it has. Leaves with 5 if one is wrong."""
    import torch

    from elman_core.kernels import stamps
    from elman_core.kernels.verify import verify as run
    from elman_core.registry import ConfigError, KernelError

    if not names and not all_:
        raise ConfigError("name a variant, or type `elman verify --all`")
    target: Literal["host", "cuda"] = (
        ("cuda" if torch.cuda.is_available() else "host") if backend == "auto" else backend
    )
    dtypes = _dtypes(dtype)
    reports = []
    specs = _specs(names or [], target)
    for spec in [
        s for s in specs if _has(s, target, grid, dtypes)
    ] or specs:  # `verify` says it of what has no such case
        report = run(spec, target, grid, dtypes, progress=_progress(spec.name) if not json else None)
        stamps.write(spec, report)
        reports.append(report)
        if not json:
            _print(report)
    if json:
        print(dump([_as_dict(report) for report in reports]))
    wrong = [report.name for report in reports if not report.passed]
    if wrong:
        raise KernelError(f"wrong numbers from the {target} kernel of {', '.join(wrong)}")


def _specs(names: list[str], target: Literal["host", "cuda"], shared: bool = False) -> list[KernelSpec]:
    """The kernels of these names; all that are installed for the target if no name is given.

    Args:
        names: of variants, for all of their kernels that the target has, or of single kernels.
        shared: whether those that every model decodes with belong to a variant's.
    """
    from elman_core.kernels.few_rows_spec import spec as shared_spec
    from elman_core.registry import KernelError, get_variant, list_variants

    variants = list_variants()
    common = [s for s in (shared_spec(),) if target in s.targets]
    if not names:
        found = [s for name in variants for s in get_variant(name).kernels if target in s.targets] + common
        if not found:
            raise KernelError(f"no installed variant has a {target} kernel; `elman list` shows what is installed")
        return found
    chosen: dict[str, KernelSpec] = {}
    for name in names:
        single = None if name in variants else _kernel(name)
        if single is not None:
            chosen[single.name] = single
            continue
        chosen |= {s.name: s for s in (*_of_variant(name, target), *(common if shared else ()))}
    return list(chosen.values())


def _has(spec: KernelSpec, target: Literal["host", "cuda"], grid: Literal["quick", "full"], dtypes: list[Any]) -> bool:
    """Whether the kernel has a case of one of these dtypes; a variant's kernels do not all take the same."""
    return not dtypes or any(case.dtype in dtypes for case in spec.cases(target, grid))


def _kernel(name: str) -> KernelSpec | None:
    """The kernel of that name, of whatever variant or of none."""
    from elman_core.kernels.few_rows_spec import spec as shared_spec
    from elman_core.registry import get_variant, list_variants

    installed = (s for variant in list_variants() for s in get_variant(variant).kernels)
    return next((s for s in (shared_spec(), *installed) if s.name == name), None)


def _of_variant(name: str, target: Literal["host", "cuda"]) -> list[KernelSpec]:
    from elman_core.registry import ConfigError, get_variant

    variant = get_variant(name)
    if not variant.kernels:
        raise ConfigError(f"variant {variant.name!r} has no kernel of its own: its reference is what runs")
    return [s for s in variant.kernels if target in s.targets] or list(variant.kernels)


def _dtypes(text: str) -> list[Any]:
    import torch

    from elman_core.registry import ConfigError

    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in DTYPES:
            raise ConfigError(f"no dtype {word!r}; use {', '.join(DTYPES)}")
    return [getattr(torch, DTYPES[word]) for word in words]


def _widths(text: str) -> list[int]:
    from elman_core.registry import ConfigError

    words = [word.strip() for word in text.split(",") if word.strip()]
    if wrong := [word for word in words if not word.isdigit()]:
        raise ConfigError(f"--width takes numbers with commas, not {wrong[0]!r}")
    return [int(word) for word in words]


def _progress(name: str) -> Any:
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        print(f"\r{name}: case {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show


def _print(report: Report) -> None:
    from elman_core.kernels.verify import failures

    verdict = "passed" if report.passed else "FAILED"
    print(
        f"{report.name} on {report.target}, {report.grid} grid, {report.cases} cases: {verdict}; worst case of each tensor:"
    )
    rows = [_cells(row) for row in report.worst()]
    print(table(rows, ("dtype", "tensor", "error", "largest", "same dtype", "limit", "of limit", "verdict", "case")))
    for line in list(failures(report))[:10]:
        print(f"  {line}")


def _cells(row: Row) -> list[str]:
    numbers = [f"{x:.1e}" for x in (row.error, row.worst, row.reference, row.limit)]
    return [row.dtype, row.tensor, *numbers, f"{row.ratio:.2f}", "ok" if row.passed else "WRONG", row.case]


def _as_dict(report: Report) -> dict[str, Any]:
    from dataclasses import asdict

    rows = [{**asdict(row), "ratio": row.ratio, "passed": row.passed} for row in report.rows]
    return {**asdict(report), "passed": report.passed, "rows": rows}
