"""`elman doctor`: rows of what, state (ok, missing, broken, …), what it is, and the line that fixes it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import elman_core
from elman_core.extension import (
    KINDS,
    ElmanError,
    dump,
    extensions,
    how_to_install,
    is_missing,
    one_line,
    plugins,
    print,
    table,
)

if TYPE_CHECKING:
    from elman_core.extension import KernelSpec

Row = dict[str, str]


def doctor(
    all_: Annotated[bool, typer.Option("--all", help="Show every plugin, extension, variant and kernel.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what this machine has, and how to fix what is missing."""
    sections = report()
    if json:
        print(dump(sections))
        return
    brief = []
    for title, rows in sections.items():
        shown = [[r["what"], r["state"], r["is"] + (f"  fix: {r['fix']}" if r["fix"] else "")] for r in rows]
        if all_:
            print(title)
            print(table(shown))
        fine = [f"{r['what']} {r['is'].partition(',')[0]}" for r in rows if r["state"] == "ok"]
        brief.append([title, ", ".join(fine) if title == "machine" else f"{len(fine)} ok"])
        brief += [["", " ".join(row)] for row in shown if row[1] != "ok"]
    if not all_:
        print(table(brief))
        print("elman doctor --all shows each of them")


def report() -> dict[str, list[Row]]:
    """Rows by section: machine, kernels, plugins, extensions, variants."""
    sections = {"machine": _machine(), "kernels": _kernels(), "plugins": _plugins(), "extensions": _extensions()}
    return sections | {"variants": _variants()}


def _row(what: str, state: str, is_: str, fix: str = "") -> Row:
    return {"what": what, "state": state, "is": is_, "fix": fix}


def _machine() -> list[Row]:
    import torch

    threads = torch.get_num_threads()
    rows = [
        _row("elman-core", "ok", elman_core.__version__),
        _row("python", "ok", f"{platform.python_version()}, {sys.executable}"),
        _row("platform", "ok", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"),
        _row("torch", "ok", f"{torch.__version__}, {threads} thread{'s' if threads > 1 else ''}"),
    ]
    for package in ("transformers", "safetensors", "schedulefree"):
        try:
            rows.append(_row(package, "ok", version(package)))
        except PackageNotFoundError:
            rows.append(_row(package, "missing", "", f"pip install {package}"))
    if torch.version.hip:
        rows.append(_row("GPU", "reference", f"ROCm {torch.version.hip}: plain PyTorch runs, without our kernels"))
    elif torch.cuda.is_available():
        rows += _gpus()
    elif torch.version.cuda:
        driver = _driver()
        here = "" if driver == "unknown" else f", although driver {driver} is here: it may be too old"
        rows.append(_row("GPU", "missing", f"torch for CUDA {torch.version.cuda} finds no GPU{here}", "nvidia-smi"))
    elif torch.backends.mps.is_available():
        rows.append(_row("GPU", "reference", "Apple MPS: plain PyTorch runs, without our kernels"))
    else:
        rows.append(_row("GPU", "none", "models run on the CPU"))
    return rows


def _gpus() -> list[Row]:
    import torch

    rows = []
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        is_ = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} SMs"
        if gpu.major < 8:
            rows.append(_row(f"GPU {i}", "too old", f"{is_}: kernels need sm_80 or newer, models run in plain PyTorch"))
        else:
            rows.append(_row(f"GPU {i}", "ok", is_))
    rows.append(_row("CUDA", "ok", f"torch for CUDA {torch.version.cuda}, driver {_driver()}"))
    return rows


def _driver() -> str:
    """Version of the NVIDIA driver as the kernel module reports it."""
    module = Path("/proc/driver/nvidia/version")
    words = module.read_text().split() if module.is_file() else []
    return next((w for w in words if w.count(".") >= 1 and w.replace(".", "").isdigit()), "unknown")


def _kernels() -> list[Row]:
    from elman_core.extension import find_host_compiler, find_nvcc, kernel_mode, python_include_dirs

    rows = []
    finders = {"nvcc": find_nvcc, "C++ compiler": find_host_compiler}
    finders |= {"Python.h": lambda: python_include_dirs()[0], "cache": _usable_cache}
    for what, find in finders.items():
        try:
            rows.append(_row(what, "ok", str(find())))
        except ElmanError as error:
            what_is, _, fix = str(error).partition("; ")
            rows.append(_row(what, "missing", what_is, fix))
    try:
        rows.append(_row("ELMAN_KERNELS", "ok", kernel_mode()))
    except ElmanError as error:
        rows.append(_row("ELMAN_KERNELS", "broken", str(error), "unset ELMAN_KERNELS"))
    return rows + _decoding()


def _usable_cache() -> Path:
    """The folder to which modules are compiled. Raises `KernelError` if it cannot be written or locked."""
    from elman_core.extension import locked, writable_cache

    folder = writable_cache()
    with locked(folder, "doctor"):
        return folder


def _decoding() -> list[Row]:
    """Whether the kernels that every model decodes with were verified; there are none without a GPU."""
    from elman_core.extension import DecodingKernels

    words = _stamps("", (DecodingKernels().spec(),))
    return [_row("decoding", "ok", words.removeprefix(", "))] if words else []


def _plugins() -> list[Row]:
    loaded = plugins()
    rows = [
        _row(o.package, "ok", f"{o.version}: {', '.join(v.name for v in o.variants)}") for o in loaded.owners.values()
    ]
    rows += [
        _row(b.package, "broken", f"{b.version}: {one_line(b.error)}",
             f"{how_to_install(b.package)} again, or leave it out: pip uninstall {b.package}")
        for b in loaded.broken
    ]  # fmt: skip
    rows += [
        _row(n.package, "left out", f"{n.version}: needs {n.needs}", how_to_install(n.needs)) for n in loaded.not_loaded
    ]
    return rows or [_row("none", "missing", "no plugin is installed", "elman new NAME writes one")]


def _extensions() -> list[Row]:
    rows = []
    for kind in KINDS:
        for name, points in extensions(kind).items():
            packages = " and ".join(f"{p.dist.name} {p.dist.version}" for p in points if p.dist)
            what = f"{kind.removesuffix('s')} {name}"
            rows.append(_row(what, "twice" if len(points) > 1 else "ok", packages))
    return rows


def _variants() -> list[Row]:
    loaded = plugins()
    rows = []
    for name, entry in sorted(loaded.installed.items()):
        if entry.needs:
            rows.append(_row(name, "needs", ", ".join(entry.needs), f"pip install {' '.join(entry.needs)}"))
            continue
        faster = entry.variant.installs(is_missing)
        try:
            is_ = f"backend {_backend(entry.variant)}{_stamps(name, entry.variant.kernels)}"
        except Exception as error:  # of its mixer
            rows.append(_row(name, "broken", one_line(error), f"pip uninstall {entry.package}, or mend its mixer"))
            continue
        rows.append(_row(name, "ok", is_, f"{'; '.join(faster)} (faster on a GPU)" if faster else ""))
    rows += [
        _row(name, "twice", "defined by " + " and ".join(i.package for i in both), f"ELMAN_PLUGINS={both[0].package}")
        for name, both in sorted(loaded.conflicts.items())
    ]
    return rows


def _backend(variant: Any) -> str:
    """Return the back end of a small mixer on the device that training would use."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        mixer = variant.branch(0)(128, variant.make_config())
    mixer = mixer.to_empty(device=device)
    return f"{mixer.to(torch.bfloat16).backend()} on {device}" if device == "cuda" else f"{mixer.backend()} on cpu"


def _stamps(name: str, specs: Sequence[KernelSpec]) -> str:
    """Whether kernels, as they are now, were verified on this machine; `name`: of the variant that they belong to."""
    import torch

    from elman_core.extension import KernelError, stamp

    words = []
    target: Literal["cuda", "host"] = "cuda" if torch.cuda.is_available() else "host"
    for spec in (s for s in specs if target in s.targets):
        which = f"{target} kernel" if spec.name == name else f"{target} kernel {spec.name}"
        try:
            last = stamp(spec, target)
        except KernelError as error:
            words.append(f"{spec.name}: {error}")
            continue
        if last is None:
            words.append(f"{which} not verified: elman verify {spec.name}")
        else:
            verdict = "verified" if last.passed else "WRONG by verification"
            words.append(f"{which} {verdict}, {last.grid} grid, {last.when[:10]}")
    return "".join(f", {w}" for w in words)
