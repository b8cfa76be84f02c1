"""Looking: `elman list`, `show`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import typing
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import elman_core
from elman_core.registry import ConfigError, ElmanError, how_to_install, plugins
from elman_core.registry.checks import is_missing, one_line
from elman_core.registry.plugins import GROUP, entry_points
from elman_core.registry.variant import is_of, range_text, type_name
from elman_core.storage import read_json, write_json

from ._text import columns, dump, print, table, wrapped
from .train import read_settings

if TYPE_CHECKING:
    from elman_core.registry import Resolved, Variant

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the variant.")]


def list_(json: Json = False) -> None:
    """List the installed variants, and what is broken or missing."""
    rows = _listed()
    if json:
        print(dump(rows))
        return
    if not rows:
        print("no plugin is installed; `elman new NAME` writes one")
        return
    cells = [[r["name"], r["package"], r["state"], r["summary"]] for r in rows]
    print(table(cells, ("variant", "package", "state", "")))
    for row in rows:
        for command in row.get("faster", ()):
            print(f"{row['name']} is faster on a GPU with: {command}")


def _listed() -> list[dict[str, Any]]:
    """The rows of `elman list`. Plugins import torch: while their files are the same, the rows come from the kernels' cache."""
    from elman_core.kernels.build import writable_cache

    rows = None
    key = _installation()
    with contextlib.suppress(ElmanError, OSError):  # without a cache every call loads the plugins
        kept = read_json(writable_cache() / "variants.json")
        rows = kept["rows"] if kept.get("key") == key and is_of(kept.get("rows"), list[dict]) else None
    if rows is None:
        rows = _loaded()
        with contextlib.suppress(ElmanError, OSError):
            if all(row["state"] == "ok" for row in rows):
                write_json(writable_cache() / "variants.json", {"key": key, "rows": rows})
    for row in rows:
        faster = row.pop("accelerated_by", {})
        needs = [module for module in row.pop("requires", ()) if is_missing(module)]
        if needs:
            row["state"] = f"needs {', '.join(needs)}"
        if row["state"] == "ok" or needs:
            row["faster"] = list(dict.fromkeys(how for module, how in faster.items() if is_missing(module)))
    return rows


def _installation() -> list[str]:
    """What decides which variants there are: the packages of plugins with their versions, and when their files were changed."""
    found = [elman_core.__version__, os.environ.get("ELMAN_PLUGINS", "all")]
    for point in entry_points(GROUP):
        spec = find_spec(point.module.partition(".")[0])
        files = [spec.origin] if spec and spec.origin else []
        if spec and spec.submodule_search_locations:
            found_in = (f for folder in spec.submodule_search_locations for f in Path(folder).rglob("*.py"))
            files = sorted(str(f) for f in found_in if f.is_file())  # not the lock of an editor, a link to nowhere
        mtime = max((os.stat(file).st_mtime_ns for file in files), default=0)
        found.append(f"{point.name} {point.value} {point.dist and point.dist.version} {len(files)} {mtime} {files[:1]}")
    return found


def _loaded() -> list[dict[str, Any]]:
    loaded = plugins()
    rows: list[dict[str, Any]] = [
        {"name": name, "package": i.requirement, "state": "ok", "summary": i.variant.summary,
         "presets": list(i.variant.presets), "requires": list(i.variant.requires),
         "accelerated_by": dict(i.variant.accelerated_by)}
        for name, i in loaded.installed.items()
    ]  # fmt: skip
    for name, both in loaded.conflicts.items():
        packages = " and ".join(i.package for i in both)
        rows += [
            {"name": name, "package": i.requirement, "state": "twice", "presets": [],
             "summary": f"defined by {packages}: uninstall one, or choose with ELMAN_PLUGINS={i.package}"}
            for i in both
        ]  # fmt: skip
    rows += [
        {"name": b.entry_point, "package": f"{b.package}=={b.version}", "state": "broken", "presets": [],
         "summary": one_line(b.error)}
        for b in loaded.broken
    ]  # fmt: skip
    rows += [
        {"name": n.entry_point, "package": f"{n.package}=={n.version}", "state": f"needs {n.needs}", "presets": [],
         "summary": f"made for another core: {how_to_install(n.needs)}"}
        for n in loaded.not_loaded
    ]  # fmt: skip
    return sorted(rows, key=lambda r: (str(r["name"]), str(r["package"])))


def show(
    name: Annotated[str, typer.Argument(help="NAME[:PRESET][@WIDTHxDEPTH], a pattern such as a*3+b, or a recipe")],
    sets: Sets = None,
    presets: Annotated[bool, typer.Option("--presets", help="List presets and other names, too.")] = False,
    json: Json = False,
) -> None:
    """Show a variant. Its equation, options with ranges, parameters and published figures; of a pattern, each variant in it."""
    from elman_core.nn.layers import resolve_pattern
    from elman_core.size import count
    from elman_core.training.recipes import find_recipe

    recipe, model = find_recipe(name), read_settings(name).model
    start = f"elman train {shlex.quote(name)} --data FILE"
    if recipe is not None and not model.variant:
        raise ConfigError(f"{name} is a recipe for any variant: {start} --set model.variant=NAME")
    text = model.variant if isinstance(model.variant, str) else "+".join(map(str, model.variant))
    layers = resolve_pattern(text, variant_options(sets, model.options))
    width, depth = model.hidden_size, model.num_hidden_layers
    if recipe is None and "@" not in name:
        depth = -(-depth // len(layers)) * len(layers)
    around = {"mlp_ratio": model.mlp_ratio, "tie_word_embeddings": model.tie_word_embeddings}
    sizes = {"width": width, "depth": depth, "parameters": count(layers, width, depth, **around)}
    several = {(layer.name, str(layer.options)): layer for layer in layers}
    each = [_facts(layer, width) for layer in several.values()]
    if json:
        whole = each[0] if len(layers) == 1 else {"name": text, "layers": each}
        print(dump(whole | sizes | ({"recipe": str(recipe)} if recipe else {})))
        return
    if recipe is not None:
        print(f"{name}: a recipe, which trains {text}@{width}x{depth}\n  {start}\n  {recipe}\n")
    for layer, facts in zip(several.values(), each, strict=True):
        variant = layer.variant
        print(f"{layer.name}: {facts['summary']}\n  {facts['package']}")
        print("\nequation")
        print("\n".join(wrapped(f"  {line.strip()}", columns()) for line in facts["equation"].splitlines()))
        print("\noptions")
        rows = [
            [o["name"], str(o["value"]), f"{o['help']} ({', '.join(filter(None, (o['type'], o['range'])))})"]
            for o in facts["options"]
        ]
        print(table(rows) or "  none")
        if variant.published:
            print("\npublished")
            known = variant.published
            print(table([[p.model, f"{p.parameters:,}" if p.parameters else "", p.figures, p.note] for p in known]))
        if presets:
            _print_presets(variant)
        elif variant.presets or variant.aliases:
            if variant.recommended and layer.preset != variant.recommended:
                best = variant.recommended
                print(f"\nrecommended: {variant.name}:{best}")
                print(wrapped(f"  {_spelled(variant.presets[best])}", columns()))
                print(wrapped(f"  {variant.equation_of(variant.make_config(preset=best))}", columns()))
            counts = _counted(variant.presets, "preset") + _counted(variant.aliases, "other name")
            print(f"\n{' and '.join(counts)}: elman show {variant.name} --presets")
        print(f"\nparameters of a layer at width {width}\n  {facts['layer']:,}\n")
    print(f"parameters at {width}x{depth}\n  {sizes['parameters']:,}")


def _print_presets(variant: Variant) -> None:
    print("\npresets")
    mark = {variant.recommended: ", recommended"}
    named = [[f"{variant.name}:{p}{mark.get(p, '')}", _spelled(v)] for p, v in variant.presets.items()]
    print(table(named) or "  none")
    print("\nother names")
    print(table([[alias, _spelled(target, variant)] for alias, target in variant.aliases.items()]) or "  none")


def _counted(some: Mapping[str, Any], what: str) -> list[str]:
    if not some:
        return []
    return [f"1 {what}" if len(some) == 1 else f"{len(some)} {what}s"]


def _spelled(target: Any, variant: Variant | None = None) -> str:
    if isinstance(target, str) and variant is not None:
        return f"{variant.name}:{target}" if target else variant.name
    if isinstance(target, str):
        return target
    return ", ".join(f"{k}={v}" for k, v in target.items()) or "the defaults"


def _facts(resolved: Resolved, width: int) -> dict[str, Any]:
    from elman_core.size import count

    variant = resolved.variant
    hints = typing.get_type_hints(variant.config)
    return {
        "name": variant.name, "preset": resolved.preset, "package": resolved.installed.requirement, "summary": variant.summary,
        "equation": variant.equation_of(resolved.config),
        "layer": count([resolved], width, 2) - count([resolved], width, 1),
        "options": [
            {"name": f.name, "type": type_name(hints[f.name]), "range": range_text(f.metadata), "default": f.default,
             "value": getattr(resolved.config, f.name), "help": f.metadata.get("help", "")}
            for f in dataclasses.fields(variant.config)
        ],
        "recommended": variant.recommended, "presets": {k: dict(v) for k, v in variant.presets.items()},
        "aliases": {k: v if isinstance(v, str) else dict(v) for k, v in variant.aliases.items()},
        "published": [dataclasses.asdict(p) for p in variant.published],
        "requires": list(variant.requires), "accelerated_by": list(variant.accelerated_by), "branches": variant.branches,
    }  # fmt: skip


def variant_options(sets: list[str] | None, given: Any = None) -> Any:
    """Options from `--set expansion=2` or, as in a recipe, `--set model.options.expansion=2`, and behind them those `given`."""
    from elman_core.training.settings import apply_sets

    prefix = "model.options."
    named = [text if text.startswith(prefix) else prefix + text for text in sets or ()]
    return apply_sets({"model": {"options": given or {}}}, named)["model"]["options"]
