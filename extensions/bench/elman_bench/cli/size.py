"""`elman size`: how wide or deep a model with so many parameters is."""

from __future__ import annotations

from typing import Annotated

import typer

from elman_core.extension import dump, print, table, variant_options

SHOWN = 4  # candidates around a target; the list over all widths is shown whole


def size(
    name: Annotated[str, typer.Argument(help="NAME[:PRESET], or a pattern such as a*3+b.")],
    params: Annotated[str, typer.Option(help="Number of parameters: 100M, 1.3B, 480_000.")],
    depth: Annotated[int | None, typer.Option(min=1, help="Number of layers; finds the width.")] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Width; finds the depth.")] = None,
    multiple: Annotated[int, typer.Option(min=1, help="The width is a multiple of this.")] = 128,
    mlp_ratio: Annotated[float, typer.Option(min=0, max=16, help="Width of a SwiGLU / width of the model.")] = 0.0,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the variant.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the width or depth for a given number of parameters. They are counted exactly, on the meta device.

    Without --depth and --dim, list every width that comes within 2 % at some depth. If no multiple of 128 does, multiples of
    64, 32, 16 and 8 are tried.
    """
    from elman_bench.size import candidates, nothing_fits, parse_parameters
    from elman_core.extension import resolve_pattern

    options = variant_options(sets)
    layers = resolve_pattern(name, options)
    title, full = layers[0].name, layers[0].options
    if len(layers) > 1:
        title, full = name, {layer.name: layer.options for layer in layers}
    target = parse_parameters(params)
    sizes = candidates(name, options, target, depth=depth, width=dim, multiple=multiple, mlp_ratio=mlp_ratio)
    if depth is not None or dim is not None:
        sizes = sizes[:SHOWN]
    if json:
        found_sizes = [{**vars(s), "aligned": s.aligned, "fits": s.fits} for s in sizes]
        print(dump({"name": title, "options": full, "target": target, "candidates": found_sizes}))
        return
    print(f"{title}, {target:,} parameters")
    rows = [
        [str(s.width), str(s.depth), f"{s.parameters:,}", f"{100 * s.off:+.2f} %", str(s.aligned),
         "" if s.fits else "more than 2 % off"]
        for s in sizes
    ]  # fmt: skip
    print(table(rows, ("width", "depth", "parameters", "off", "multiple of", "")))
    if not sizes[0].fits:
        print(nothing_fits(name, options, target, sizes, multiple, mlp_ratio=mlp_ratio))
