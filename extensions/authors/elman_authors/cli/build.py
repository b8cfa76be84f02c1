"""`elman build`: kernels, ahead of their first use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from elman_core import ConfigError, get_variant, list_variants
from elman_core.extension import DTYPES, KernelError, dump, print, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elman_core.extension import KernelSpec

NAMES_HELP = "Variants, or kernels as `verify` names them (decode, causal_conv: shared by all models); all if none."
"""Of the argument that `chosen_kernels` takes."""


def build(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|MODEL]...",
            help="NAME[:PRESET]@WIDTHxDEPTH, a recipe, run or checkpoint: exactly what training and decoding it launch, at any "
            f"batch size. {NAMES_HELP}",
        ),
    ] = None,
    arch: Annotated[str, typer.Option(help="GPU architectures, as in sm_80,sm_90; by default this machine's.")] = "",
    width: Annotated[str, typer.Option(help="Inner widths, as in 1024,1536; by default the usual ones.")] = "",
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, separated by commas; by default bf16.")] = "",
    grid: Annotated[
        Literal["quick", "full"] | None,
        typer.Option(
            help="What `elman verify --grid` runs, in all its dtypes or in --dtype, instead of the usual sizes."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to fill; by default the cache.")] = None,
    backend: Annotated[
        Literal["cuda", "cpu", "host"], typer.Option(help="cpu: of this machine. host: the C++ build that tests use.")
    ] = "cuda",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be compiled; compile nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile kernels ahead of their first use. For GPUs of other machines, copy the folder and point ELMAN_CACHE to it."""
    from elman_authors import grids
    from elman_core.extension import build_kernels, cache_dirs, launcher, local_arch, modules_of

    widths, dtypes = _widths(width), chosen_dtypes(dtype)
    if arch and backend != "cuda":
        raise ConfigError(f"--arch names GPUs: --backend {backend} is of this machine")
    given = [name for name in names or [] if name not in list_variants()]  # a plugin's folder may bear its name
    models = [name for name in given if _is_model(name)]
    if models and backend != "cuda":
        raise ConfigError(f"--backend {backend} builds variants, not the model {models[0]}")
    if models and (widths or grid):
        option = "--width" if widths else "--grid"
        raise ConfigError(
            f"{models[0]} says which sizes it launches: leave {option} out, or give it with variants alone"
        )
    if widths and grid:
        raise ConfigError("--grid has sizes of its own: leave --width out")
    wanted = [found for model in models for found in _launched(model, _words(arch), dtypes)]
    rest = [name for name in names or [] if name not in models]
    for spec in chosen_kernels(rest, backend, shared=True) if rest or not models else ():
        if not _runs(spec, backend):
            raise KernelError(f"{spec.name} has no back end {backend!r}; it has: {', '.join(spec.targets)}")
        bare = spec.extension(backend)
        for one in _words(arch) or [local_arch(bare)]:
            extensions: Sequence[Any] = [bare]
            if grid is not None and spec.module is not None:
                extensions = modules_of(spec, backend, grids.problems(spec, backend, grid, dtypes))
            elif spec.builds is not None:
                extensions = spec.builds(backend, one, widths, dtypes)
            wanted += [(spec.name, one, extension) for extension in extensions]
    calls = launcher()  # what calls them all, for the Python and the machine that this is
    wanted.append(("launcher", local_arch(calls), calls))
    wanted = list(dict.fromkeys(wanted))
    if dry_run:
        paths = [(out or cache_dirs()[0]) / extension.file_name(one) for _, one, extension in wanted]
    else:
        paths = build_kernels([(extension, one) for _, one, extension in wanted], out)
    built = [
        {"kernel": name, "module": extension.name, "arch": one, "path": str(path)}
        for (name, one, extension), path in zip(wanted, paths, strict=True)
    ]
    print(dump(built) if json else table([[b["module"], b["arch"], b["path"]] for b in built]))


def _is_model(name: str) -> bool:
    return "@" in name or name.startswith("pretrained/") or _is_recipe(name) or Path(name).exists()


def _is_recipe(name: str) -> bool:
    """Whether it is a recipe's file, or the name of one that is shipped."""
    from elman_core.extension import find_recipe

    if name.endswith(".toml"):
        return True
    is_path = "/" in name or "." in name
    return not is_path and find_recipe(name) is not None


def _launched(model: str, archs: list[str], dtypes: list[Any]) -> list[tuple[str, str, Any]]:
    """(kernel, architecture, extension) of all that a model launches: its forward on the meta device says what it asks for."""
    import torch

    from elman_core import LadderConfig, LadderForCausalLM, find_checkpoint
    from elman_core.extension import asking, build_model, builds, read_settings

    with torch.device("meta") as meta:
        if _is_recipe(model) or ("@" in model and not Path(model).exists()):
            ladder = build_model(read_settings(model), meta)
        else:
            ladder = LadderForCausalLM(LadderConfig.from_pretrained(find_checkpoint(model)))
        tokens = torch.zeros(2, 9, dtype=torch.int64)
    with asking() as asked:
        for dtype in dtypes or [torch.bfloat16]:
            ladder.to(dtype)(tokens)
            with torch.inference_mode():
                cache = ladder(tokens, use_cache=True).past_key_values
                ladder(tokens[:, :1], past_key_values=cache)
    if not archs and not torch.cuda.is_available():
        raise ConfigError("no GPU here: name one, as in --arch sm_90; for this CPU, give variants and --backend cpu")
    archs = archs or ["sm_{}{}".format(*torch.cuda.get_device_capability())]
    return [(problem[0], arch, e) for problem in asked for arch in archs for e in builds(problem, arch)]


def chosen_kernels(names: list[str], target: str | None, shared: bool = False) -> list[KernelSpec]:
    """The kernels of these names, or all that are installed if no name is given.

    Args:
        names: of variants, for all of their kernels that have the target, or of single kernels.
        target: a back end; None for kernels of any.
        shared: whether those that belong to no variant are taken along.
    """
    from elman_core.extension import ConvolutionKernel, DecodingKernels

    variants = {name: entry.variant for name, entry in list_variants().items()}
    common = DecodingKernels().spec(), ConvolutionKernel().spec()
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


def chosen_dtypes(text: str) -> list[Any]:
    import torch

    for word in _words(text):
        if word not in DTYPES:
            raise ConfigError(f"no dtype {word!r}; use {', '.join(DTYPES)}")
    return [getattr(torch, DTYPES[word]) for word in _words(text)]


def _widths(text: str) -> list[int]:
    if wrong := [word for word in _words(text) if not word.isdecimal()]:
        raise ConfigError(f"--width takes numbers with commas, not {wrong[0]!r}")
    return [int(word) for word in _words(text)]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
