"""Kernels: `elman build` compiles them ahead of their first use, `elman verify` checks them against float64."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from elman_core.registry import ConfigError, KernelError, get_variant, list_variants

from ._text import dump, print, table

if TYPE_CHECKING:
    from elman_core.kernels.spec import KernelSpec
    from elman_core.kernels.verify import Report, Row

_HELP = "Variants, or kernels as `verify` names them (decode, causal_conv: shared by all models); all if none."
Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help=_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def build(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|MODEL]...",
            help="NAME[:PRESET]@WIDTHxDEPTH, a recipe, run or checkpoint: exactly what training and decoding it launch, at any "
            f"batch size. {_HELP}",
        ),
    ] = None,
    arch: Annotated[str, typer.Option(help="GPU architectures, as in sm_80,sm_90; by default this machine's.")] = "",
    width: Annotated[str, typer.Option(help="Inner widths, as in 1024,1536; by default the usual ones.")] = "",
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, separated by commas; by default bf16.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder to fill; by default the cache.")] = None,
    backend: Annotated[
        Literal["cuda", "cpu", "host"], typer.Option(help="cpu: of this machine. host: the C++ build that tests use.")
    ] = "cuda",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be compiled; compile nothing.")] = False,
    json: Json = False,
) -> None:
    """Compile kernels ahead of their first use. For GPUs of other machines, copy the folder and point ELMAN_CACHE to it."""
    from elman_core.kernels import build as builder
    from elman_core.kernels import launch

    widths, dtypes = _widths(width), _dtypes(dtype)
    given = [name for name in names or [] if name not in list_variants()]  # a plugin's folder may bear its name
    models = [name for name in given if "@" in name or Path(name).exists() or name.startswith("pretrained/")]
    wanted = [found for model in models for found in _launched(model, _words(arch), dtypes)]
    rest = [name for name in names or [] if name not in models]
    for spec in _specs(rest, backend, shared=True) if rest or not models else ():
        if not _runs(spec, backend):
            raise KernelError(f"{spec.name} has no back end {backend!r}; it has: {', '.join(spec.targets)}")
        bare = spec.extension(backend)
        for one in _words(arch) or [builder.local_arch(bare)]:
            extensions = [bare] if spec.builds is None else spec.builds(backend, one, widths, dtypes)
            wanted += [(spec.name, one, extension) for extension in extensions]
    launcher = launch.extension()  # what calls them all, for the Python and the machine that this is
    wanted.append(("launcher", builder.local_arch(launcher), launcher))
    wanted = list(dict.fromkeys(wanted))
    if dry_run:
        paths = [(out or builder.cache_dirs()[0]) / extension.file_name(one) for _, one, extension in wanted]
    else:
        paths = builder.build_all([(extension, one) for _, one, extension in wanted], out)
    built = [
        {"kernel": name, "module": extension.name, "arch": one, "path": str(path)}
        for (name, one, extension), path in zip(wanted, paths, strict=True)
    ]
    print(dump(built) if json else table([[b["module"], b["arch"], b["path"]] for b in built]))


def _launched(model: str, archs: list[str], dtypes: list[Any]) -> list[tuple[str, str, Any]]:
    """(kernel, architecture, extension) of all that a model launches: its forward on the meta device says what it asks for."""
    import torch

    from elman_core.kernels import dispatch
    from elman_core.model import LadderConfig, LadderForCausalLM
    from elman_core.model.checkpoint import find_checkpoint
    from elman_core.training.plan import build_model

    from .train import read_settings

    with torch.device("meta") as meta:
        if model.endswith(".toml") or ("@" in model and not Path(model).exists()):
            ladder = build_model(read_settings(model), meta)
        else:
            ladder = LadderForCausalLM(LadderConfig.from_pretrained(find_checkpoint(model)))
        tokens = torch.zeros(2, 9, dtype=torch.int64)
    with dispatch.asking() as asked:
        for dtype in dtypes or [torch.bfloat16]:
            ladder.to(dtype)(tokens)
            with torch.inference_mode():
                cache = ladder(tokens, use_cache=True).past_key_values
                ladder(tokens[:, :1], past_key_values=cache)
    if not archs and not torch.cuda.is_available():
        raise ConfigError("there is no GPU here: say for which one, as in --arch sm_90")
    archs = archs or ["sm_{}{}".format(*torch.cuda.get_device_capability())]
    return [(problem[0], arch, e) for problem in asked for arch in archs for e in dispatch.builds(problem, arch)]


def verify(
    names: Names = None,
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
    json: Json = False,
) -> None:
    """Compare kernels with float64. Every output and every gradient; exits with 5 if one is wrong."""
    import torch

    from elman_core.kernels import verify_cache
    from elman_core.kernels.verify import verify as run

    if not names and not all_:
        raise ConfigError("name a variant, or type `elman verify --all`")
    here: Literal["host", "cuda"] = "cuda" if torch.cuda.is_available() else "host"
    if record:
        grid, backend = "full", "cuda"
    dtypes = _dtypes(dtype)
    pairs, reports, unchecked = [], [], []
    for spec in _specs(names or [], None if backend == "auto" else backend):
        targets = _targets(spec, here) if backend == "auto" else [backend]
        if "cuda" in spec.targets and here == "host":
            types = dict.fromkeys(str(case.dtype).removeprefix("torch.") for case in spec.cases("cuda", grid))
            unchecked.append(f"{spec.name}: cuda: not checked, no GPU here ({', '.join(types)})")
        pairs += [(spec, target) for target in targets]
    with_cases = [pair for pair in pairs if _has(*pair, grid, dtypes)]
    for spec, target in with_cases or pairs:  # where none has such a case, `verify` says so
        progress = None if json else _progress(spec.name)
        report = run(spec, target, grid, dtypes, progress=progress, recorded=not record)
        reports.append(report)
        if not json:
            _print(report)
        if target in spec.targets and not report.unsuitable:
            verify_cache.save(spec, verify_cache.make(spec, report))
        if record and report.passed:
            for tensor, (was, now) in verify_cache.record_errors(spec, report).items():
                print(f"  {tensor}: the recorded error grew from {was:.2e} to {now:.2e}", file=sys.stderr)
    if json:
        print(dump([_as_dict(report) for report in reports]))
    for line in unchecked:
        print(line, file=sys.stderr if json else sys.stdout)
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
    from elman_core.kernels import toolchain

    if here == "cuda" and "cuda" in spec.targets:
        return ["cuda"]
    targets, compiled = list(spec.portable), [target for target in ("host", "cpu") if target in spec.targets]
    if compiled:
        try:
            toolchain.find_host_compiler()
            targets += compiled
        except KernelError as error:
            print(f"{spec.name}: {' and '.join(compiled)} are not checked: {error}", file=sys.stderr)
    return targets


def _specs(names: list[str], target: str | None, shared: bool = False) -> list[KernelSpec]:
    """The kernels of these names, or all that are installed if no name is given.

    Args:
        names: of variants, for all of their kernels that have the target, or of single kernels.
        target: a back end; None for kernels of any.
        shared: whether those that belong to no variant are taken along.
    """
    variants = {name: entry.variant for name, entry in list_variants().items()}
    common = _shared()
    installed = {s.name: s for s in (*(s for v in variants.values() for s in v.kernels), *common)}
    if not names:
        if not (specs := [s for s in installed.values() if _runs(s, target)]):
            raise KernelError(f"no installed variant has a {target or 'compiled'} kernel; see `elman list`")
        return specs
    chosen: dict[str, KernelSpec] = {}
    for name in names:
        if name in installed and name not in variants:
            chosen[name] = installed[name]
            continue
        variant = get_variant(name)
        if not variant.kernels:
            raise ConfigError(f"variant {variant.name!r} has no kernel: its reference runs")
        own = [s for s in variant.kernels if _runs(s, target)] or variant.kernels
        chosen |= {s.name: s for s in (*own, *(s for s in common if shared and _runs(s, target)))}
    return list(chosen.values())


def _runs(spec: KernelSpec, target: str | None) -> bool:
    return target is None or target in spec.backends


def _has(spec: KernelSpec, target: str, grid: Literal["quick", "full"], dtypes: list[Any]) -> bool:
    """Whether the kernel has a case of one of these dtypes; a variant's kernels do not all take the same."""
    return not dtypes or any(case.dtype in dtypes for case in spec.problems(target, grid))


def _shared() -> tuple[KernelSpec, ...]:
    """The kernels that belong to no variant."""
    from elman_core.kernels.causal_conv.op import Kernel
    from elman_core.kernels.decode.op import Shared

    return Shared().spec(), Kernel().spec()


def _dtypes(text: str) -> list[Any]:
    import torch

    for word in _words(text):
        if word not in DTYPES:
            raise ConfigError(f"no dtype {word!r}; use {', '.join(DTYPES)}")
    return [getattr(torch, DTYPES[word]) for word in _words(text)]


def _widths(text: str) -> list[int]:

    if wrong := [word for word in _words(text) if not word.isdigit()]:
        raise ConfigError(f"--width takes numbers with commas, not {wrong[0]!r}")
    return [int(word) for word in _words(text)]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _progress(name: str) -> Any:
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        sys.stderr.write(f"\r{name}: case {done} of {total}" + "\n" * (done == total))
        sys.stderr.flush()

    return show


def _print(report: Report) -> None:
    from elman_core.kernels.verify import failures

    verdict = "passed" if report.passed else "UNDECIDED" if "not judged" in _wrong(report) else "FAILED"
    checked = f"{report.name} on {report.target}, {report.grid} grid, {report.cases} cases"
    print(f"{checked}: {verdict}; worst case of each tensor:")
    heads = ("dtype", "tensor", "error", "largest", "same dtype", "recorded", "limit", "of limit", "verdict", "case")
    print(table([_cells(row) for row in report.worst()], heads))
    if left := report.left_out:
        print(f"  {len(left)} cases are left out, as this GPU is too small for them; the first: {left[0]}")
    for line in list(failures(report))[:10]:
        print(f"  {line}")


def _cells(row: Row) -> list[str]:
    given = (row.error, row.worst, row.reference, row.recorded, row.limit)
    numbers = ["-" if x is None else f"{x:.1e}" for x in given]
    cells = [row.dtype, row.tensor, *numbers, f"{row.ratio:.2f}", "ok" if row.passed else "WRONG"]
    kink = f", {row.kink:.2%} at a kink" if row.kink else ""
    return [*cells, f"{row.case}{kink}" + (f", usually {row.usual:.1f} times as large" if row.usual > 1 else "")]


def _as_dict(report: Report) -> dict[str, Any]:
    rows = [{**asdict(row), "ratio": row.ratio, "passed": row.passed} for row in report.rows]
    return {**asdict(report), "passed": report.passed, "rows": rows}
